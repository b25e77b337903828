"""What is worked out element by element of restored tensors, over one long line of memory.

Whoever restores an element finds its bits by its place (``runtime/planes.py``). Where a kernel goes
over rows, its place is a sum of the row's and the column's, and in that Triton finds no vectors: it
loads a plane element by element, and works out each element's row and column besides. Of a GELU's
backward whose rows are 384 long that were 98 instructions an element; over one line they are 53.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import fx

from hot_compile.passes.base.emit import Emitter
from hot_compile.passes.base.graph import aten, walk
from hot_compile.passes.base.operators import is_pointwise
from hot_compile.passes.storage.pieces import RESHAPED, known

_BY_PLANES: dict[Any, int] = {
    torch.ops.hot.restored_planes.default: 3,
    torch.ops.hot.restored_nibbles.default: 2,
}
"""What restores groups, and how many of its arguments are theirs."""


def work_out_flat(backward: fx.Graph) -> int:
    """Rewrite what is made of restored tensors; returns how many of these."""
    restored = [n for n in backward.nodes if n.target in _BY_PLANES and _is_long(n)]
    region = walk(restored, _made_of)
    flat: dict[fx.Node, fx.Node] = {}
    for node in [n for n in backward.nodes if n in region]:
        emit = Emitter(backward, node.next, node)
        if node.target in _BY_PLANES:
            flat[node] = _restored(emit, node)
        elif node.target in RESHAPED:
            flat[node] = flat[node.all_input_nodes[0]]
        else:
            given = {n: _line(emit, flat, n) for n in node.all_input_nodes}
            args, kwargs = fx.map_arg((node.args, node.kwargs), given.__getitem__)
            flat[node] = emit(node.target, *args, **kwargs)
    for node, line in flat.items():
        readers = [user for user in node.users if user not in region]
        if readers:
            shape = list(node.meta["val"].shape)
            whole = Emitter(backward, line.next, node)(aten.view.default, line, shape)
            for reader in readers:
                reader.replace_input_with(node, whole)
    if flat:
        backward.eliminate_dead_code()
    return len(restored)


def _is_long(node: fx.Node) -> bool:
    """On a GPU, in memory one element after the other, as many as are known."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.is_cuda or value.dim() == 0:
        return False
    return known(value) and value.is_contiguous()


def _made_of(node: fx.Node) -> Iterator[fx.Node]:
    """What is worked out of it and of tensors that are as long."""
    size = node.meta["val"].numel()
    for user in node.users:
        fits = user.target in RESHAPED or (
            is_pointwise(user) and all(_is_as_long(given, size) for given in user.all_input_nodes)
        )
        if fits and _is_long(user) and user.meta["val"].numel() == size:
            yield user


def _is_as_long(given: fx.Node, size: int) -> bool:
    value = given.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return True
    return _is_long(given) and value.numel() == size


def _restored(emit: Emitter, node: fx.Node) -> fx.Node:
    """The same of all its groups, one behind the other."""
    count = _BY_PLANES[node.target]
    parts = cast(tuple[fx.Node, ...], node.args[:count])
    lines = [emit(aten.view.default, p, [-1, *p.meta["val"].shape[-2:]]) for p in parts]
    return emit(node.target, *lines, *node.args[count:], **node.kwargs)


def _line(emit: Emitter, flat: dict[fx.Node, fx.Node], given: fx.Node) -> fx.Node:
    """``given`` as one line; what is a single number as it is."""
    value = given.meta.get("val")
    if given in flat or not isinstance(value, torch.Tensor) or value.dim() == 0:
        return flat.get(given, given)
    return emit(aten.view.default, given, [-1])
