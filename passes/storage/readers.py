"""What the backward does with a saved tensor, and whether each reader tolerates rounding.

``RULES`` has every kind of reader, with what follows and why; the table of docs/tolerance.md is
made of it. A pointwise chain that the backward recomputes from the tensor is followed operator by
operator (``Chain``); whatever the table does not know leaves the tensor exact, with the reason.
Nothing here knows the data: whether sums cancel is seen, and repaired, by comparison with exact
gradients.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping, Set
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from hot_compile.passes.base.graph import (
    CHANNEL_DIM,
    as_made,
    aten,
    closure,
    is_ours,
    is_tangent,
    made_of,
    made_of_tangents,
    makes_bool,
    named_arguments,
    placeholders,
    strip,
    through_views,
)
from hot_compile.passes.base.operators import (
    BATCHED_PRODUCTS,
    CASTS,
    FLOATS,
    LINEAR_IN_GRADIENT,
    MOVES,
    REDUCTIONS,
    SHAPE_ONLY,
    SUMS,
    SUMS_OF_TWO,
    VIEWS,
    is_layer_product,
    is_pointwise,
)
from hot_compile.passes.base.site import hint
from hot_compile.passes.storage.chain import Chain, is_at_least_one
from hot_compile.passes.storage.masks import Forward, kept_for
from hot_compile.passes.storage.put_back import puts_back

_AGAIN = {CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE}
_ATTENTION_OPERANDS = {"query", "key", "value", "out"}
"""Errors of q and k are factors of e in what the backward recomputes. What values, and so outputs,
have in common cancels between the two sums that a softmax's backward subtracts."""

_SUMS = SUMS | {aten.add.Tensor}
_FEW = 4
"""Times that a product must have fewer elements than a tensor to be none of its rows."""


@dataclasses.dataclass
class Reading:
    """What was found of one saved tensor's readers."""

    chain: Chain
    """What is recomputed from it by pointwise operators."""
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
    attended: bool = False
    """It is an attention's values, in 16 bits."""
    channel: bool = False
    """A vector by channel is taken from it: what is left must be exact, not the whole."""
    rows: bool = False
    """A norm's backward sums over its innermost dimension."""
    region: bool = False
    """A checkpointed region is computed again from it."""
    masks: list[fx.Node] = dataclasses.field(default_factory=list)
    """To be kept: comparisons of what is recomputed from it, or what is made of them."""


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is known of a backward graph, gathered once."""

    gradients: Set[fx.Node]
    """What depends on a tangent."""
    settled: Set[fx.Node]
    """Of these, what is no derivative of a loss inside the graph."""
    activations: Set[str]
    """Names of placeholders that hold more than functions of parameters."""
    products: Mapping[str, int]
    """Of placeholders made element by element of layers' products and parameters: how many elements
    the largest of these products has."""
    factors: Set[str]
    """Names of the forward's values, and of their views, that parameters multiply in batches."""
    forward: Forward | None
    """None where it is not known."""


def facts(
    backward: fx.Graph,
    activations: Set[str],
    heads: Set[str] = frozenset(),
    products: Mapping[str, int] = MappingProxyType({}),
    factors: Set[str] = frozenset(),
    forward: Forward | None = None,
) -> Facts:
    """Gather what ``read`` needs; ``heads``: placeholders that hold what a head in chunks made."""
    gradients = settled = made_of_tangents(backward)
    if all(hint(_numel(n)) == 1 for n in filter(is_tangent, placeholders(backward))):
        made = (n for n in gradients if heads & {given.name for given in n.all_input_nodes})
        layers = (n for n in gradients if is_product(n) or is_attention(n))
        settled = closure([*made, *layers])
    return Facts(gradients, settled, activations, products, factors, forward)


def read(root: fx.Node, known: Facts, cuts: Set[fx.Node] = frozenset()) -> Reading:
    """Everything the backward does with ``root``, one of its placeholders or recomputed values.

    Args:
        root: followed through what is recomputed from it. known: of its graph.
        cuts: recomputed values that will be saved, too: not followed.
    """
    return _Reader(root, known, cuts).reading


