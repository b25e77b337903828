"""What the backward does with a saved tensor, and whether each reader tolerates rounding.

Tolerance is proven, not assumed. A reader is a layer's product, attention, or something pointwise.
A pointwise chain that the backward recomputes from the tensor is followed operator by operator
(``_STEPS``) and tried on samples (``probe``); whatever is in no table leaves the tensor exact, with
the reason. docs/memory.md says the same in words.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Set
from typing import Any

import torch
from torch import fx

from hot_compile.passes.graph import (
    CASTS,
    CHANNEL_DIM,
    IMAGE_DIMS,
    VIEWS,
    aten,
    closure,
    is_ours,
    is_pointwise,
    is_tangent,
    made_of,
    placeholders,
    strip,
)
from hot_compile.passes.site import hint
from hot_compile.passes.storage.chain import Chain
from hot_compile.passes.storage.norms import (
    FUSED,
    REDUCTIONS,
    cancels,
    is_number,
    is_softmax,
    spreads,
    spreads_again,
    through_views,
)

FLOATS = {torch.float32, torch.bfloat16, torch.float16}
MOVES = {
    aten.cat.default,
    aten.clone.default,
    aten.constant_pad_nd.default,
    aten.gather.default,
    aten.index.Tensor,
    aten.index_select.default,
    aten.roll.default,
    aten.flip.default,
    aten.split.Tensor,
    aten.split_with_sizes.default,
}
"""They place values elsewhere and change none."""
SHAPE_ONLY = {
    aten.full_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.empty_like.default,
    aten.sym_size.int,
    aten.avg_pool2d_backward.default,
    aten.max_pool2d_with_indices_backward.default,
}
"""They read the size of what they are given, or values that only say how large it is."""
PRODUCTS = {
    aten.mm.default,
    aten.addmm.default,
    aten.convolution_backward.default,
    aten.convolution.default,
}
"""A layer's: linear in the tensor, which is one factor; gradients' errors are relative."""
BATCHED = {aten.bmm.default, aten.baddbmm.default}
"""The same of attention written by hand."""
_ATTENTION_OPERANDS = {"query", "key", "value", "out"}
"""Errors of q and k are factors of e in what the backward recomputes. What values, and so outputs,
have in common cancels between the two sums that a softmax's backward subtracts."""
LINEAR_IN_GRADIENT = {
    aten.mul.Tensor,
    aten.div.Tensor,
    aten.where.self,
    aten.addcmul.default,
    aten.neg.default,
    *FUSED,
}
"""Where one operand is a gradient, the result is linear in it, and errors are relative to it."""
_FEW = 16
"""Elements of a norm's row below which its gradient may be smaller than its terms' errors."""


@dataclasses.dataclass
class Reading:
    """What was found of one saved tensor's readers."""

    refusal: str = ""
    """Why it must stay exact."""
    culprit: fx.Node | None = None
    """The reader that does not tolerate rounding."""
    readers: int = 0
    product: bool = False
    """A layer's product, exact or ours, reads it through no more than views and casts."""
    convolution: bool = False
    """One of a convolution, then: its channels are dimension 1."""
    fine: bool = False
    """A softmax's backward reads it, which takes a difference: its errors are absolute."""
    batched: bool = False
    """Attention reads it."""
    channel: bool = False
    """A vector by channel is taken from it: what is left must be exact, not the whole."""
    rows: bool = False
    """A norm's backward sums over its innermost dimension."""
    masks: list[fx.Node] = dataclasses.field(default_factory=list)
    """Comparisons of what is recomputed from it with constants."""
    chain: Chain | None = None
    """What is recomputed from it by pointwise operators."""


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is known of a backward graph, gathered once."""

    gradients: Set[fx.Node]
    """What depends on a tangent."""
    settled: Callable[[fx.Node, int], bool]
    """Whether a gradient node comes after a layer's product (one with parameters), attention, or a
    tangent of at least so many elements: not a loss's own derivative."""
    activations: Set[str]
    """Names of placeholders that hold more than functions of parameters."""


