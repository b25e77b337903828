"""Partitioned graphs -> the same with crossing tensors stored compressed. Never chooses.

A tensor is packed after its last use in the forward and unpacked before its first use in the
backward, so that the whole of it exists on neither side in between. What is kept of it may go to
host memory there; it is fetched back while the one before it is used.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import SavedForBackwardsAOTOutput

from hot_compile.passes.base.emit import Emitter, fake_mode, fake_result, refresh
from hot_compile.passes.base.graph import (
    CHANNEL_DIM,
    aten,
    is_ours,
    made_of_tangents,
    placeholders,
    returned,
    strip,
    value_of,
    walk,
)
from hot_compile.passes.base.operators import CASTS, IN_ORDER, VIEWS
from hot_compile.passes.base.schemes import Scheme, Unit
from hot_compile.passes.storage.affine import fold_channel_steps
from hot_compile.passes.storage.around import Sample
from hot_compile.passes.storage.crossers import Crosser, saved_pairs
from hot_compile.passes.storage.layout import Layout, in_memory, is_marked, layout_of, step_of
from hot_compile.passes.storage.masks import Mask
from hot_compile.passes.storage.pack import pack, unpack, unpack_mask
from hot_compile.passes.storage.prices import fuses
from hot_compile.passes.storage.readers import kept_dims
from hot_compile.passes.storage.vectors import in_forward
from hot_compile.runtime.host_copies import LANES

hot = torch.ops.hot
_LANE = 1
"""Place of ``to_host``'s argument."""


def store(
    forward: fx.Graph,
    backward: fx.Graph,
    num_fwd_outputs: int,
    chosen: Mapping[Crosser, Scheme],
    hosted: Set[Crosser] = frozenset(),
) -> dict[Crosser, tuple[Scheme, tuple[fx.Node, ...]]]:
    """Store every crossing tensor of ``chosen`` by its scheme, those of ``hosted`` on the host.

    Both graphs change in place. Returns for each of them what the forward keeps in its place.
    """
    edit = _Edit(forward, backward, num_fwd_outputs, {c.saved for c in chosen.keys() | hosted})
    carried = {c.own_mask for c, scheme in chosen.items() if scheme is not scheme.plain}
    slots: dict[Crosser, tuple[Scheme, list[Any]]] = {}
    exact = sorted(hosted - chosen.keys(), key=lambda crosser: crosser.saved)
    for crosser, scheme in (*chosen.items(), *((c, Scheme.EXACT) for c in exact)):
        host = crosser in hosted
        if scheme is Scheme.EXACT and not host:
            continue
        for mask in crosser.masks if scheme is not Scheme.EXACT else ():
            if mask not in carried:
                edit.keep_mask(mask, crosser, host)
        slots[crosser] = scheme, edit.replace(crosser, scheme, host)
    edit.finish()
    return {crosser: (scheme, tuple(slot)) for crosser, (scheme, slot) in slots.items()}


