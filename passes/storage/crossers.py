"""Which tensors cross from forward to backward, and what each may be stored as. Read-only.

A tensor that some reader is not known to tolerate rounded stays exact, with the reason as text.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Set

import torch
from torch import fx

from hot_compile.passes.base.graph import (
    as_made,
    aten,
    closure,
    is_ours,
    module_path,
    named_inputs,
    placeholders,
    returned,
    strip,
)
from hot_compile.passes.base.operators import (
    BATCHED_PRODUCTS,
    CASTS,
    FLOATS,
    REDUCTIONS,
    SIXTEEN_BITS,
    SPLITS,
    VIEWS,
    is_layer_product,
    is_pointwise,
)
from hot_compile.passes.base.schemes import Kind, Scheme
from hot_compile.passes.base.site import bytes_of, elements_of, hint
from hot_compile.passes.layers.match import GraphInputs
from hot_compile.passes.storage.around import Sample, sample_of
from hot_compile.passes.storage.bounds import is_normalised, is_probability, is_saturated
from hot_compile.passes.storage.layout import in_memory, layout_of, packed_bytes
from hot_compile.passes.storage.masks import Mask, mask_of
from hot_compile.passes.storage.offers import EXACT, Need, offers
from hot_compile.passes.storage.readers import Reading, facts, read

UNCHECKED = "saved_tensor_with_no_vc_check"
"""Metadata of what a custom autograd function saves: autograd keeps it in places of its own."""
_UNBOUNDED = "meets a softmax, and no norm bounds what it is made of"
_BEHIND = "meets a softmax behind more than a multiplication: no bound is known"
_UNSEEN = "meets a softmax, and inside CUDA graphs nobody compares gradients"

_SAME_VALUES = VIEWS | CASTS | SPLITS.keys() | {operator.getitem}
"""Operators that make no new values: views, parts, casts."""


@dataclasses.dataclass(frozen=True)
class Crosser:
    """A tensor the forward saves, and how coarsely it may be stored."""

    saved: fx.Node
    """In the forward: what is saved."""
    restored: fx.Node
    """In the backward: the placeholder it arrives as."""
    schemes: tuple[Scheme, ...]
    """What it may be stored as, finest first; only ``exact`` where ``reason`` says why."""
    reason: str = ""
    by_measure: tuple[Scheme, ...] = ()
    """Others, for what was measured: finer, or around what samples have in common."""
    sample: Sample | None = None
    """Where it has the samples of a batch, if it has."""
    kind: Kind = Kind.RELATIVE
    """What its readers need."""
    feeds_product: bool = False
    """A layer's product reads it as it is: the x of the paper's ABC."""
    norm: bool = False
    """A norm's backward sums over its rows, or (of a region's boundary) no layer but an embedding
    made it: what the first block's gradients lose by fewer bits is ten times the others' loss."""
    masks: tuple[Mask, ...] = ()
    """Their outcome is worth its own bits: a rounded value may fall on the other side."""
    own_mask: Mask | None = None
    """One of them, laid out as it is, that no other tensor has as its own."""
    otherwise: int | None = None
    """Bytes that are kept if it is not stored, where these are others than its own."""

    @property
    def name(self) -> str:
        """The forward node's name."""
        return self.saved.name

    @property
    def measurable(self) -> tuple[Scheme, ...]:
        """What it may be stored as if that was measured, finest first."""
        others = (s for s in self.by_measure if s not in self.schemes)
        return tuple(sorted((*self.schemes, *others), key=self.held, reverse=True))

    def held(self, scheme: Scheme) -> int:
        """Bytes of it stored so, without masks; sizes by hint."""
        return packed_bytes(in_memory(self.saved), scheme, self.sample or ())

    @property
    def module(self) -> str:
        """Path of the module that made it, '' if unknown."""
        return module_path(self.saved) or ""


