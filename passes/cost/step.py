"""About how long a step takes as it comes: what else is predicted is measured against that.

Products and convolutions by their operations; and their operands and results in memory twice, once
for themselves and once for the elementwise kernels between them. Measured on an H100 that is 0.6
(batch norms, shifted windows) to 0.85 (transformers) of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from hot_compile.passes.cost.linear import Rates
from hot_compile.passes.site import bytes_of, hint

SLACK = 0.03
"""Share of a step that storing may take with ``memory="auto"``. Shorter forms of functions, and
kernels that do more at once, were measured to win about as much."""


def step_seconds(graph: fx.Graph, rates_of: Callable[[torch.device], Rates | None]) -> float | None:
    """Of a joint graph's products; None where a device has no rates, or does not work while the
    host goes on: there what layers win is many times what storing costs."""
    total = 0.0
    for node in graph.nodes:
        count = flop_registry.get(getattr(node.target, "overloadpacket", None))
        if node.op != "call_function" or count is None:
            continue
        args, kwargs, result = pytree.tree_map_only(
            fx.Node, lambda n: n.meta["val"], (node.args, node.kwargs, node)
        )
        moved = [t for t in pytree.tree_leaves((args, result)) if isinstance(t, torch.Tensor)]
        rates = rates_of(moved[0].device)
        if rates is None or not rates.asynchronous:
            return None
        speed = rates.exact.get(str(moved[0].dtype).removeprefix("torch."))
        total += 2 * sum(map(bytes_of, moved)) / rates.copy
        if speed:
            total += _operations(count, args, kwargs, result) / speed
    return total or None


def _operations(count: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> int:
    """As PyTorch counts them; 0, so a shorter step, where it refuses shapes."""
    try:
        return hint(count(*args, **kwargs, out_val=result))
    except Exception:
        return 0
