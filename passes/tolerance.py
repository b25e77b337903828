"""Which crossing tensors may be stored compressed: found by what the backward does with them.

Read-only. A tensor whose readers are not all known to tolerate a small error stays exact, with the
reason as text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import fx

from hot_compile.passes.graph import (
    CASTS,
    CHANNEL_DIM,
    VIEWS,
    aten,
    closure,
    is_tangent,
    module_path,
    placeholders,
    returned,
    strip,
)
from hot_compile.passes.layouts import in_memory
from hot_compile.passes.match import GraphInputs
from hot_compile.passes.pack import Layout, Scheme, by_channel, layout_of
from hot_compile.passes.site import bytes_of, hint

_FLOATS = {torch.float32, torch.bfloat16, torch.float16}
_PRODUCTS = {
    aten.mm.default,
    aten.addmm.default,
    aten.convolution_backward.default,
    aten.convolution.default,
}
_BATCHED = {aten.bmm.default, aten.baddbmm.default}
_NORMS = {
    aten.native_layer_norm_backward.default,
    aten.native_group_norm_backward.default,
    aten.native_batch_norm_backward.default,
}
_REDUCTIONS = {
    aten.sum.dim_IntList,
    aten.sum.default,
    aten.mean.dim,
    aten.mean.default,
    aten.var_mean.correction,
    aten.var.correction,
    aten.amax.default,
    aten.amin.default,
}
_MOVES = {
    aten.cat.default,
    aten.constant_pad_nd.default,
    aten.index.Tensor,
    aten.roll.default,
    aten.flip.default,
    aten.split.Tensor,
    aten.split_with_sizes.default,
}
"""They place values elsewhere and change none."""
_SHAPE_ONLY = {
    aten.full_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.empty_like.default,
    aten.sym_size.int,
    aten.avg_pool2d_backward.default,
    aten.max_pool2d_with_indices_backward.default,
}
"""They read the size of what they are given, or values that only say how large it is."""
_LINEAR = {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.neg.default}
_TRANSPARENT = VIEWS | CASTS | _MOVES
_DIVIDING = {aten.reciprocal.default, aten.log.default, aten.rsqrt.default}
_FEW = 2**13
"""Elements of a channel below which the errors of INT4 do not average out in a batch norm's sums.
Worst cosine of a parameter's gradient, 16 to 4096 elements: 0.62 to 0.99 in INT4, 0.99 in INT8."""
_ATTENTION_OPERANDS = {"query", "key", "value", "out"}


@dataclasses.dataclass(frozen=True)
class Mask:
    """A comparison the backward makes on a value that it recomputes from a saved tensor."""

    node: fx.Node
    """In the backward."""
    compared: fx.Node
    """In the forward: the value, before anything was rounded."""


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
    feeds_product: bool = False
    """A layer's product reads it as it is: the x of the paper's ABC."""
    masks: tuple[Mask, ...] = ()
    """Their outcome is worth its own bits: a rounded value may fall on the other side."""
    own_mask: Mask | None = None
    """One of them, laid out as it is, that no other tensor has as its own."""

    @property
    def name(self) -> str:
        """The forward node's name."""
        return self.saved.name

    @property
    def module(self) -> str:
        """Path of the module that made it, '' if unknown."""
        return module_path(self.saved) or ""


def crossers(
    forward: fx.Graph,
    backward: fx.Graph,
    num_fwd_outputs: int,
    inputs: GraphInputs,
    smallest: int,
) -> list[Crosser]:
    """Every tensor that is kept for the backward only, in the order the forward returns them.

    Args:
        forward, backward: what the partitioner made.
        num_fwd_outputs: how many of the forward's outputs the user sees.
        inputs: which of the forward's placeholders are parameters.
        smallest: tensors of fewer bytes are not worth a kernel.
    """
    outputs = returned(forward)
    seen_by_user = {_base(n) for n in outputs[:num_fwd_outputs] if isinstance(n, fx.Node)}
    arriving = {n.name: n for n in backward.nodes if n.op == "placeholder"}
    gradients = closure(n for n in arriving.values() if is_tangent(n))
    activations = _activations(forward, inputs)
    known = {node.name: node for node in forward.nodes}
    found = []
    for node in dict.fromkeys(outputs[num_fwd_outputs:]):
        if not isinstance(node, fx.Node) or node.name not in arriving or not _is_ours(node):
            continue
        if _base(node) in seen_by_user:
            continue
        restored = arriving[node.name]
        if node in activations:
            found.append(_judge(node, restored, gradients, smallest, known))
        else:
            found.append(Crosser(node, restored, (Scheme.EXACT,), "made of parameters only"))
    return _own_masks(_whole_storages(found))