class Judge:
    """Says of any pair of a forward's and a backward's node how the pair may be stored.

    Args:
        forward, backward: what the partitioner made.
        inputs: which of the forward's placeholders are parameters.
        smallest: tensors of fewer bytes are not worth a kernel.
        seen: gradients may be compared with exact ones, and the graph compiled again.
    """

    def __init__(
        self,
        forward: fx.Graph,
        backward: fx.Graph,
        inputs: GraphInputs,
        smallest: int,
        seen: bool = True,
    ) -> None:
        self._smallest, self._seen = smallest, seen
        self._activations = _activations(forward, inputs)
        self.given = frozenset(named_inputs(forward, inputs.made))
        """Inputs that another graph made, and nobody but autograd may keep."""
        layers = _layers(forward, self._activations)
        embeddings = forward.find_nodes(op="call_function", target=aten.embedding.default)
        self._learned = closure([*self.given, *layers, *embeddings])
        self._mixed = closure(layers)
        self._forward = {node.name: node for node in forward.nodes}
        names = {node.name for node in self._activations}
        heads = {node.name for node in self._activations if is_packed(node)}
        made = _made_of_products(forward, self._activations, layers)
        factors = _factors(forward, layers)
        self.facts = facts(backward, names, heads, made, factors, self._forward)

    def __call__(
        self, saved: fx.Node, restored: fx.Node, cuts: Set[fx.Node] = frozenset()
    ) -> Crosser:
        """The pair as a Crosser; masks are not given away yet.

        ``cuts``: recomputed values that will be saved, too.
        """
        why = self.unfit(saved)
        if why:
            return Crosser(saved, restored, EXACT, why)
        if saved.meta["val"].dtype is torch.bool:
            layout = layout_of(in_memory(saved), Scheme.BITS)
            if isinstance(layout, str):
                return Crosser(saved, restored, EXACT, layout)
            return Crosser(saved, restored, (Scheme.EXACT, Scheme.BITS))
        reading = read(restored, self.facts, cuts)
        need = self._need(saved, reading)
        sample = sample_of(saved, in_memory(saved))
        offered = offers(saved, need, sample)
        return Crosser(
            saved,
            restored,
            offered.schemes,
            offered.reason,
            offered.by_measure,
            sample=sample,
            kind=need.kind,
            feeds_product=reading.product,
            norm=saved not in self._mixed if reading.region else reading.rows,
            masks=() if offered.reason else tuple(mask_of(n, self._forward) for n in reading.masks),
        )

    def _need(self, saved: fx.Node, reading: Reading) -> Need:
        """What ``saved``'s readers need of it."""
        if reading.refusal:
            return Need(reason=reading.refusal)
        if saved in self.given and not reading.region:
            return Need(reason="an input")
        if reading.region and saved not in self._learned:
            return Need(reason="a mask or positions: no layer made it")
        softmax = is_probability(saved)
        bounded = softmax or is_normalised(saved, self._activations)
        if reading.fine and not (bounded and reading.chain.plain and self._seen):
            why = _BEHIND if bounded else _UNBOUNDED
            return Need(reason=why if self._seen else _UNSEEN)
        if reading.attended and not self._seen:
            return Need(reason=_UNSEEN)
        bends = not reading.chain.plain
        turns, half = reading.chain.turns, saved.meta["val"].dtype in SIXTEEN_BITS
        steep = reading.chain.steep or (bends and is_saturated(saved)) or (turns and not half)
        kinds = (
            (Kind.CHANNEL, reading.channel and not steep),
            (Kind.ABSOLUTE, reading.fine or softmax or steep),
            (Kind.ATTENDED, reading.attended),
            (Kind.RELATIVE, (bounded or reading.rows) and not turns),
            (Kind.COMMON, True),
        )
        kind = next(kind for kind, fits in kinds if fits)
        return Need(kind, "", reading.rows, reading.convolution, len(reading.masks))

    def unfit(self, saved: fx.Node) -> str:
        """Why ``saved`` is stored as it is, whoever reads it."""
        value = saved.meta["val"]
        if saved not in self._activations:
            return "made of parameters only"
        if bytes_of(value) < max(1, self._smallest) or value.dim() == 0:
            return "small"
        if base(saved).target in REDUCTIONS:
            return "a statistic"
        if is_packed(saved):
            return "compressed already, for a layer's product"
        if saved.meta.get(UNCHECKED):
            return "kept by a custom autograd function"
        if value.dtype is not torch.bool and value.dtype not in FLOATS:
            return f"not floating point: {str(value.dtype).removeprefix('torch.')}"
        return ""


def crossers(
    forward: fx.Graph, backward: fx.Graph, num_fwd_outputs: int, judge: Judge
) -> list[Crosser]:
    """Every tensor that is kept for the backward only, in the order the forward returns them.

    Args:
        forward, backward: what the partitioner made.
        num_fwd_outputs: how many of the forward's outputs the user sees.
        judge: of these graphs.
    """
    pairs = saved_pairs(forward, backward, num_fwd_outputs, judge.given)
    found = [judge(saved, restored) for saved, restored in pairs]
    return _own_masks([c for c in found if c.saved not in judge.given or not c.reason])