class _Edit:
    """The forward's outputs and the backward's placeholders, changed in step."""

    def __init__(
        self, forward: fx.Graph, backward: fx.Graph, num_fwd_outputs: int, leave: Set[fx.Node]
    ) -> None:
        """``leave``: what the forward will not save as it is."""
        self._forward, self._backward = forward, backward
        self._user_outputs = num_fwd_outputs
        self._output = forward.output_node()
        saved = returned(forward)[num_fwd_outputs:]
        self._slots: list[list[Any]] = [[value] for value in saved]
        self._slot_of = dict(zip(saved, self._slots, strict=True))
        pairs = saved_pairs(forward, backward, num_fwd_outputs, set(placeholders(forward)))
        self._arriving = {strip(s, IN_ORDER): there for s, there in pairs if s not in leave}
        self._masks: set[Mask] = set()
        self._restored: list[tuple[fx.Node, fx.Node]] = []
        """A value of the backward, and the last of what the forward gives for it."""
        self._there = dict(pairs)
        """The backward's placeholders of what the forward gives it."""

    def replace(self, crosser: Crosser, scheme: Scheme, host: bool) -> list[Any]:
        """Save ``crosser`` as ``scheme``; not at all if its masks were all that was wanted.

        ``host``: in host memory. What is given for it is in the list when the edit is finished.
        """
        slot, arriving = self._slot_of[crosser.saved], crosser.restored
        slot.remove(crosser.saved)
        if arriving.users:
            mask = None if scheme is scheme.plain else crosser.own_mask
            given = crosser.saved, arriving, arriving
            slot += self._store(*given, scheme, host, mask, crosser.sample or ())
        self._backward.erase_node(self._there.pop(crosser.saved))
        return slot

    def keep_mask(self, mask: Mask, beside: Crosser, host: bool) -> None:
        """Make the backward's comparison in the forward instead, and save its bits."""
        if mask in self._masks:
            return  # another tensor it is recomputed from was stored before
        self._masks.add(mask)
        compared = mask.compared
        place = max(_after_last_use(compared), *_behind(mask))
        made = _make(mask, Emitter(self._forward, place, compared))
        bits = isinstance(layout_of(made.meta["val"], Scheme.BITS), Layout)
        scheme = Scheme.BITS if bits else Scheme.EXACT
        kept = self._store(made, mask.node, beside.restored, scheme, host)
        self._slot_of[beside.saved] += kept
        _erase(mask)

    def _store(
        self,
        saved: fx.Node,
        wanted: fx.Node,
        beside: fx.Node,
        scheme: Scheme,
        host: bool,
        mask: Mask | None = None,
        sample: Sample = (),
    ) -> tuple[fx.Node, ...]:
        """Pack ``saved`` in the forward and give the users of the backward's ``wanted`` its value.

        The users of ``mask``'s comparison get what the same bytes hold of it. New placeholders go
        before ``beside``. Returns what the forward must return.
        """
        place = _after_last_use(saved)
        place = place if mask is None else max(place, *_behind(mask))
        emit = Emitter(self._forward, place, saved)
        stored = in_order(emit, saved)
        mean = _known_mean(saved, place) if scheme.spec.unit is Unit.CHANNEL else None
        own = None if mask is None else _make(mask, emit)
        parts = pack(emit, stored, scheme, own, mean, sample)
        there = () if mean is None or mean not in self._arriving else (self._arriving[mean],)
        parts = parts[: len(parts) - len(there)]  # the backward has the mean anyway
        if host:
            parts = emit.parts(emit(hot.to_host.default, list(parts), 0))
        arriving = tuple(self._placeholder(part, beside) for part in parts)
        emit = Emitter(self._backward, min(wanted.users), wanted)
        if host:
            arriving = self._fetched(emit, arriving, stored.meta["val"].device)
        value = unpack(emit, (*arriving, *there), stored.meta["val"], scheme)
        wanted.replace_all_uses_with(value)
        self._restored.append((value, parts[-1]))
        if mask is not None:
            outcome = unpack_mask(emit, arriving[0], stored.meta["val"], scheme)
            mask.node.replace_all_uses_with(outcome)
            _erase(mask)
            self._restored.append((outcome, parts[-1]))
        return parts

    def _fetched(
        self, emit: Emitter, kept: tuple[fx.Node, ...], device: torch.device
    ) -> tuple[fx.Node, ...]:
        """What waits in host memory, on ``device`` again."""
        coming = emit(hot.fetch.default, list(kept), device, [])
        return emit.parts(emit(hot.arrive.default, coming, list(kept), device, []))

    def _take_turns(self) -> None:
        """Copies to the host by turns; each is fetched back before the one before it is awaited.

        The first one is when the backward begins. They depend on nothing but the backward's inputs,
        so Inductor would have all of them at its beginning: each is told what it comes behind.
        """
        for place, sent in enumerate(_calls(self._forward, hot.to_host.default)):
            sent.update_arg(_LANE, place % LANES)
        arrivals = _calls(self._backward, hot.arrive.default)
        if not arrivals:
            return
        coming = [arrival.all_input_nodes[0] for arrival in arrivals]
        placeholders(self._backward)[-1].append(coming[0])
        gradients = made_of_tangents(self._backward)
        for arrival, following in zip(arrivals, [*coming[1:], None], strict=True):
            behind = _made_before(arrival, gradients)
            if following is not None:
                arrival.prepend(following)
                _come_behind(following, behind)
                behind = [*behind, following]
            _come_behind(arrival, behind)

    def _placeholder(self, part: fx.Node, beside: fx.Node) -> fx.Node:
        with self._backward.inserting_before(beside):
            node = self._backward.placeholder(part.name)
        node.target = node.name  # the name is made unique, the target is what code is made from
        node.meta = {"val": part.meta["val"]}
        self._there[part] = node
        return node

    def finish(self) -> None:
        """Write the forward's outputs; bring fake values and both graphs up to date."""
        self._take_turns()
        views = self._backward.find_nodes(op="call_function", target=aten.view.default)
        for view in views:  # what it reads may have changed its layout; Inductor does the same
            view.target = aten.reshape.default
        refresh([*(value for value, _ in self._restored), *self._copied_again()])
        given = {there: part for part, there in self._there.items()}
        for value, part in self._restored:
            for vector in fold_channel_steps(value, given):
                self._work_out_in_forward(vector, part, given)
        self._write_outputs()
        for graph in (self._forward, self._backward):
            graph.eliminate_dead_code()
            graph.lint()

    def _work_out_in_forward(
        self, vector: fx.Node, beside: fx.Node, given: Mapping[fx.Node, fx.Node]
    ) -> None:
        """Save ``vector`` of the backward, too, where the forward can make it, behind ``beside``;
        see ``vectors.py``."""
        made = in_forward(strip(vector, {aten.as_strided.default}), given)
        if made is not None:
            slot = next(slot for slot in self._slots if beside in slot)
            slot.insert(slot.index(beside) + 1, made)
            vector.replace_all_uses_with(self._placeholder(made, self._there[beside].next))

    def _write_outputs(self) -> None:
        seen_by_user = returned(self._forward)[: self._user_outputs]
        saved = [value for slot in self._slots for value in slot]
        self._output.args = (tuple(seen_by_user + saved),)
        if "desc" in self._output.meta:
            described = list(self._output.meta["desc"])[: self._user_outputs]
            described += [SavedForBackwardsAOTOutput(index) for index in range(len(saved))]
            self._output.meta["desc"] = described

    def _copied_again(self) -> list[fx.Node]:
        """Copies of images that the backward makes anew, laid out as Inductor lays the forward's.

        It does not heed what a copy asks for there; but of what a convolution's backward reads it
        heeds the strides, which would be those of the copy. What passes added to the backward may
        have the name of something else in the forward.
        """
        copies = self._backward.find_nodes(op="call_function", target=aten.clone.default)
        marked = {node.name: value_of(node) for node in self._forward.nodes if is_marked(node)}
        copies = [c for c in copies if c.name in marked and _alike(value_of(c), marked[c.name])]
        for copy in copies:
            copy.update_kwarg("memory_format", torch.channels_last)
            copy.meta["val"] = fake_result(copy, fake_mode(copy))
        return copies


