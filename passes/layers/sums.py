"""Gradients of one weight from several uses are added as they are made.

A recurrent net uses a weight at every step, an ALBERT at every layer. Inductor's own products add
to the sum as they are made (``addmm``); what is made by a library of ours it would add in the end,
in one kernel, with all of it held until then: 5.3 times the peak of a cell of 32 steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import fx

from hot_compile.passes.base.emit import Emitter
from hot_compile.passes.base.graph import aten, strip, through_views
from hot_compile.passes.base.operators import CASTS, VIEWS
from hot_compile.runtime import ops, sums  # noqa: F401  they register the operators

ADDED = torch.ops.hot.added.default
_LEAST = 4
"""Gradients of one weight: of fewer, one kernel that adds them all is the better bargain."""
_MADE = {torch.ops.hot.scaled_int_mm.default, torch.ops.hot.conv_grad_weight.default}
_FOLLOWED = VIEWS | CASTS


def add_as_made(backward: fx.Graph) -> int:
    """Rewrite sums of at least ``_LEAST`` terms, some of them ours; returns how many additions."""
    count = 0
    for last in backward.find_nodes(op="call_function", target=aten.add.Tensor):
        if not _adds(last) or not all(reader.op == "output" for reader in through_views(last)):
            continue  # a sum on the way of a gradient goes into the kernel that reads it
        additions = list(_additions(last))
        if len(additions) < _LEAST - 1:
            continue
        for node in [each for each in additions if any(map(_is_ours, each.args))]:
            added = Emitter(backward, node, node)(ADDED, *node.args)
            node.replace_all_uses_with(added)
            backward.erase_node(node)
            count += 1
    return count


def _additions(last: fx.Node) -> Iterator[fx.Node]:
    """``last``, and those of which it adds to the results, one after the other."""
    node: fx.Node | None = last
    while node is not None:
        yield node
        before = [n for n in node.all_input_nodes if _adds(n) and len(n.users) == 1]
        node = before[0] if len(before) == 1 else None


def _adds(node: fx.Node) -> bool:
    """Two tensors of one shape, dtype and layout, of sizes known as it is compiled."""
    terms = node.all_input_nodes
    if node.target is not aten.add.Tensor or node.kwargs or len(terms) != len(node.args):
        return False
    values = [term.meta["val"] for term in terms]
    if not all(isinstance(value, torch.Tensor) for value in values):
        return False
    sizes = [[*value.shape, *value.stride()] for value in values]
    known = all(isinstance(size, int) for size in itertools.chain(*sizes))
    return known and sizes[0] == sizes[-1] and values[0].dtype == values[-1].dtype


def _is_ours(term: object) -> bool:
    """A product of a library of ours, perhaps in another dtype or shape."""
    return isinstance(term, fx.Node) and strip(term, _FOLLOWED).target in _MADE