def saved_pairs(
    forward: fx.Graph, backward: fx.Graph, num_fwd_outputs: int, given: Set[fx.Node] = frozenset()
) -> list[tuple[fx.Node, fx.Node]]:
    """(forward's node, backward's placeholder) of every tensor the forward computed and keeps for
    the backward alone: packing a parameter, an input or a result would free nothing.

    ``given``: inputs that count as well.
    """
    outputs = returned(forward)
    shown = seen_by_user(forward, num_fwd_outputs)
    arriving = {n.name: n for n in placeholders(backward)}
    return [
        (node, arriving[node.name])
        for node in dict.fromkeys(outputs[num_fwd_outputs:])
        if isinstance(node, fx.Node)
        and node.name in arriving
        and isinstance(node.meta.get("val"), torch.Tensor)
        and (base(node).op != "placeholder" or node in given)
        and base(node) not in shown
    ]


def seen_by_user(forward: fx.Graph, num_fwd_outputs: int) -> set[fx.Node]:
    """Whose memory the user gets."""
    outputs = returned(forward)[:num_fwd_outputs]
    return {base(n) for n in outputs if isinstance(n, fx.Node)}


def base(node: fx.Node) -> fx.Node:
    """The node whose memory ``node`` is a view of, or a part."""
    while (node := strip(node, VIEWS)).target is operator.getitem:
        parts = node.all_input_nodes[0]
        if parts.target not in SPLITS:
            break
        node = parts.all_input_nodes[0]
    return node


def is_packed(node: fx.Node) -> bool:
    """A part of what one of our operators made of a layer's x."""
    got = getattr(node.target, "__name__", "") == "getitem"
    source = node.args[0] if got else None
    return isinstance(source, fx.Node) and is_ours(source)


def _layers(forward: fx.Graph, activations: Set[fx.Node]) -> set[fx.Node]:
    """Products of data and parameters: of batches, too, where each has parameters of its own, as
    where each expert has as many rows. Queries that are learned are no weights of a layer, but are
    the same for all samples."""

    def weighs(node: fx.Node) -> bool:
        weights = set(_multiplied(node)) - activations
        return node.target in BATCHED_PRODUCTS and not all(map(_is_repeated, weights))

    return {n for n in forward.nodes if is_layer_product(n) or is_ours(n) or weighs(n)}


def _is_repeated(weight: fx.Node) -> bool:
    once, whole = (elements_of(n.meta["val"]) for n in (as_made(weight), weight))
    return once < whole


def _multiplied(batched: fx.Node) -> list[fx.Node]:
    return [n for n in batched.args[-2:] if isinstance(n, fx.Node)]


def _factors(forward: fx.Graph, layers: Set[fx.Node]) -> set[str]:
    """Names of values that products of batches among ``layers`` multiply, and of their views."""
    batched = [node for node in layers if node.target in BATCHED_PRODUCTS]
    values = {as_made(n) for node in batched for n in _multiplied(node)}
    return {n.name for n in forward.nodes if as_made(n) in values}


def _activations(forward: fx.Graph, inputs: GraphInputs) -> set[fx.Node]:
    """Nodes that depend on more than parameters; random masks count."""
    names = named_inputs(forward, inputs.parameters)
    weights = closure(names)
    data = closure(node for node in placeholders(forward) if node not in names)
    return data | {node for node in forward.nodes if node not in weights}


def _made_of_products(
    forward: fx.Graph, activations: Set[fx.Node], layers: Set[fx.Node]
) -> dict[str, int]:
    """Elements of the largest layer's product that a node is made of, by name, where it is made of
    products and parameters alone, element by element."""
    found: dict[str, int] = {}
    for node in forward.nodes:
        if node in layers:
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor):
                found[node.name] = hint(value.numel())
        elif node.target in _SAME_VALUES or is_pointwise(node):
            data = [n for n in node.all_input_nodes if n in activations]
            if data and all(n.name in found for n in data):
                found[node.name] = max(found[n.name] for n in data)
    return found


def _own_masks(found: list[Crosser]) -> list[Crosser]:
    """Give each mask to the last tensor made of those it is recomputed from, if laid out alike."""
    owned: dict[fx.Node, Mask] = {}
    free = {mask.node for crosser in found for mask in crosser.masks}
    for crosser in sorted(found, key=lambda c: c.saved, reverse=True):
        for mask in sorted(crosser.masks, key=lambda m: m.compared):
            one, other = in_memory(mask.compared), in_memory(crosser.saved)
            alike = one.shape == other.shape and one.stride() == other.stride()
            enough = crosser.restored.users.keys() <= mask.parts  # its bits, that is
            if mask.node in free and alike and not enough:
                owned[crosser.saved] = mask
                free.discard(mask.node)
                break
    return [dataclasses.replace(c, own_mask=owned.get(c.saved)) for c in found]
