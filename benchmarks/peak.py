"""How far memory rises during a call, by the allocator's own account."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(call: Callable[[], Any], device: torch.device) -> int:
    """The most bytes of tensors alive at once during ``call``, above what was alive before it."""
    return _cuda_peak(call, device) if device.type == "cuda" else _cpu_peak(call)


def _cuda_peak(call: Callable[[], Any], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _cpu_peak(call: Callable[[], Any]) -> int:
    """Every allocation and release of the CPU allocator, replayed in order.

    Unlike resident set size this does not depend on what malloc gives back to the system, so it is
    the same number in every run.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        call()
    events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    alive = peak = 0
    for event in events:
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak
