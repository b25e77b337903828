"""Joint graph -> the same, in which x and a copy of x are not worked on twice.

Where a norm's input is not contiguous, its forward normalises a contiguous copy, its backward x
itself: (copy - mean) * rstd and (x - mean) * rstd are the same values in two nodes. Wherever x is
contiguous they are one node, and that normalised x crosses to the backward, where it may be
rounded. With two nodes x itself would have to cross, and its difference with the mean tolerates no
rounding: a quarter of all that an MLP-Mixer holds, the patch embeddings of a Swin or a ConvNeXt.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from hot_compile.passes.base.emit import refresh
from hot_compile.passes.base.graph import aten, makes_bool, returned, strip
from hot_compile.passes.base.operators import CASTS, POWERS, VIEWS, is_pointwise, multiplier
from hot_compile.passes.base.site import hint


def merge_copies(graph: fx.Graph) -> int:
    """Let what is computed of x be taken from its contiguous copy; gives how many nodes went.

    Only pointwise operators that are applied to both, with the same other arguments: the values
    are equal to the last bit, the copy's are contiguous. What leaves the graph, or is read by its
    strides, keeps its own.
    """
    fixed = {node for node in returned(graph) if isinstance(node, fx.Node)}
    gone = 0
    for copy in graph.find_nodes(op="call_function", target=aten.clone.default):
        source = copy.args[0]
        if not _is_plain_copy(copy, source):
            continue
        pairs = [(source, copy)]
        while pairs:
            old, new = pairs.pop()
            for user in list(old.users):
                twin = _twin(user, old, new)
                if twin is None or user in fixed or _read_by_strides(user):
                    continue
                user.replace_all_uses_with(twin)
                graph.erase_node(user)
                refresh([twin])
                pairs.append((twin, twin))
                gone += 1
    return gone


def drop_ones(graph: fx.Graph) -> int:
    """Let x stand for x * 1 where that is compared or exponentiated; gives how many products went.

    Some decompositions of torch before 2.14 scale by 1 in the backward alone (softplus', ELU's): of
    what is compared there the forward has nothing, and x would cross exact. Others stay: by how
    many operators there are Inductor decides what it fuses.
    """
    fixed = {node for node in returned(graph) if isinstance(node, fx.Node)}
    gone = 0
    for product in [n for n in graph.nodes if multiplier(n) == 1 and n not in fixed]:
        if _stands_for(product.args[0], product):
            product.replace_all_uses_with(product.args[0])
            graph.erase_node(product)
            gone += 1
    return gone


def _stands_for(source: fx.Node, product: fx.Node) -> bool:
    """No reader of ``product`` finds a difference, and one of them is what it is dropped for."""
    judged = any(makes_bool(user) or user.target in POWERS for user in product.users)
    given = strip(source, VIEWS).op == "placeholder"  # which may be written to later
    return judged and not given and _alike(product.meta["val"], source.meta["val"])


def copies_first(graph: fx.Graph) -> int:
    """Move casts and copies of what the graph computes right behind that; gives how many moved.

    Min-cut never recomputes a value's cast that comes after a product of the same value: as far as
    it can see, that is long after. So an adapter's x, cast to the adapter's dtype behind the frozen
    layer's product, would cross beside what it is cheaply made of. Values stay as they are.
    """
    moved = 0
    for copy in [node for node in graph.nodes if node.target in CASTS | {aten.clone.default}]:
        (source,) = copy.all_input_nodes
        if source.op == "call_function" and copy.prev is not source:
            source.append(copy)
            moved += 1
    return moved


def _is_plain_copy(copy: fx.Node, source: Any) -> bool:
    """Contiguous, of something that is not."""
    if not isinstance(source, fx.Node) or source.op != "call_function":
        return False
    new, old = copy.meta.get("val"), source.meta.get("val")
    if not isinstance(new, torch.Tensor) or not isinstance(old, torch.Tensor):
        return False
    return new.is_contiguous() and not old.is_contiguous()


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """The same shape, dtype and strides."""
    mine, others = ([hint(n) for n in (*t.shape, *t.stride())] for t in (one, other))
    return one.dtype is other.dtype and mine == others


def _twin(user: fx.Node, old: fx.Node, new: fx.Node) -> fx.Node | None:
    """An earlier node that does to ``new`` what ``user`` does to ``old``."""
    if not is_pointwise(user) or _draws(user):
        return None
    args, kwargs = _described(user, old, new)
    for other in new.users:
        same = other is not user and other.target is user.target and other < user
        if same and (other.args, other.kwargs) == (args, kwargs):
            return other
    return None


def _described(user: fx.Node, old: fx.Node, new: fx.Node) -> tuple[Any, Any]:
    def swapped(node: fx.Node) -> fx.Node:
        return new if node is old else node

    return fx.map_arg(user.args, swapped), fx.map_arg(user.kwargs, swapped)


def _draws(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _read_by_strides(node: fx.Node) -> bool:
    return any(user.target is aten.as_strided.default for user in node.users)
