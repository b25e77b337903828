"""What is looked at, in how little memory, by how much it is off, and whether looks stay below a
GPU's peak."""

import functools
import gc
from collections.abc import Callable

import torch
from samples_cancelling import critic, mlp, near_pairs
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import hot_compile
from hot_compile.backend import hot
from hot_compile.inspect import run_uncompiled
from hot_compile.observing.walk import Room

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
    one, peaks = torch.ones(64, 64, device="cuda", requires_grad=True), {}
    (one @ one).sum().backward()  # cuBLAS has its 32 MiB for either thread, which it keeps
    for accept in ("off", "auto"):
        torch._dynamo.reset()
        gc.collect()  # what is left of the run before
        before = torch.cuda.memory_allocated()
        model, step, forward = make(accept)
        torch.cuda.reset_peak_memory_stats()
        for _ in range(3):
            with torch.autocast("cuda", dtype, enabled=dtype is not torch.float32):
                loss = forward()
            loss.backward()
            model.zero_grad()
        peaks[accept] = torch.cuda.max_memory_allocated() - before
        if accept == "auto":
            found = hot_compile.certificate(step)
            assert not found.unseen
            assert len(found.looks) == 2
            assert found.errors.worst < 0.2
        del model, step, forward, loss
    assert peaks["auto"] < 1.02 * peaks["off"], peaks


ALWAYS = {"min_gain": 0, "keep_head": False, "accept": "auto"}


def graph_of(function, *inputs, given=None):
    """Dynamo's; ``given`` takes what it is called with."""
    found = []

    def backend(gm, _):
        found.append(gm)
        return lambda *args: (given is not None and given.append(args)) or gm(*args)

    torch.compile(function, backend=backend)(*inputs)
    return found[0]


class Least(Room):
    """For one node at a time."""

    left = 0

    def ask(self, size):
        """There is room for that."""


def compiled(function, reports=None, lower=False, **options):
    keywords = {} if lower else {"inner_compile": run_uncompiled}
    backend = functools.partial(hot, options={**ALWAYS, **options}, recorder=reports, **keywords)
    return torch.compile(function, backend=backend)


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def errors(got, want):
    """Of all parameters whose gradients are not tiny beside the largest."""
    largest = max(g.norm() for g in want.values())
    kept = {n: g for n, g in want.items() if g.norm() > 1e-3 * largest}
    return {n: ((got[n] - g).norm() / g.norm()).item() for n, g in kept.items()}


def run_step(f, loss, model, x):
    torch.manual_seed(1)
    model.zero_grad()
    loss(f, x).backward()


def bad_net():
    return mlp(64, 1), near_pairs()


def train_critic(step, model, x, steps=9):
    for _ in range(steps):
        model.zero_grad()
        critic(step, x).backward()
    return gradients(model)
