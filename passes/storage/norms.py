"""What a product with a gradient meets: sums that norms and softmaxes are made of."""

from __future__ import annotations

from collections.abc import Iterator, Set

import torch
from torch import fx

from hot_compile.passes.base.graph import aten, strip, walk
from hot_compile.passes.base.operators import (
    CASTS,
    FUSED,
    MULTIPLES,
    REDUCTIONS,
    SUMS_OF_TWO,
    VIEWS,
)
from hot_compile.passes.base.site import hint

_SUMS = SUMS_OF_TWO | {aten.addcmul.default}
_MULTIPLES = VIEWS | CASTS | MULTIPLES | {aten.div.Tensor}
_FOLLOWED = VIEWS | CASTS | REDUCTIONS | MULTIPLES | {aten.div.Tensor, aten.squeeze.dims}


def spreads_again(reduction: fx.Node) -> bool:
    """Something larger is made of it, as norms do; of a parameter's gradient there is not."""
    size, stack = hint(reduction.meta["val"].numel()), [reduction]
    while stack:
        for user in stack.pop().users:
            value = user.meta.get("val")
            if isinstance(value, torch.Tensor) and hint(value.numel()) <= size:
                stack.append(user)
            elif user.op != "output":
                return True
    return False


def spreads(product: fx.Node, elements: int) -> bool:
    """``product``, of a gradient and ``elements`` saved numbers, repeats each of them.

    Or a multiple of it does: what is rounded there scales all that it meets alike, and no sum over
    many errors averages it out (1 / deviation of a norm's rows).
    """
    multiples = walk([product], lambda node: (u for u in node.users if u.target in _MULTIPLES))
    values = (node.meta.get("val") for node in multiples)
    return any(isinstance(v, torch.Tensor) and hint(v.numel()) > elements for v in values)


def through_views(node: fx.Node) -> Iterator[fx.Node]:
    """Readers of ``node``, seen through views."""
    for user in node.users:
        if user.target in VIEWS:
            yield from through_views(user)
        else:
            yield user


def is_softmax(node: fx.Node, product: fx.Node, gradients: Set[fx.Node]) -> bool:
    """``product``, of ``node`` and a gradient, meets another product of ``node``.

    p g - p sum(p g): where p is close to 1, what is left is as small as 1 - p.
    """
    for user in product.users:
        if user not in gradients or user.target not in _SUMS | FUSED:
            continue
        for other in user.all_input_nodes:
            sources = other.all_input_nodes if other.target in MULTIPLES else [other]
            if other is not product and (node in sources or _negated(node) in sources):
                return True
    return False


def _negated(node: fx.Node) -> fx.Node | None:
    return next((user for user in node.users if user.target is aten.neg.default), None)


def cancels(product: fx.Node, gradients: Set[fx.Node]) -> bool:
    """``product``, of a gradient and a saved tensor, meets what may cancel the tensor's mean.

    A norm that keeps the tensor itself, not the tensor less its mean, makes sums of products with
    the gradient, and takes from these what the mean alone would give; or it adds to the product
    something that is broadcast.
    """
    for user in through_views(product):
        if user.target in REDUCTIONS and any(_met(user, u, gradients) for u in _followed(user)):
            return True
        if user.target in _SUMS and _met(product, user, gradients):
            others = [n for n in user.all_input_nodes if n is not product]
            if any(_is_broadcast(n, product) for n in others):
                return True
    return False


def _followed(statistic: fx.Node) -> Iterator[fx.Node]:
    """Sums that ``statistic`` or a multiple of it enters, of its own size."""
    stack, seen = [statistic], {statistic}
    while stack:
        for user in stack.pop().users:
            if user in seen or user.op != "call_function":
                continue
            seen.add(user)
            if user.target in _SUMS:
                yield user
            elif user.target in _FOLLOWED and not _is_larger(user, statistic):
                stack.append(user)


def _is_larger(node: fx.Node, than: fx.Node) -> bool:
    return hint(node.meta["val"].numel()) > hint(than.meta["val"].numel())


def _met(node: fx.Node, total: fx.Node, gradients: Set[fx.Node]) -> bool:
    """``total`` adds another gradient tensor to what is made of ``node``, no larger than it."""
    sizes = [hint(n.meta["val"].numel()) for n in total.all_input_nodes if n in gradients]
    alike = len(sizes) > 1 and max(sizes) <= hint(node.meta["val"].numel())
    return alike and any(_has_statistic(n, gradients) for n in (total, *total.all_input_nodes))


def _has_statistic(node: fx.Node, gradients: Set[fx.Node]) -> bool:
    """A saved tensor, such as a mean, is a factor; gradients of a shared gain only add up."""
    saved = [n for n in node.all_input_nodes if n not in gradients and not is_number(n)]
    return node.target in (aten.mul.Tensor, aten.addcmul.default) and bool(saved)


def _is_broadcast(node: fx.Node, like: fx.Node) -> bool:
    """``node`` repeats fewer numbers than ``like`` has elements."""
    source = strip(node, VIEWS)
    return 2 * hint(source.meta["val"].numel()) <= hint(like.meta["val"].numel())


def is_number(node: fx.Node) -> bool:
    """A constant, or a size."""
    value = node.meta.get("val")
    return not isinstance(value, torch.Tensor) or node.target is aten.full.default