def facts(
    backward: fx.Graph, activations: Set[str], head_gradients: Set[str] = frozenset()
) -> Facts:
    """Gather what ``read`` needs.

    ``head_gradients``: names of placeholders that hold what a head made in the forward, a product
    but for the loss's own gradient, which it meets here.
    """
    tangents = [node for node in backward.nodes if is_tangent(node)]
    gradients = closure(tangents)
    data = closure(n for n in placeholders(backward) if n.name in activations or is_tangent(n))
    products = [
        n
        for n in gradients
        if _is_attention(n)
        or (_is_product(n) and set(n.all_input_nodes) - data)
        or any(given.name in head_gradients for given in n.all_input_nodes)
    ]
    after_products = closure(products)
    by_size = {t: closure([t]) for t in tangents if isinstance(t.meta.get("val"), torch.Tensor)}

    def settled(node: fx.Node, elements: int) -> bool:
        return node in after_products or any(
            node in reached and 4 * hint(t.meta["val"].numel()) >= elements
            for t, reached in by_size.items()
        )

    return Facts(gradients, settled, activations)


def read(root: fx.Node, known: Facts, cuts: Set[fx.Node] = frozenset()) -> Reading:
    """Everything the backward does with ``root``, one of its placeholders or recomputed values.

    Args:
        root: followed through what is recomputed from it. known: of its graph.
        cuts: recomputed values that will be saved, too: not followed.
    """
    return _Reader(root, known, cuts).reading