class _Reader:
    def __init__(self, root: fx.Node, known: Facts, cuts: Set[fx.Node]) -> None:
        self._chain = Chain(root, (known.forward or {}).get(root.name, root))
        self.reading = Reading(self._chain)
        self._root, self.known = root, known
        self._elements = hint(root.meta["val"].numel())
        for node in _downstream(root, known.gradients, cuts):
            for operand in dict.fromkeys(node.all_input_nodes):
                if operand in self._chain and not self.reading.refusal:
                    self.reading.readers += 1
                    self._read(operand, node)
                    self.reading.culprit = node if self.reading.refusal else None

    def _read(self, node: fx.Node, user: fx.Node) -> None:
        """Judge one use; what ``user`` recomputes from ``node`` joins the chain."""
        with_gradient = user in self.known.gradients
        for rule in RULES:
            if rule.with_gradient in (None, with_gradient) and rule.applies(self, user):
                rule.judge(self, node, user)
                return

    def of_layer(self, user: fx.Node) -> bool:
        """``user`` is a layer's product; of batches, if it is the gradient of a parameter."""
        if user.target in BATCHED_PRODUCTS:
            names = {as_made(node).name for node in user.all_input_nodes}
            return bool(names & self.known.factors) and is_result(user)
        return is_layer_product(user) or is_ours(user)

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
        self.reading.region = True

    def compare(self, node: fx.Node, user: fx.Node) -> None:
        """A mask is made of it, as the forward can make it of what is not rounded."""
        masks = kept_for(user, self.known.forward)
        if not masks:
            self._refuse(f"compared as the forward cannot ({user.target})")
        elif any(hint(_numel(mask)) > self._elements for mask in masks):
            self._refuse("a statistic: compared with more elements")
        self.reading.masks += [mask for mask in masks if mask not in self.reading.masks]

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
        others = [n for n in others if not is_number(n) and not makes_bool(n)]
        if user in self._chain:
            return
        if puts_back(user):
            self._chain.move(node, user)
        elif others and self._is_affine(node, user, others):
            self.reading.channel = True
            self._chain.affine(node, user)
        elif others and user.target in SUMS_OF_TWO and not self._is_bias(others):
            self._refuse("a sum or difference with another tensor, which may cancel it")
        else:
            self._refuse(self._chain.step(user, bool(others)))

    def _is_affine(self, node: fx.Node, user: fx.Node, others: list[fx.Node]) -> bool:
        """``user`` takes a vector by channel from ``node``, or goes on with one after that."""
        sums = user.target in (aten.add.Tensor, aten.sub.Tensor)
        factors = user.target in (aten.mul.Tensor, aten.div.Tensor) and self.reading.channel
        if not (sums or factors) or (user.args[0] is not node and user.target is aten.div.Tensor):
            return False
        vectors = len(others) == 1 and _by_channel(others[0], user)
        # a gain or bias, which says nothing of how the values are spread, may follow any norm
        vectors &= self.reading.channel or not self._of_parameters(others[0])
        mine, root = (tuple(map(hint, n.meta["val"].shape)) for n in (node, self._root))
        return vectors and mine == root

    def _is_bias(self, others: list[fx.Node]) -> bool:
        """A vector of parameters, or a sample's: a layer made it of what has few rows, as a
        transformer's of diffusion shifts what a norm made by its time."""
        (other,) = others
        few = 2 * hint(other.meta["val"].numel()) <= self._elements
        made = (self.known.products.get(n.name, self._elements) for n in self._data(other))
        return few and all(_FEW * elements <= self._elements for elements in made)

    def _of_parameters(self, node: fx.Node) -> bool:
        """``node`` is made of parameters alone."""
        return next(self._data(node), None) is None

    def _data(self, node: fx.Node) -> Iterator[fx.Node]:
        """What comes in that ``node`` is made of, but parameters."""
        given = (n for n in made_of(node) if n.op == "placeholder")
        return (n for n in given if n.name in self.known.activations or is_tangent(n))

    def loss(self, node: fx.Node, user: fx.Node) -> None:
        """A loss's own derivative reads it."""
        self._refuse("read before the first layer's backward: a loss stays exact")

    def batched(self, node: fx.Node, user: fx.Node) -> None:
        """A product of two activations reads it."""
        self.reading.fine = True
        self._chain.end(node)

    def batch_norm(self, node: fx.Node, user: fx.Node) -> None:
        """A batch norm's backward in one operator reads it."""
        self.reading.channel = True

    def factor(self, node: fx.Node, user: fx.Node) -> None:
        """It is a factor of a gradient."""
        divides = user.target is aten.div.Tensor and user.args[1] is node
        if divides and not is_at_least_one(node):
            self._refuse("divided by: its smallest values matter most")
        if hint(_numel(user)) > self._elements:
            self._refuse("a statistic: broadcast over more elements")
        self._chain.end(node)
        for reduction in through_views(user):
            if reduction.target in REDUCTIONS:
                self._note_rows(reduction)

    def unknown(self, node: fx.Node, user: fx.Node) -> None:
        """Nothing is known of the operator."""
        self._refuse(f"read by {user.target}, not known to tolerate rounding")

    def product(self, node: fx.Node, user: fx.Node) -> None:
        """A layer's product reads it."""
        self.reading.convolution |= "conv" in str(user.target)
        self.reading.product |= strip(node, VIEWS | CASTS | MOVES) is self._root
        self._chain.end(node)

    def attention(self, node: fx.Node, user: fx.Node) -> None:
        """Fused attention's backward reads it."""
        names = {name for name, value in named_arguments(user) if value is node}
        beyond = names - _ATTENTION_OPERANDS
        if not names:
            self._refuse("flex attention, whose function may do anything to logits")
        if beyond:
            self._refuse(f"attention's {', '.join(sorted(beyond))}")
        half = self._root.meta["val"].dtype.itemsize == 2
        self.reading.attended = half and names == {"value"}
        self.reading.fine |= not self.reading.attended
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


