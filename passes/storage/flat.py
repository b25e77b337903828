"""What is worked out element by element of restored tensors, over one long line of memory.

Whoever restores an element finds its bits by its place (``runtime/planes.py``). Where a kernel goes
over rows, its place is a sum of the row's and the column's, and in that Triton finds no vectors: it
loads a plane element by element, and works out each element's row and column besides. Of a GELU's
backward whose rows are 384 long that were 98 instructions an element; over one line they are 53.

What a row is summed up for, as a softmax's backward does, goes over rows anyway: over all of them
as one dimension. By several an element's place is another sum in each operator, and each restores
it anew; so does what is worked out over one line for a kernel that goes over rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any, cast

import torch
from torch import Tensor, fx

from hot_compile.passes.base.emit import Emitter
from hot_compile.passes.base.graph import aten, walk
from hot_compile.passes.base.operators import TRANSPOSES, VIEWS, is_pointwise
from hot_compile.passes.exact.casts import CAST
from hot_compile.passes.storage.pieces import known

_BY_PLANES: dict[Any, int] = {
    torch.ops.hot.restored_planes.default: 3,
    torch.ops.hot.restored_nibbles.default: 2,
    torch.ops.hot.restored_bits.default: 1,
}
"""What restores groups, and how many of its arguments are theirs."""
_SUM = aten.sum.dim_IntList
Shape = Callable[[Tensor], list[int]]
"""As what a tensor, contiguous in memory, is gone over."""


def work_out_flat(backward: fx.Graph) -> int:
    """Rewrite what is made of restored tensors; returns how many of these."""
    restored = [n for n in backward.nodes if n.target in _BY_PLANES and _is_long(n)]
    made = walk(restored, _made_of)
    _cast_before_transposing([node for node in backward.nodes if node in made])
    wholes: list[fx.Node] = []
    for together in _made_together(restored):
        rows = _summed_up(together)
        wholes += _rewrite(backward, together, _as([-1, *rows]))
    regions = (walk([whole], _made_by_rows) for whole in wholes)
    summed = [region for region in regions if any(node.target is _SUM for node in region)]
    _rewrite(backward, set().union(*summed), _as_rows)
    if restored:
        backward.eliminate_dead_code()
    return len(restored)


def _as(shape: list[int]) -> Shape:
    return lambda _: shape


def _made_together(restored: list[fx.Node]) -> list[set[fx.Node]]:
    """What is made of ``restored``, each set of one another, and of more than masks: what a mask is
    applied to stays in the kernel that makes it, which seldom is one line's."""
    made = walk(restored, _made_of)
    sets: list[set[fx.Node]] = []
    for node in restored:
        is_mask = node.target is torch.ops.hot.restored_bits.default
        if not is_mask and not any(node in found for found in sets):
            sets.append(walk([node], lambda n: made & {*n.users, *n.all_input_nodes}))
    return sets


def _summed_up(made: Collection[fx.Node]) -> set[int]:
    """Length of the rows that are summed up of it; empty if there are none, or several lengths."""
    sums = (user for node in made for user in _made_by_rows(node) if user.target is _SUM)
    lengths = {user.all_input_nodes[0].meta["val"].shape[-1] for user in sums}
    return lengths if len(lengths) == 1 else set()


def _as_rows(value: Tensor) -> list[int]:
    return [-1, value.shape[-1]]


def _rewrite(backward: fx.Graph, region: Collection[fx.Node], shape: Shape) -> list[fx.Node]:
    """Work ``region`` out in that ``shape``; returns views as before, of what others read."""
    flat: dict[fx.Node, fx.Node] = {}
    for node in [n for n in backward.nodes if n in region]:
        emit = Emitter(backward, node.next, node)
        if node.target in _BY_PLANES:
            flat[node] = emit(aten.view.default, _restored(emit, node), shape(node.meta["val"]))
        elif node.target in VIEWS:
            source = node.all_input_nodes[0]
            flat[node] = flat[source] if source in flat else _flat(emit, flat, node, shape)
        elif node.target is _SUM:
            flat[node] = emit(_SUM, flat[node.all_input_nodes[0]], [1], True, **node.kwargs)
        else:
            given = {n: _flat(emit, flat, n, shape) for n in node.all_input_nodes}
            args, kwargs = fx.map_arg((node.args, node.kwargs), given.__getitem__)
            kwargs = {k: v for k, v in kwargs.items() if k != "memory_format"}  # of an image
            flat[node] = emit(node.target, *args, **kwargs)
    return list(_give_back(backward, flat))


