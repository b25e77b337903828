"""Layers whose rows have something in common that is taken away behind them: a batch norm on data.

Where rows of x have much in common (inputs whose mean is thirty deviations, columns of years) and
what is behind the layer takes a mean over rows away, the exact g_y adds up to zero over rows: g_w
depends on what tells rows apart alone. What quantising changes in g_y does not add up to zero. It
meets what rows have in common, which may be many times as large; so does what quantising changes in
the g_x of any layer on the way. Hence all layers between such a place and data that no norm bounds
stay exact, and what is stored of tensors between them is fine around their mean, or exact.

A layer norm bounds a row, not what rows have in common: a class token behind it may be five times
as alike from image to image as it is different, and a batch norm in a projection head takes that
away. Usually it is less, and layers stay on integers; but nothing is stored in fewer than 8 bits.

Such places are statistics over rows that a norm takes away or scales by (batch norm, instance norm,
``y - y.mean(0)``), deviations, a difference of a tensor's own rows, a softmax over rows, and
attention, whose softmax goes over the rows of k.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Collection, Sequence, Set
from typing import Any

import torch
from torch import fx

from hot_compile.passes.base.graph import (
    IMAGE_DIMS,
    aten,
    closure,
    made_of_tangents,
    named_inputs,
    placeholders,
    rank_of,
    strip,
)
from hot_compile.passes.base.operators import (
    BATCHED_PRODUCTS,
    CASTS,
    DEVIATIONS,
    EXTREMES,
    MATRIX_PRODUCTS,
    PARTS,
    REDUCTIONS,
    SCALED_BY_TENSOR,
    SPLITS,
    TRANSPOSES,
    VIEWS,
    is_pointwise,
)
from hot_compile.passes.base.site import Site, hint
from hot_compile.passes.layers.match import GraphInputs
from hot_compile.passes.storage.normalised import bounds, is_numbers

CENTRED = (
    "no norm bounds it, and what its rows have in common is taken away behind it, as by a batch "
    "norm: what is left may be less than errors"
)
_FIRST = {**MATRIX_PRODUCTS, **BATCHED_PRODUCTS, aten.convolution.default: 0}
"""Products, and where they have the first factor; the weight follows."""
_SAME = VIEWS | CASTS
_MULTIPLES = _SAME | SCALED_BY_TENSOR | {aten.squeeze.dims, operator.getitem}
_ATTENTION, _KEY = "_scaled_dot_product", 1


Features = frozenset[int]
"""Dimensions of a tensor along which a layer's outputs lie; the others are rows."""


@dataclasses.dataclass(frozen=True)
class Common:
    """Nodes of a forward on their way to where what their rows have in common is taken away.

    What else is made of such a node does not count it as common: from a tensor that goes another
    way, too, gradients come that add up to more than errors.
    """

    unbounded: frozenset[fx.Node] = frozenset()
    """Made of data that no norm bounds."""
    bounded: frozenset[fx.Node] = frozenset()
    """Behind a norm of rows; nothing has taken away what these have in common so far."""


def centred(graph: fx.Graph, inputs: GraphInputs) -> Common:
    """What data is made into on its way to where rows' common part is taken.

    Args:
        graph: a joint graph.
        inputs: which of its placeholders are parameters; nothing is found where that is unknown.
    """
    if not inputs.parameters:
        return Common()
    names = named_inputs(graph, inputs.parameters)
    backward = made_of_tangents(graph)
    data = closure(node for node in placeholders(graph) if node not in names) - backward
    forward = [node for node in graph.nodes if node in data]
    features: dict[fx.Node, Features] = {}
    unbounded: set[fx.Node] = set()
    even: set[fx.Node] = set()
    taking: set[fx.Node] = set()
    means: set[fx.Node] = set()
    for node in forward:
        features[node] = _features(node, features)
        if _is_data(node) or (not bounds(node) and unbounded & set(node.all_input_nodes)):
            unbounded.add(node)
        if _takes(node, features):
            taking.add(node)
            if _takes_mean(node):
                means.add(node)
        if node in means or _is_even(node, features, even):
            even.add(node)
    found = _only_taken(forward, features, taking) & unbounded
    bounded = _only_taken(forward, features, means) - even - unbounded
    return Common(frozenset(found), frozenset(bounded))


