"""About how long a step takes as it comes: what else is predicted is measured against that.

Where the run itself was timed (``observing/step_clock.py``), that counts; but not that its device
was seen to wait, which tells layers alone (``Joint.step``). Else it is predicted. The device's
time: products and convolutions by their operations; and their operands and results in memory twice,
once for themselves and once for the elementwise kernels between them. Measured on an H100 that is
0.5 (batch norms, shifted windows) to 0.85 (transformers) of what its kernels take.

The host's time: a launch for each kernel that Inductor is expected to make, which is within a third
of what it makes. Where that is the longer one, a kernel more costs what its launch costs.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from hot_compile.passes.base.operators import (
    CONVOLUTIONS,
    REDUCTIONS,
    VIEWS,
    is_grouped_product,
)
from hot_compile.passes.base.site import bytes_of, elements_of, hint
from hot_compile.passes.cost.conv import products_of
from hot_compile.passes.cost.linear import Rates
from hot_compile.passes.storage.prices import LAUNCH, fuses, readers

SLACK = 0.03
"""Share of a step that storing, and making again, may take with ``memory="auto"``. Kernels that do
more at once were measured to win one to three percent."""
_SHORT = 0.75
"""Of what a GPU's kernels take, what is predicted: 0.6 (convolutions) to 0.9 (language models)."""
_MORE = 1.5
"""Times that a step must take what was predicted for storing more to be worth a second compile. On
an H200 a ResNet-10 of 1494 images took 34 ms for 7: cuDNN is slow with 3 to 32 channels."""
_LONGER = 2.5
"""Times that the host's time must be the device's to count: the latter is predicted too short.
On an H100 EfficientNet-B0, batch 128, 3.4 (measured 1.5), Swin-T 1.7 (0.8), ResNet-50 1.3 (0.6)."""


@dataclasses.dataclass(frozen=True)
class StepTime:
    """About how long a step takes as it comes, in seconds."""

    device: float
    host: float
    waits: bool | None = None
    """The device was seen to wait for its host, or not to; None: both times are predicted."""
    share: float = 1.0
    """Of the step: the part of it that a graph is about, where several graphs make one up."""

    @property
    def waits_for_host(self) -> bool:
        """The device has done what it was given before the host gives it more."""
        return self.host > _LONGER * self.device if self.waits is None else self.waits

    @property
    def slack(self) -> float:
        """Seconds that storing may take, by the same prices: ``SLACK`` of what is waited for."""
        if self.waits_for_host:
            return SLACK * self.share * self.host
        known = 1.0 if self.waits is not None else _SHORT
        return SLACK * self.share * self.device / known

    def tells_more_than(self, other: StepTime | None) -> bool:
        """Measured: what comes out by ``other`` is to be chosen anew.

        Where storing may take less time than by ``other``, nothing is: a step that has begun to fit
        is to fit.
        """
        if self.waits_for_host or other is None or other.waits_for_host:
            waited = other is not None and other.waits_for_host
            return self.waits_for_host != waited
        return self.slack > _MORE * other.slack

    def __str__(self) -> str:
        how = "predicted" if self.waits is None else "measured"
        times = f"{self.device * 1e3:.3g} ms on the device, {self.host * 1e3:.3g} ms on the host"
        return f"{times} ({how}): the device {'waits' * self.waits_for_host or 'does not wait'}"


def step_time(
    graph: fx.Graph,
    rates_of: Callable[[torch.device], Rates | None],
    captured: bool = False,
    forced: bool = False,
) -> StepTime | None:
    """Of a joint graph; None where a device has no rates.

    Args:
        captured: steps are CUDA graphs, which take a host next to no time.
        forced: layers are rewritten whether or not it pays; None on a CPU, where what they lose is
            many times what storing takes.
    """
    total, launch = 0.0, 0.0
    for node in graph.nodes:
        count = flop_registry.get(getattr(node.target, "overloadpacket", None))
        if node.op != "call_function" or not (count or is_grouped_product(node)):
            continue
        args, kwargs, result = pytree.tree_map_only(
            fx.Node, lambda n: n.meta["val"], (node.args, node.kwargs, node)
        )
        moved = [t for t in pytree.tree_leaves((args, result)) if isinstance(t, torch.Tensor)]
        rates = rates_of(moved[0].device)
        if rates is None or (forced and not rates.asynchronous):
            return None
        launch = rates.launch if rates.asynchronous else 0.0  # a CPU is its own host
        speed = rates.exact.get(str(moved[0].dtype).removeprefix("torch."))
        total += 2 * sum(map(bytes_of, moved)) / rates.copy
        if speed:
            total += _operations(node, count, args, kwargs, result) / speed
    calls = 0 if captured else sum(map(_is_kernel, graph.nodes))
    host = calls * LAUNCH * launch
    return StepTime(total, host) if total else None


def _is_kernel(node: fx.Node) -> bool:
    """Inductor calls something for it: a library, a reduction, or what either reads."""
    if node.op != "call_function" or node.target in VIEWS or node.target is operator.getitem:
        return False
    if node.target in REDUCTIONS or not fuses(node):
        return isinstance(node.meta.get("val"), (torch.Tensor, tuple, list))
    result = any(user.op == "output" for user in node.users)
    return result or not all(map(fuses, readers(node)))


def _operations(
    node: fx.Node, count: Callable[..., Any] | None, args: Any, kwargs: Any, result: Any
) -> int:
    """As PyTorch counts them; 0, so a shorter step, where it refuses shapes."""
    if node.target in CONVOLUTIONS:
        return 2 * products_of(args, result)
    if count is None:
        return 2 * _grouped_products(args, result)
    try:
        return hint(count(*args, **kwargs, out_val=result))
    except Exception:
        return 0


def _grouped_products(args: Any, result: Any) -> int:
    """Multiplications of a product in groups, each of whose rows one matrix is applied to; of a
    library's backward, which gives both gradients, twice that."""
    a, b = args[:2]
    gradients = 1 if isinstance(result, torch.Tensor) else 2
    if a.dim() > b.dim():  # the columns are in groups
        return gradients * elements_of(b) * hint(a.shape[-2])
    return gradients * elements_of(a) * hint(b.shape[-1])