def _give_back(backward: fx.Graph, flat: dict[fx.Node, fx.Node]) -> Iterator[fx.Node]:
    """Who reads what was rewritten, and was not itself, reads views of it."""
    for node, line in flat.items():
        readers = [user for user in node.users if user not in flat and user is not line]
        if readers:
            size = list(node.meta["val"].shape)
            whole = Emitter(backward, line.next, node)(aten.view.default, line, size)
            for reader in readers:
                reader.replace_input_with(node, whole)
            yield whole


def _cast_before_transposing(made: Collection[fx.Node]) -> None:
    """Casts of what is ``made``, but transposed, are taken before that.

    What autocast has of probabilities for the product behind an attention's softmax. In the
    softmax's kernel, which goes over rows, the transposed cast would be restored once more, by
    columns.
    """
    for node in made:
        for turned in [user for user in node.users if user.target in TRANSPOSES]:
            for late in [user for user in turned.users if user.target is CAST]:
                emit = Emitter(node.graph, turned, turned)
                early = emit(CAST, node, *late.args[1:], **late.kwargs)
                late.replace_all_uses_with(emit(turned.target, early, *turned.args[1:]))
                node.graph.erase_node(late)


def _is_long(node: fx.Node) -> bool:
    """On a GPU, in memory one element after the other, as many as are known."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or not value.is_cuda or value.dim() == 0:
        return False
    return known(value) and value.is_contiguous()


def _made_of(node: fx.Node) -> Iterator[fx.Node]:
    """What is worked out of it and of tensors that are as long, and views that leave the order."""
    size = node.meta["val"].numel()
    for user in node.users:
        fits = user.target in VIEWS or (
            is_pointwise(user) and all(_is_as_long(given, size) for given in user.all_input_nodes)
        )
        if fits and _is_long(user) and user.meta["val"].numel() == size:
            yield user


def _is_as_long(given: fx.Node, size: int) -> bool:
    value = given.meta.get("val")
    if not isinstance(value, Tensor) or value.dim() == 0:
        return True
    return _is_long(given) and value.numel() == size


def _made_by_rows(node: fx.Node) -> Iterator[fx.Node]:
    """Its rows' sums, and what is worked out of its rows, others as long, and a number for each."""
    shape = node.meta["val"].shape
    for user in filter(_is_long, node.users):
        if user.target is _SUM:
            fits = user.args[1:] in (([-1], True), ([len(shape) - 1], True))
        elif user.target in VIEWS:
            new = user.meta["val"].shape
            fits = (new.numel(), new[-1]) == (shape.numel(), shape[-1])
        else:
            fits = is_pointwise(user) and _goes_by_rows(user)
        if fits:
            yield user


def _goes_by_rows(node: fx.Node) -> bool:
    *rows, width = node.meta["val"].shape
    sizes: list[list[int]] = [[*rows, width], [*rows, 1], []]
    values = [given.meta.get("val") for given in node.all_input_nodes]
    given = [value for value in values if isinstance(value, Tensor)]
    return all(list(v.shape) in sizes and v.is_contiguous() for v in given)


def _restored(emit: Emitter, node: fx.Node) -> fx.Node:
    """The same of all its groups, one behind the other."""
    count = _BY_PLANES[node.target]
    parts = cast(tuple[fx.Node, ...], node.args[:count])
    lines = [emit(aten.view.default, p, [-1, *p.meta["val"].shape[-2:]]) for p in parts]
    return emit(node.target, *lines, *node.args[count:], **node.kwargs)


def _flat(emit: Emitter, flat: dict[fx.Node, fx.Node], given: fx.Node, shape: Shape) -> fx.Node:
    """``given`` in that ``shape``; what is a single number as it is.

    Of a cast the view is in front: there it is one of memory. Behind it, as behind other views,
    Inductor would work out each element's place in the old shape from its place in the new one.
    """
    value = given.meta.get("val")
    if given in flat or not isinstance(value, Tensor) or value.dim() == 0:
        return flat.get(given, given)
    node, size = given, value.numel()
    while node.target in VIEWS and _is_as_long(node.all_input_nodes[0], size):
        node = node.all_input_nodes[0]
    if node.target is CAST and _is_as_long(node.all_input_nodes[0], size):
        source = emit(aten.view.default, node.all_input_nodes[0], shape(value))
        return emit(CAST, source, *node.args[1:], **node.kwargs)
    return emit(aten.view.default, node, shape(value))