def _activations(forward: fx.Graph, inputs: GraphInputs) -> set[fx.Node]:
    """Nodes that depend on more than parameters; random masks count."""
    names = dict(enumerate(inputs.parameters))
    given = placeholders(forward)
    weights = closure(node for index, node in enumerate(given) if names.get(index))
    data = closure(node for index, node in enumerate(given) if not names.get(index))
    return data | {node for node in forward.nodes if node not in weights}


def _is_ours(node: fx.Node) -> bool:
    """A tensor the forward computed: packing a parameter or an input would free nothing."""
    return isinstance(node.meta.get("val"), torch.Tensor) and _base(node).op != "placeholder"


def _base(node: fx.Node) -> fx.Node:
    return strip(node, VIEWS)


def _judge(
    saved: fx.Node,
    restored: fx.Node,
    gradients: set[fx.Node],
    smallest: int,
    known: dict[str, fx.Node],
) -> Crosser:
    """``known``: the forward's nodes by name."""
    value = saved.meta["val"]
    exact = (Scheme.EXACT,)
    if bytes_of(value) < smallest:
        return Crosser(saved, restored, exact, "small")
    if is_packed(saved):
        return Crosser(saved, restored, exact, "compressed already, for a layer's product")
    if saved.meta.get("saved_tensor_with_no_vc_check"):
        return Crosser(saved, restored, exact, "kept by a custom autograd function")
    if value.dtype is torch.bool:
        return _fitting(Crosser(saved, restored, (Scheme.EXACT, Scheme.BITS)))
    if value.dtype not in _FLOATS:
        return Crosser(saved, restored, exact, f"not floating point: {_dtype(value)}")
    readers = _Readers(restored, gradients)
    if readers.refusal:
        return Crosser(saved, restored, exact, readers.refusal)
    lie_so = isinstance(layout_of(in_memory(saved), Scheme.ROWS), Layout)
    along_rows = lie_so and not readers.attention and (readers.rows or _by_position(saved))
    eight = Scheme.ROWS if along_rows else Scheme.INT8
    schemes: tuple[Scheme, ...] = (Scheme.EXACT, eight)
    if not readers.attention and not 0 < readers.statistics < _FEW:
        schemes += (Scheme.INT4,)
    masks = tuple(filter(None, (_in_forward(mask, known) for mask in readers.masks)))
    return _fitting(Crosser(saved, restored, schemes, "", readers.product, masks))


def _in_forward(mask: fx.Node, known: dict[str, fx.Node]) -> Mask | None:
    """``mask`` with what it compares in the forward; None if only the backward has that."""
    compared, *others = mask.args
    there = known.get(compared.name) if isinstance(compared, fx.Node) else None
    if there is None or any(isinstance(arg, fx.Node) for arg in others):
        return None
    return Mask(mask, there)


def _own_masks(found: list[Crosser]) -> list[Crosser]:
    """Give each mask to the last tensor made of those it is recomputed from, if laid out alike."""
    owned: dict[fx.Node, Mask] = {}
    free = {mask.node for crosser in found for mask in crosser.masks}
    for crosser in sorted(found, key=lambda c: c.saved, reverse=True):
        readers = set(crosser.restored.users)
        for mask in sorted(crosser.masks, key=lambda m: m.compared):
            alike = _same_places(in_memory(mask.compared), in_memory(crosser.saved))
            if mask.node in free and alike and readers != {mask.node}:  # else its bits are enough
                owned[crosser.saved] = mask
                free.discard(mask.node)
                break
    return [dataclasses.replace(c, own_mask=owned.get(c.saved)) for c in found]


