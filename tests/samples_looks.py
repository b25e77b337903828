"""Whether looks at steps on a GPU stay below the peak of steps without them."""

from collections.abc import Callable

import torch
from torch import nn

import hot_compile

Made = tuple[nn.Module, Callable[..., object], Callable[[], torch.Tensor]]
"""A model, what it was compiled to, and one forward of that, which gives the loss."""


def looks_stay_below_a_gpus_peak(make: Callable[[str], Made], dtype: torch.dtype) -> None:
    """Three steps of ``make(accept)`` under autocast, without looks and with two."""
    peaks = {}
    for accept in ("off", "auto"):
        torch._dynamo.reset()
        model, step, forward = make(accept)
        torch.cuda.reset_peak_memory_stats()
        for _ in range(3):
            with torch.autocast("cuda", dtype, enabled=dtype is not torch.float32):
                loss = forward()
            loss.backward()
            model.zero_grad()
        peaks[accept] = torch.cuda.max_memory_allocated()
        if accept == "auto":
            found = hot_compile.certificate(step)
            assert not found.unseen
            assert len(found.looks) == 2
            assert found.errors.worst < 0.2
        del model, step, forward, loss
    assert peaks["auto"] < 1.02 * peaks["off"]