def _only_taken(
    forward: Sequence[fx.Node], features: dict[fx.Node, Features], taking: Set[fx.Node]
) -> set[fx.Node]:
    """Nodes from which every way, or every way from some of its outputs, is to one of ``taking``.

    ``forward``: in order; what only gradients are made of is no way.
    """
    reaching: set[fx.Node] = set()
    passing: set[fx.Node] = set()
    for node in reversed(forward):
        users = [user for user in node.users if user in features or user.op == "output"]
        others = [user for user in users if not _is_taken(node, user, taking)]
        if len(others) < len(users) or reaching & set(others):
            reaching.add(node)
        parts = [user for user in others if _is_part(user, node, features)]
        whole = set(others) - set(parts)
        ends = any(user.op == "output" for user in users)
        if ends or passing & whole or (parts and passing.issuperset(parts)):
            passing.add(node)
    return reaching - passing


def _is_taken(node: fx.Node, user: fx.Node, taking: Set[fx.Node]) -> bool:
    return user in taking and (_ATTENTION not in str(user.target) or user.args[_KEY] is node)


def _is_part(user: fx.Node, whole: fx.Node, features: dict[fx.Node, Features]) -> bool:
    """``user`` is some of the outputs, as k is of a layer that makes q, k and v."""
    if user.target is operator.getitem and whole.target in SPLITS:
        given: fx.Node = whole.args[0]  # type: ignore[assignment]
        place = SPLITS[whole.target]
        dim: Any = whole.args[place] if len(whole.args) > place else 0
        return dim % max(1, rank_of(given)) in features[given]
    cut = user.target in PARTS and user.args[0] is whole  # not a size it is cut to
    return cut and _dim(user, whole) in features[whole]


def mark(sites: Sequence[Site], nodes: Set[fx.Node]) -> list[Site]:
    """``sites``, those marked whose forward product is among ``nodes``."""
    return [
        dataclasses.replace(site, centred=True)
        if site.nodes and site.nodes.forward in nodes
        else site
        for site in sites
    ]


def _is_data(node: fx.Node) -> bool:
    """Numbers that the user passes in, whole ones too if a function is computed of them."""
    if node.op == "placeholder":
        return is_numbers(node)
    given = node.args[0] if node.target in CASTS and is_numbers(node) else None
    whole = isinstance(given, fx.Node) and given.op == "placeholder"
    return whole and given.meta["val"].dtype is not torch.bool  # type: ignore[union-attr]


def _is_even(node: fx.Node, data: Collection[fx.Node], even: Set[fx.Node]) -> bool:
    """What ``node`` has in common from row to row was taken away from all that it is made of.

    Not where weights are among its rows: class tokens, registers, prompts.
    """
    if node.target in DEVIATIONS:
        return True
    operands = node.all_input_nodes
    given = [operand for operand in operands if operand in data]
    tokens = node.target is aten.cat.default and len(given) < len(operands)
    return bool(given) and all(operand in even for operand in given) and not tokens


def _takes(node: fx.Node, features: dict[fx.Node, Features]) -> bool:
    """Rows of what ``node`` reads (of attention: the keys) may have anything in common."""
    if _ATTENTION in str(node.target):
        return True
    if node.target in DEVIATIONS:
        return _summed_rows(node, features) is not None
    operands = node.args[:2]
    if node.target is not aten.sub.Tensor or not all(isinstance(o, fx.Node) for o in operands):
        return False
    whole, less = operands
    own, statistic = strip(whole, _SAME), strip(less, _MULTIPLES)  # type: ignore[arg-type]
    if statistic.target in REDUCTIONS:
        summed = _summed_rows(statistic, features)
        return summed is not None and strip(summed, _SAME) is own
    if strip(less, _SAME) is not own:  # type: ignore[arg-type]
        return False
    return any(_takes_rows(side, own, features) for side in operands)  # type: ignore[arg-type]


def _takes_mean(taking: fx.Node) -> bool:
    """What is left is what tells rows apart: not so of softmaxes, which take their rows' largest
    away, and attention's are of every transformer.
    """
    if taking.target in DEVIATIONS:
        return True
    less = taking.args[1] if taking.target is aten.sub.Tensor else None
    return isinstance(less, fx.Node) and strip(less, _MULTIPLES).target not in EXTREMES