class _Reader:
    def __init__(self, root: fx.Node, known: Facts, cuts: Set[fx.Node]) -> None:
        self.reading = Reading(chain=Chain(root))
        self._root, self._known = root, known
        self._elements = hint(root.meta["val"].numel())
        for node in _downstream(root, known.gradients, cuts):
            for operand in dict.fromkeys(node.all_input_nodes):
                if operand in self._chain and not self.reading.refusal:
                    self.reading.readers += 1
                    self._read(operand, node)
                    self.reading.culprit = node if self.reading.refusal else None

    @property
    def _chain(self) -> Chain:
        assert self.reading.chain is not None
        return self.reading.chain

    def _read(self, node: fx.Node, user: fx.Node) -> None:
        """Judge one use; what ``user`` recomputes from ``node`` joins the chain."""
        if user.op != "call_function":
            self._refuse("returned by the backward")
        elif user.target in SHAPE_ONLY:
            return
        elif user in self._known.gradients:
            self._read_with_gradient(node, user)
        elif user.target in VIEWS | CASTS | MOVES or _is_getitem(user):
            self._move(node, user)
        elif is_ours(user):
            self._product(node, user)
        elif not is_pointwise(user):
            self._refuse(f"input of a recomputed region ({user.target})")
        elif _makes_bool(user):
            self._compare(node, user)
        else:
            self._step(node, user)

    def _refuse(self, why: str) -> None:
        self.reading.refusal = self.reading.refusal or why

    def _move(self, node: fx.Node, user: fx.Node) -> None:
        value = user.meta.get("val")
        if user.target in CASTS and isinstance(value, torch.Tensor) and value.dtype not in FLOATS:
            self._refuse(f"cast to {str(value.dtype).removeprefix('torch.')}")
            return
        self._chain.move(node, user)

    def _compare(self, node: fx.Node, user: fx.Node) -> None:
        if len(user.all_input_nodes) > 1 or user.target in VIEWS | CASTS:
            self._refuse("compared with another tensor: a rounded value may equal no exact one")
            return
        self.reading.masks.append(user)
        self._chain.compare(node, user)

    def _step(self, node: fx.Node, user: fx.Node) -> None:
        """One recomputed pointwise operator."""
        if not isinstance(user.meta["val"], torch.Tensor):
            self._refuse(f"read by {user.target}, not known to tolerate rounding")
            return
        result = user.meta["val"]
        if (
            self._elements < hint(result.numel())
            and hint(node.meta["val"].numel()) <= self._elements
        ):
            self._refuse("a statistic: broadcast over more elements")
            return
        others = [n for n in user.all_input_nodes if n not in self._chain]
        others = [n for n in others if not is_number(n) and not _makes_bool(n)]
        if user in self._chain:
            return
        if others and self._is_affine(node, user, others):
            self.reading.channel = True
            self._chain.affine(node, user)
        elif others and user.target in (aten.add.Tensor, aten.sub.Tensor):
            self._sum(user, others)
        else:
            self._refuse(self._chain.step(user, scaled=bool(others)))

    def _is_affine(self, node: fx.Node, user: fx.Node, others: list[fx.Node]) -> bool:
        """``user`` takes a vector by channel from ``node``, or goes on with one after that."""
        sums = user.target in (aten.add.Tensor, aten.sub.Tensor)
        factors = user.target in (aten.mul.Tensor, aten.div.Tensor) and self.reading.channel
        if not (sums or factors) or (user.args[0] is not node and user.target is aten.div.Tensor):
            return False
        vectors = len(others) == 1 and _by_channel(others[0], user)
        if vectors and not self.reading.channel and self._of_parameters(others[0]):
            # a gain or bias, which says nothing of how the values are spread, may follow any norm
            vectors = len(user.meta["val"].shape) >= IMAGE_DIMS
        return vectors and self._chain.by_channel(node)

    def _sum(self, user: fx.Node, others: list[fx.Node]) -> None:
        """A sum or difference with another tensor, which may cancel all but the error."""
        (other,) = others
        if self._of_parameters(other) and hint(other.meta["val"].numel()) * 2 <= self._elements:
            self._refuse(self._chain.step(user, scaled=True))
        else:
            self._refuse("a sum or difference with another tensor, which may cancel it")

    def _of_parameters(self, node: fx.Node) -> bool:
        """``node`` is made of parameters alone."""
        given = (n for n in made_of(node) if n.op == "placeholder")
        return not any(n.name in self._known.activations or is_tangent(n) for n in given)

    def _read_with_gradient(self, node: fx.Node, user: fx.Node) -> None:
        if _is_attention(user):
            self._attention(node, user)
        elif user.target in BATCHED:
            self.reading.batched = self.reading.fine = True
            self._chain.end(node)
        elif user.target in PRODUCTS or is_ours(user):
            self._product(node, user)
        elif not self._known.settled(user, self._elements):
            self._refuse("read before the first layer's backward: a loss stays exact")
        elif user.target is aten.native_batch_norm_backward.default:
            self.reading.channel = True
        elif user.target in LINEAR_IN_GRADIENT or user.target in VIEWS | CASTS | MOVES:
            inverse = user.target is aten.div.Tensor and user.args[1] is node
            self._refuse(self._chain.end(node, inverse=inverse))
            self._meet_gradient(node, user)
        else:
            self._refuse(f"read by {user.target}, not known to tolerate rounding")

    def _meet_gradient(self, node: fx.Node, product: fx.Node) -> None:
        """``product`` is a gradient's with ``node``: a norm or a softmax may follow."""
        known = self._known.gradients
        if spreads(product, self._elements):
            self._refuse("a statistic: broadcast over more elements")
        for reduction in through_views(product):
            if reduction.target not in REDUCTIONS:
                continue
            self._note_rows(reduction)
            summed = self._elements // max(1, hint(reduction.meta["val"].numel()))
            if summed < _FEW and spreads_again(reduction):
                self._refuse("a norm over few elements: what it leaves may be less than the error")
        if not self.reading.channel and cancels(product, known):
            self._centre(node)
        self.reading.fine |= is_softmax(node, product, known)

    def _centre(self, node: fx.Node) -> None:
        """The backward takes a mean from it, in what it makes with the gradient."""
        if len(node.meta["val"].shape) >= IMAGE_DIMS and self._chain.by_channel(node):
            self.reading.channel = True  # coded by the distance from the channel's mean
        else:
            self._refuse("its mean is taken from it, after it met the gradient")

    def _product(self, node: fx.Node, user: fx.Node) -> None:
        self.reading.convolution |= "conv" in str(user.target)
        self.reading.product |= strip(node, VIEWS | CASTS | MOVES) is self._root
        self._chain.end(node)

    def _attention(self, node: fx.Node, user: fx.Node) -> None:
        names = {name for name, value in _named_arguments(user) if value is node}
        beyond = names - _ATTENTION_OPERANDS
        if beyond:
            self._refuse(f"attention's {', '.join(sorted(beyond))}")
        self.reading.batched = self.reading.fine = True
        self._chain.end(node)

    def _note_rows(self, reduction: fx.Node) -> None:
        """A sum with the gradient over the innermost dimension: a norm's backward along rows."""
        summed, saved = reduction.args[0].meta["val"], self._root.meta["val"]  # type: ignore[union-attr]
        innermost = kept_dims(reduction) == set(range(summed.dim() - 1))
        if innermost and hint(summed.numel()) == self._elements and saved.dim():
            self.reading.rows |= hint(summed.shape[-1]) == hint(saved.shape[-1])