def _same_places(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.stride() == b.stride()


def _by_position(saved: fx.Node) -> bool:
    """An image whose channels nothing sums over: a scale for each would take a pass of its own."""
    if not by_channel(in_memory(saved)):
        return False
    stack, copies = [saved], {saved}
    while stack:
        for user in stack.pop().users:
            if user.target in _REDUCTIONS and _kept_dims(user) == {CHANNEL_DIM}:
                return False
            if user.target in CASTS | {aten.clone.default} and user not in copies:
                copies.add(user)
                stack.append(user)
    return True


def is_packed(node: fx.Node) -> bool:
    """A part of what one of our operators made of a layer's x."""
    source = node.args[0] if _is_getitem(node) else None
    return isinstance(source, fx.Node) and getattr(source.target, "namespace", "") == "hot"


def _dtype(value: torch.Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def _fitting(crosser: Crosser) -> Crosser:
    """``crosser`` without the schemes its layout does not allow."""
    problem, kept = "", []
    for scheme in crosser.schemes:
        layout = layout_of(in_memory(crosser.saved), scheme)
        if scheme is Scheme.EXACT or isinstance(layout, Layout):
            kept.append(scheme)
        else:
            problem = layout
    if len(kept) == 1:
        return dataclasses.replace(crosser, schemes=tuple(kept), reason=problem, masks=())
    return dataclasses.replace(crosser, schemes=tuple(kept))


def _whole_storages(found: list[Crosser]) -> list[Crosser]:
    """Views of one storage are packed together or not at all: one of them would keep it alive."""
    exact: dict[fx.Node, Crosser] = {}
    for crosser in found:
        if crosser.schemes == (Scheme.EXACT,):
            exact.setdefault(_base(crosser.saved), crosser)
    return [
        dataclasses.replace(
            c, schemes=(Scheme.EXACT,), masks=(), reason=f"shares memory with {other.name}, exact"
        )
        if len(c.schemes) > 1 and (other := exact.get(_base(c.saved))) is not None
        else c
        for c in found
    ]


class _Readers:
    """What the backward does with one saved tensor, followed through what it recomputes from it."""

    def __init__(self, restored: fx.Node, gradients: set[fx.Node]) -> None:
        self.refusal = ""
        self.attention = False
        """A batched product or fused attention reads it: errors meet a softmax there."""
        self.product = False
        """A layer's product, exact or ours, reads it through no more than views and casts."""
        self.statistics = 0
        """Elements of one channel that a batch norm's backward sums over; 0: none reads it."""
        self.rows = False
        """A norm's backward sums over its innermost dimension."""
        self.masks: list[fx.Node] = []
        self._restored = restored
        self._linear = {restored}
        """Sums and multiples of it."""
        self._elements = restored.meta["val"].numel()
        self._gradients = gradients
        self._follow(restored)

    def _follow(self, restored: fx.Node) -> None:
        stack, seen = [restored], {restored}
        while stack:
            node = stack.pop()
            for user in node.users:
                follow = self._read(node, user)
                if self.refusal:
                    return  # one reader is enough; the next must not talk it away
                if follow and user not in seen:
                    seen.add(user)
                    stack.append(user)

    def _read(self, node: fx.Node, user: fx.Node) -> bool:
        """Note one use of ``node``; True if what ``user`` makes must be followed too."""
        if user.op != "call_function":
            self.refusal = "returned by the backward"
            return False
        if user.target in _TRANSPARENT or _is_getitem(user):
            if node in self._linear:
                self._linear.add(user)
            return True
        if user.target in _SHAPE_ONLY:
            return False
        if user.meta.get("val") is not None and _makes_bool(user):
            if user not in self._gradients:
                self.masks.append(user)
            return False
        if user.target in _BATCHED or _is_attention(user):
            self.attention = True
            self.refusal = self._attention_refusal(node, user)
            return False
        if _is_pointwise(user):
            return self._read_pointwise(node, user)
        if user.target in _REDUCTIONS:
            return user not in self._gradients
        ours = getattr(user.target, "namespace", "") == "hot"
        if ours or (user.target in _PRODUCTS and user in self._gradients):
            self.product |= strip(node, _TRANSPARENT) is self._restored
            return False
        if user.target in _NORMS:
            return False
        if user not in self._gradients:
            self.refusal = f"input of a recomputed region ({user.target})"
        else:
            self.refusal = f"read by {user.target}, not known to tolerate rounding"
        return False

    def _read_pointwise(self, node: fx.Node, user: fx.Node) -> bool:
        value, result = node.meta["val"], user.meta["val"]
        statistic = hint(value.numel()) == hint(self._elements) < hint(result.numel())
        if statistic:
            self.refusal = "a statistic: broadcast over more elements"
        elif user.target is aten.exp.default and node.target is aten.sub.Tensor:
            self.refusal = "input of a softmax"
        elif self._divides(node, user):
            self.refusal = "divided by: its smallest values matter most"
        for reduction in user.users:
            if user in self._gradients and reduction.target in _REDUCTIONS:
                self._note_statistics(reduction)
        return user not in self._gradients

    def _note_statistics(self, reduction: fx.Node) -> None:
        """Remember sums with the gradient over everything but the channels: a batch norm's; and
        over the innermost dimension: a layer norm's."""
        summed, kept = reduction.args[0].meta["val"], _kept_dims(reduction)  # type: ignore[union-attr]
        saved = self._restored.meta["val"]
        if kept == set(range(summed.dim() - 1)) and hint(summed.numel()) == hint(saved.numel()):
            self.rows |= hint(summed.shape[-1]) == hint(saved.shape[-1])
        if summed.dim() >= 3 and kept == {CHANNEL_DIM}:
            self.statistics = hint(summed.numel()) // max(1, hint(summed.shape[CHANNEL_DIM]))

    def _divides(self, node: fx.Node, user: fx.Node) -> bool:
        """``user`` divides by the saved tensor, shifted and scaled (not by 1 + exp(x), say)."""
        if user.target in _LINEAR and node in self._linear:
            self._linear.add(user)
        dividing = user.target in _DIVIDING
        if user.target is aten.div.Tensor:
            dividing = user.args[1] is node
        return dividing and node in self._linear

    def _attention_refusal(self, node: fx.Node, user: fx.Node) -> str:
        if user.target in _BATCHED:
            return "" if user in self._gradients else "input of a recomputed region (bmm)"
        names = {name for name, value in _named_arguments(user) if value is node}
        if names <= _ATTENTION_OPERANDS:
            return ""
        return f"attention's {', '.join(sorted(names - _ATTENTION_OPERANDS))}"


def _kept_dims(reduction: fx.Node) -> set[int]:
    """Dimensions of its operand that ``reduction`` does not go over."""
    count = reduction.args[0].meta["val"].dim()  # type: ignore[union-attr]
    given = reduction.args[1] if len(reduction.args) > 1 else ()
    over = given if isinstance(given, (list, tuple)) else ()
    return set(range(count)) - {dim % count for dim in over}  # type: ignore[operator]


def _makes_bool(node: fx.Node) -> bool:
    value = node.meta["val"]
    return isinstance(value, torch.Tensor) and value.dtype is torch.bool


def _is_getitem(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"


def _is_pointwise(node: fx.Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def _is_attention(node: fx.Node) -> bool:
    name = getattr(node.target, "__name__", str(node.target))
    return "attention" in name and "backward" in name


def _named_arguments(node: fx.Node) -> Iterator[tuple[str, object]]:
    schema = getattr(node.target, "_schema", None)
    names = [a.name for a in schema.arguments] if schema else []
    yield from zip(names, node.args, strict=False)
    yield from node.kwargs.items()
