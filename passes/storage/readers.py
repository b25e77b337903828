"""What the backward does with a saved tensor, and whether each reader tolerates rounding.

Tolerance is proven, not assumed. ``RULES`` has every kind of reader, with what follows and why; the
table of docs/tolerance.md is made of it. A pointwise chain that the backward recomputes from the
tensor is followed operator by operator (``Chain``) and tried on samples (``probe``); whatever the
table does not know leaves the tensor exact, with the reason.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Set

import torch
from torch import fx

from hot_compile.passes.base.graph import (
    CHANNEL_DIM,
    IMAGE_DIMS,
    aten,
    closure,
    is_ours,
    is_tangent,
    made_of,
    named_arguments,
    placeholders,
    strip,
)
from hot_compile.passes.base.operators import (
    BATCHED_PRODUCTS,
    CASTS,
    FLOATS,
    LAYER_PRODUCTS,
    LINEAR_IN_GRADIENT,
    MOVES,
    REDUCTIONS,
    SHAPE_ONLY,
    VIEWS,
    is_pointwise,
)
from hot_compile.passes.base.site import hint
from hot_compile.passes.storage.chain import Chain
from hot_compile.passes.storage.norms import (
    cancels,
    is_number,
    is_softmax,
    spreads,
    spreads_again,
    through_views,
)
from hot_compile.passes.storage.regions import Region, is_checkpointed

_ATTENTION_OPERANDS = {"query", "key", "value", "out"}
"""Errors of q and k are factors of e in what the backward recomputes. What values, and so outputs,
have in common cancels between the two sums that a softmax's backward subtracts."""
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
    region: bool = False
    """A checkpointed region is computed again from it."""
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
        if is_attention(n)
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
        self._root, self._known, self._cuts = root, known, cuts
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
        with_gradient = user in self._known.gradients
        for rule in RULES:
            if rule.with_gradient in (None, with_gradient) and rule.applies(self, user):
                rule.judge(self, node, user)
                return

    def is_settled(self, user: fx.Node) -> bool:
        """``user``'s gradient is not a loss's own derivative."""
        return self._known.settled(user, self._elements)

    def _refuse(self, why: str) -> None:
        self.reading.refusal = self.reading.refusal or why

    def returned(self, node: fx.Node, user: fx.Node) -> None:
        """The backward returns it."""
        self._refuse("returned by the backward")

    def size(self, node: fx.Node, user: fx.Node) -> None:
        """Only how large it is counts."""

    def move(self, node: fx.Node, user: fx.Node) -> None:
        """It is placed, viewed or cast."""
        value = user.meta.get("val")
        if user.target in CASTS and isinstance(value, torch.Tensor) and value.dtype not in FLOATS:
            self._refuse(f"cast to {str(value.dtype).removeprefix('torch.')}")
            return
        self._chain.move(node, user)

    def region(self, node: fx.Node, user: fx.Node) -> None:
        """What is no function of single elements is computed again from it."""
        self._refuse(f"input of a recomputed region ({user.target})")

    def checkpoint(self, node: fx.Node, user: fx.Node) -> None:
        """A region that the user checkpoints is computed again from it."""
        if self.reading.region:
            return
        self.reading.region = True
        region = Region(self._root, self._known.gradients, self._known.activations, self._cuts)
        self._refuse(region.problem())
        derivatives = (n for n in region.readers() if not _is_product(n))
        if not all(map(self.is_settled, derivatives)):
            self._refuse("a loss is computed again from it")

    def compare(self, node: fx.Node, user: fx.Node) -> None:
        """A mask is made of it."""
        if len(user.all_input_nodes) > 1 or user.target in VIEWS | CASTS:
            self._refuse("compared with another tensor: a rounded value may equal no exact one")
            return
        self.reading.masks.append(user)
        self._chain.compare(user)

    def step(self, node: fx.Node, user: fx.Node) -> None:
        """A pointwise operator is computed again from it."""
        if not isinstance(user.meta["val"], torch.Tensor):
            self.unknown(node, user)
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

    def loss(self, node: fx.Node, user: fx.Node) -> None:
        """A loss's own derivative reads it."""
        self._refuse("read before the first layer's backward: a loss stays exact")

    def batched(self, node: fx.Node, user: fx.Node) -> None:
        """A product of two activations reads it."""
        self.reading.batched = self.reading.fine = True
        self._chain.end(node)

    def batch_norm(self, node: fx.Node, user: fx.Node) -> None:
        """A batch norm's backward in one operator reads it."""
        self.reading.channel = True

    def factor(self, node: fx.Node, user: fx.Node) -> None:
        """It is a factor of a gradient."""
        inverse = user.target is aten.div.Tensor and user.args[1] is node
        self._refuse(self._chain.end(node, inverse=inverse))
        self._meet_gradient(node, user)

    def unknown(self, node: fx.Node, user: fx.Node) -> None:
        """Nothing is known of the operator."""
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

    def product(self, node: fx.Node, user: fx.Node) -> None:
        """A layer's product reads it."""
        self.reading.convolution |= "conv" in str(user.target)
        self.reading.product |= strip(node, VIEWS | CASTS | MOVES) is self._root
        self._chain.end(node)

    def attention(self, node: fx.Node, user: fx.Node) -> None:
        """Fused attention's backward reads it."""
        names = {name for name, value in named_arguments(user) if value is node}
        beyond = names - _ATTENTION_OPERANDS
        if beyond:
            self._refuse(f"attention's {', '.join(sorted(beyond))}")
        self.batched(node, user)

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
    return ours or node.target in LAYER_PRODUCTS or node.target in BATCHED_PRODUCTS