def _downstream(root: fx.Node, gradients: Set[fx.Node], cuts: Set[fx.Node]) -> Iterator[fx.Node]:
    """What is recomputed from ``root`` and who reads it, in the graph's order."""
    reached, edges, stack = {root}, [], [root]
    while stack:
        node = stack.pop()
        for user in node.users.keys() - cuts:
            edges.append((node, user))
            if user not in gradients and user not in reached:
                reached.add(user)
                stack.append(user)
    read = {user for _, user in edges if user.op == "output" or user in gradients}
    for node, user in sorted(edges, reverse=True):  # what only cuts are made of has no reader
        if user in read:
            read.add(node)
    yield from sorted(read - {root})


def kept_dims(reduction: fx.Node) -> set[int]:
    """Dimensions of its operand that ``reduction`` does not go over."""
    count = reduction.args[0].meta["val"].dim()  # type: ignore[union-attr]
    given = reduction.args[1] if len(reduction.args) > 1 else ()
    over = given if isinstance(given, (list, tuple)) else ()
    return set(range(count)) - {dim % count for dim in over}  # type: ignore[operator]


def _by_channel(other: fx.Node, user: fx.Node) -> bool:
    """``other`` is one number a channel of what ``user`` makes."""
    sizes, result = other.meta["val"].shape, user.meta["val"].shape
    if len(result) <= CHANNEL_DIM or len(sizes) > len(result):
        return False
    aligned = (1,) * (len(result) - len(sizes)) + tuple(sizes)
    rest = [hint(n) for dim, n in enumerate(aligned) if dim != CHANNEL_DIM]
    same = hint(aligned[CHANNEL_DIM]) == hint(result[CHANNEL_DIM])
    return same and all(n == 1 for n in rest)


def _makes_bool(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype is torch.bool


def _is_getitem(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"


def _is_product(node: fx.Node) -> bool:
    ours = is_ours(node)
    return ours or node.target in PRODUCTS or node.target in BATCHED


def _is_attention(node: fx.Node) -> bool:
    name = getattr(node.target, "__name__", str(node.target))
    return "attention" in name and "backward" in name


def _named_arguments(node: fx.Node) -> Iterator[tuple[str, Any]]:
    schema = getattr(node.target, "_schema", None)
    names = [a.name for a in schema.arguments] if schema else []
    yield from zip(names, node.args, strict=False)
    yield from node.kwargs.items()
