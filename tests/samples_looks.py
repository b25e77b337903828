"""Whether looks at steps on a GPU stay below the peak of steps without them."""

from collections.abc import Callable

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import hot_compile

Made = tuple[nn.Module, Callable[..., object], Callable[[], torch.Tensor]]
"""A model, what it was compiled to, and one forward of that, which gives the loss."""


class Counter(TorchDispatchMode):
    """Counts bytes of tensors that operators make, as an allocator does: while they live."""

    def __init__(self):
        super().__init__()
        self._made = {}

    @classmethod
    def ignore_compile_internals(cls):
        """What is compiled inside is compiled as without it."""
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
        for tensor in _tensors(made):
            storage = tensor.untyped_storage()
            if storage._cdata not in given:
                self._made[StorageWeakRef(storage)] = storage.nbytes()
        return made

    @property
    def alive(self):
        self._made = {ref: size for ref, size in self._made.items() if not ref.expired()}
        return sum(self._made.values())


def _tensors(nest):
    return [leaf for leaf in pytree.tree_leaves(nest) if isinstance(leaf, torch.Tensor)]


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
