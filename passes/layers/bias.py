"""The gradient of a layer's bias, which whoever quantises g_y can sum up on the way."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from hot_compile.passes.base.emit import Emitter
from hot_compile.passes.base.graph import aten, strip
from hot_compile.passes.base.operators import CASTS, RESHAPES
from hot_compile.passes.base.site import hint

_SAME_ORDER = CASTS | RESHAPES
"""They leave all elements, and leave them in their order."""


def grad_bias(grad_output: fx.Node) -> fx.Node | None:
    """The sum over g_y's rows, if the graph wants it: whoever quantises g_y reads all of it anyway.

    It may be taken of g_y in another shape, of another cast to the same dtype, or of an exact copy
    in fp32. ``precedes`` says whether g_y is there in time.
    """
    g: torch.Tensor = grad_output.meta["val"]
    dtype, base = g.dtype, strip(grad_output, _SAME_ORDER)
    stack, seen = [(base, base.meta["val"].dtype == dtype)], {base}
    while stack:
        node, equal = stack.pop()
        for user in node.users:
            if equal and user.users and _sums_rows(user, g):
                return user
            if user in seen or user.target not in _SAME_ORDER:
                continue
            now = user.meta["val"].dtype
            seen.add(user)
            stack.append((user, now == dtype or (equal and now is torch.float32)))
    return None


def precedes(grad_output: fx.Node, total: fx.Node) -> bool:
    """g_y comes before ``total`` in the graph, moved there if need be and nothing is in the way."""
    if grad_output < total:
        return True
    chain, node = [], grad_output
    while not node < total:  # ends at the base of both at the latest
        chain.append(node)
        node = node.args[0]  # type: ignore[assignment]
    needed = {n for moved in chain for n in moved.all_input_nodes} - set(chain)
    if not all(n < total for n in needed):
        return False
    for moved in reversed(chain):
        total.prepend(moved)
    return True


def _sums_rows(node: fx.Node, g: torch.Tensor) -> bool:
    """Sums all of ``g`` [L, O] but over the last dimension, which is O."""
    if node.target is not aten.sum.dim_IntList:
        return False
    args: Any = node.args
    summed: torch.Tensor = args[0].meta["val"]
    rest = {dim % summed.dim() for dim in args[1]} == set(range(summed.dim() - 1))
    return rest and summed.shape[-1] == g.shape[-1] and hint(summed.numel()) == hint(g.numel())


def total(emit: Emitter, bias: fx.Node, sums: fx.Node) -> fx.Node:
    """``sums`` [n, O] added up, as ``bias`` has it."""
    wanted: torch.Tensor = bias.meta["val"]
    added = emit(aten.sum.dim_IntList, sums, [0])
    if wanted.dim() > 1:
        added = emit(aten.reshape.default, added, list(wanted.shape))
    return emit.cast(added, wanted.dtype)