def is_number(node: fx.Node) -> bool:
    """A constant, or a size."""
    value = node.meta.get("val")
    return not isinstance(value, torch.Tensor) or node.target is aten.full.default


def _numel(node: fx.Node) -> Any:
    value = node.meta.get("val")
    return value.numel() if isinstance(value, torch.Tensor) else 0


def is_result(node: fx.Node) -> bool:
    """Nothing but views and sums lies between ``node`` and what the backward returns."""
    stack, results = [node], 0
    while stack:
        for user in stack.pop().users:
            if user.op == "output":
                results += 1
            elif user.target in VIEWS | CASTS | MOVES | _SUMS:
                stack.append(user)
            else:
                return False
    return results > 0


def is_product(node: fx.Node) -> bool:
    """A product of matrices, of a layer or of attention by hand, exact or ours."""
    return is_ours(node) or is_layer_product(node) or node.target in BATCHED_PRODUCTS


def _is_checkpointed(node: fx.Node) -> bool:
    """``node`` is computed again because the user checkpoints it."""
    return node.meta.get("recompute") in _AGAIN


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
         "of 16-bit tensors v in 8, the others exact, as is the rest"),
    Rule("a layer's product", True, lambda reading, user: reading.of_layer(user),
         _Reader.product, "rounded: the gradient's relative error is the tensor's"),
    Rule("a product of two activations: attention by hand", True,
         lambda _, user: user.target in BATCHED_PRODUCTS,
         _Reader.batched, "in 12 bits, as for fused attention"),
    Rule("a loss inside the graph: what comes before the first product of the backward", True,
         lambda reading, user: user not in reading.known.settled,
         _Reader.loss, "exact: what is left of probabilities and targets may be small"),
    Rule("a batch norm's backward", True,
         lambda _, user: user.target is aten.native_batch_norm_backward.default,
         _Reader.batch_norm, "rounded around its channels' means"),
    Rule("a gradient that it is a factor of, or chooses parts of", True,
         lambda _, user: user.target in LINEAR_IN_GRADIENT | VIEWS | CASTS | MOVES,
         _Reader.factor, "rounded: errors are relative to the gradient. Exact: statistics that are "
         "broadcast, divisors"),
    Rule("any other operator with a gradient", True, lambda *_: True,
         _Reader.unknown, "exact: not known to tolerate rounding"),
    Rule("a region of `torch.utils.checkpoint`", False, lambda _, user: _is_checkpointed(user),
         _Reader.checkpoint, "rounded: gradients are those of a point next to it"),
    Rule("a view, a cast, a move such as `cat` and `gather`", False,
         lambda _, user: user.target in VIEWS | CASTS | MOVES or user.target is operator.getitem,
         _Reader.move, "as the result's readers say; exact if cast to whole numbers"),
    Rule("a product of ours", False, lambda _, user: is_ours(user),
         _Reader.product, "rounded, as for a layer's product"),
    Rule("a sum, a product or the like", False,
         lambda _, user: not is_pointwise(user),
         _Reader.region, "exact: a region starts there"),
    Rule("a comparison", False, lambda _, user: makes_bool(user),
         _Reader.compare, "the mask is made in the forward, of what is not rounded, and kept "
         "without loss; exact where the forward has not what is compared"),
    Rule("another pointwise operator", False, lambda *_: True,
         _Reader.step, "as the result's readers say. Where it is steep (exp): in 12 bits. Exact: "
         "poles, jumps, what is not known, what is broadcast or added to another tensor, which may "
         "cancel all but the error"),
)
# fmt: on
"""The first that applies counts."""