def _alike(value: torch.Tensor, other: torch.Tensor) -> bool:
    return value.shape == other.shape and value.dtype is other.dtype


def _come_behind(node: fx.Node, others: Sequence[fx.Node]) -> None:
    """Let a ``fetch`` or ``arrive`` depend on ``others``, by its last argument."""
    node.update_arg(len(node.args) - 1, list(others))


def _made_before(place: fx.Node, gradients: Set[fx.Node]) -> list[fx.Node]:
    """The last of ``gradients`` before ``place`` that is in memory anyway, if there is one.

    Not of the layer that ``place`` is for: it is to be on its way while that is computed.
    """
    node = place.prev
    while node.op == "call_function":
        same = node.meta.get("seq_nr") == place.meta.get("seq_nr")
        if node in gradients and not same and _in_memory_anyway(node):
            return [node]
        node = node.prev
    return []


def _in_memory_anyway(node: fx.Node) -> bool:
    """No kernel of Inductor's makes it, nor only our own ones read it."""
    maker = node.args[0] if node.target is operator.getitem else node
    assert isinstance(maker, fx.Node)
    alone = not fuses(maker) and maker.target not in VIEWS
    leaves = not all(map(is_ours, node.users))
    return alone and leaves and isinstance(node.meta.get("val"), torch.Tensor)


def _calls(graph: fx.Graph, op: Any) -> list[fx.Node]:
    return sorted(graph.find_nodes(op="call_function", target=op))


def _make(mask: Mask, emit: Emitter) -> fx.Node:
    """``mask``, in the forward."""
    made: dict[Any, Any] = dict(mask.operands)
    made |= {n: in_order(emit, there) for n, there in mask.operands if there is mask.compared}
    for part, target, arguments in mask.steps:
        made[part] = emit(target, *(made[a] if isinstance(a, fx.Node) else a for a in arguments))
    return made[mask.node]  # type: ignore[no-any-return]


def _behind(mask: Mask) -> list[fx.Node]:
    """Places behind each value that it is made of."""
    return [there.next for _, there in mask.operands]


def _erase(mask: Mask) -> None:
    """From the backward, with what it alone was made of."""
    for part in sorted(mask.parts, reverse=True):
        if not (part.users or part._erased):
            part.graph.erase_node(part)


def in_order(emit: Emitter, node: fx.Node) -> fx.Node:
    """``node``, its strides as they will be in memory: a copy in the graph, but not in the code.

    Parts that take turns along a row are read from memory: Inductor would work the whole row out
    for each of them, and if a bias is gathered there, with a division for every element.
    """
    if step_of(node.meta["val"]) > 1:
        return _read_apart(emit, node)
    if in_memory(node).stride() == node.meta["val"].stride():
        return node
    return emit(aten.clone.default, node, memory_format=torch.channels_last)


def _read_apart(emit: Emitter, part: fx.Node) -> fx.Node:
    whole, value = strip(part, VIEWS), value_of(part)
    start = value.storage_offset() - value_of(whole).storage_offset()
    numbers = *value.shape, *value.stride(), start
    if not all(isinstance(n, int) for n in numbers):
        return part  # sizes known at run time only are no arguments
    place = list(value.shape), list(value.stride()), start
    return emit(aten.as_strided.default, whole, *place)


def _after_last_use(node: fx.Node) -> fx.Node:
    """The place behind the last reader of ``node``'s memory, its views' readers included."""
    same = walk([strip(node, VIEWS)], lambda n: (u for u in n.users if u.target in VIEWS))
    readers = (user for view in same for user in view.users if user.op != "output")
    return max([node, *readers]).next


def _known_mean(image: fx.Node, place: fx.Node) -> fx.Node | None:
    """The mean of ``image`` by channel, in fp32, if a batch norm found it before ``place``."""
    for reader in (image, *(user for user in image.users if user.target in CASTS)):
        for norm in reader.users:
            if norm.target is not aten.var_mean.correction or kept_dims(norm) != {CHANNEL_DIM}:
                continue
            for part in norm.users:
                value = part.meta["val"]
                if part.args[1] == 1 and part < place and value.dim() == image.meta["val"].dim():
                    return part if value.dtype is torch.float32 else None
    return None