def _summed_rows(reduction: fx.Node, features: dict[fx.Node, Features]) -> fx.Node | None:
    """What ``reduction`` goes over, if that is some of its rows and nothing else."""
    source = reduction.args[0]
    dims: Any = reduction.args[1] if len(reduction.args) > 1 else None
    if not isinstance(source, fx.Node) or source not in features or not dims or not rank_of(source):
        return None  # a tensor without dimensions may be reduced over dimension 0
    sizes = source.meta["val"].shape
    over = {dim % len(sizes) for dim in dims if hint(sizes[dim]) > 1}
    return source if over and not over & features[source] else None


def _takes_rows(side: fx.Node, whole: fx.Node, features: dict[fx.Node, Features]) -> bool:
    """``side``, a view of ``whole``, has some of its rows, or pairs each with others."""
    while side is not whole:
        before: fx.Node = side.args[0]  # type: ignore[assignment]
        if side.target is aten.unsqueeze.default:
            return True
        if side.target in PARTS and _dim(side, before) not in features[before]:
            return True
        side = before
    return False


def _dim(node: fx.Node, source: fx.Node) -> int:
    """The dimension of ``source`` that ``node`` has as its argument."""
    dim: Any = node.args[1] if len(node.args) > 1 else 0
    return dim % max(1, source.meta["val"].dim())


def _features(node: fx.Node, known: dict[fx.Node, Features]) -> Features:
    """Where ``node`` has a layer's outputs, from where its operands have them."""
    value, given = node.meta.get("val"), [n for n in node.all_input_nodes if n in known]
    if given and (node.target is operator.getitem or not isinstance(value, torch.Tensor)):
        return known[given[0]]
    if not isinstance(value, torch.Tensor):
        return frozenset()
    if node.target in _FIRST:
        if node.args[_FIRST[node.target] + 1] in known:
            return frozenset()  # rows by rows, as logits of attention
        return frozenset({value.dim() - 1 if node.target in BATCHED_PRODUCTS else 1})
    sources = [n for n in given if rank_of(n)]
    if sources and node.target in VIEWS:
        return _viewed(node, sources[0], known[sources[0]])
    alike = [n for n in sources if rank_of(n) == value.dim()]
    if is_pointwise(node):
        return frozenset(
            dim + value.dim() - rank_of(n)
            for n in sources
            for dim in known[n]
            if n in alike or not alike
        )
    if alike:
        return known[alike[0]]
    return frozenset({1 if value.dim() >= IMAGE_DIMS else value.dim() - 1})


def _viewed(node: fx.Node, source: fx.Node, features: Features) -> Features:
    """``features`` of ``source`` as its view ``node`` has them."""
    before, after = source.meta["val"], node.meta["val"]
    if node.target in TRANSPOSES:
        order = list(range(before.dim()))
        if node.target is aten.permute.default:
            order = [dim % before.dim() for dim in node.args[1]]  # type: ignore[union-attr]
        elif before.dim() > 1:
            one, other = node.args[1:3] if node.target is aten.transpose.int else (0, 1)
            order[one], order[other] = order[other], order[one]  # type: ignore[index]
        return frozenset(place for place, dim in enumerate(order) if dim in features)
    if node.target is aten.select.int:
        gone = _dim(node, source)
        return frozenset(dim - (dim > gone) for dim in features if dim != gone)
    if node.target in (aten.slice.Tensor, aten.alias.default):
        return features
    if node.target is aten.expand.default:
        return frozenset(dim + after.dim() - before.dim() for dim in features)
    return _reshaped(list(map(hint, before.shape)), list(map(hint, after.shape)), features)


def _reshaped(before: Sequence[int], after: Sequence[int], features: Features) -> Features:
    """``features`` of a tensor of shape ``before`` in its view of shape ``after``."""
    found: set[int] = set()
    if 0 in before:
        return frozenset()
    i = j = 0
    while i < len(before) or j < len(after):
        first, group = i, j
        left = right = 1
        while True:  # dimensions that hold the same elements on both sides
            if left <= right and i < len(before):
                left, i = left * before[i], i + 1
            elif j < len(after):
                right, j = right * after[j], j + 1
            else:
                break
            if left == right:
                break
        if features & set(range(first, i)):
            found |= {dim for dim in range(group, j) if after[dim] != 1}
    return frozenset(found)