def is_attention(node: fx.Node) -> bool:
    """The backward of a fused attention."""
    name = getattr(node.target, "__name__", str(node.target))
    return "attention" in name and "backward" in name


@dataclasses.dataclass(frozen=True)
class Rule:
    """What becomes of a saved tensor that one kind of reader reads."""

    reader: str
    """Who reads, in the words of docs/tolerance.md."""
    with_gradient: bool | None
    """Whether what the reader makes depends on a gradient; None: either."""
    applies: Callable[[_Reader, fx.Node], bool]
    """Whether a node is such a reader."""
    judge: Callable[[_Reader, fx.Node, fx.Node], None]
    """(reading, what is read of the tensor, its reader): note what the reader needs."""
    then: str
    """What follows for the tensor, and why."""


# fmt: off
RULES: tuple[Rule, ...] = (
    Rule("the backward's caller", None, lambda _, user: user.op != "call_function",
         _Reader.returned, "exact"),
    Rule("what asks for its size: `full_like`, a pool's backward", None,
         lambda _, user: user.target in SHAPE_ONLY,
         _Reader.size, "rounded: its values are not read"),
    Rule("fused attention's backward", True, lambda _, user: is_attention(user),
         _Reader.attention, "q, k, v and output in 12 bits, since a softmax makes errors absolute; "
         "the rest exact"),
    Rule("a product of two activations: attention by hand", True,
         lambda _, user: user.target in BATCHED_PRODUCTS,
         _Reader.batched, "in 12 bits, likewise"),
    Rule("a layer's product", True, lambda _, user: user.target in LAYER_PRODUCTS or is_ours(user),
         _Reader.product, "rounded: the gradient's relative error is the tensor's"),
    Rule("what comes before the first layer's or attention's backward", True,
         lambda reading, user: not reading.is_settled(user),
         _Reader.loss, "exact: a loss's own derivative, unless a gradient of the tensor's size "
         "comes in from outside"),
    Rule("a batch norm's backward", True,
         lambda _, user: user.target is aten.native_batch_norm_backward.default,
         _Reader.batch_norm, "rounded around its channels' means"),
    Rule("a gradient that it is a factor of, or chooses parts of", True,
         lambda _, user: user.target in LINEAR_IN_GRADIENT | VIEWS | CASTS | MOVES,
         _Reader.factor, "rounded: errors are relative to the gradient. Exact: statistics that are "
         "broadcast, what meets its own mean only after the gradient, norms of fewer than 16 "
         "elements"),
    Rule("any other operator with a gradient", True, lambda *_: True,
         _Reader.unknown, "exact: not known to tolerate rounding"),
    Rule("a region of `torch.utils.checkpoint`", False, lambda _, user: is_checkpointed(user),
         _Reader.checkpoint, "rounded: gradients of a point next to it. Exact where the region "
         "chooses (top k), bends sharply, or meets what was kept"),
    Rule("a view, a cast, a move such as `cat` and `gather`", False,
         lambda _, user: user.target in VIEWS | CASTS | MOVES or _is_getitem(user),
         _Reader.move, "as the result's readers say; exact if cast to whole numbers"),
    Rule("a product of ours", False, lambda _, user: is_ours(user),
         _Reader.product, "rounded, as for a layer's product"),
    Rule("a sum, a product or the like", False,
         lambda _, user: not is_pointwise(user),
         _Reader.region, "exact: a region starts there"),
    Rule("a comparison", False, lambda _, user: _makes_bool(user),
         _Reader.compare, "with a constant: the mask is kept without loss; with another tensor: "
         "exact, since what is rounded equals nothing"),
    Rule("another pointwise operator", False, lambda *_: True,
         _Reader.step, "as the result's readers say, once tried on samples. Exact: what is "
         "broadcast, rounded to whole steps, or added to another tensor, which may cancel all but "
         "the error"),
)
# fmt: on
"""The first that applies counts."""
