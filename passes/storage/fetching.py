"""What waits in host memory is fetched back while what the backward wanted before it is worked on.

An attention's backward wants q, k, v and the output at once, behind products that leave the bus the
time to bring them: fetched one by one, three of them would be waited for.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from itertools import groupby

from torch import fx

from hot_compile.passes.cost.storing import fuses
from hot_compile.passes.graph import VIEWS, made_of_tangents


def kernels_before(backward: fx.Graph) -> dict[fx.Node, int]:
    """How many kernels that are not Inductor's have worked on gradients before each node."""
    gradients = made_of_tangents(backward)
    count, found = 0, {}
    for node in backward.nodes:
        found[node] = count
        count += node in gradients and _is_kernel(node)
    return found


def wanted_at_once(
    places: Sequence[fx.Node], kernels: Mapping[fx.Node, int]
) -> list[list[fx.Node]]:
    """``places``, in the graph's order, in groups with no kernel of another library between."""
    return [list(group) for _, group in groupby(places, key=kernels.__getitem__)]


def _is_kernel(node: fx.Node) -> bool:
    view = node.target in VIEWS or node.target is operator.getitem
    return node.op == "call_function" and not view and not fuses(node)
