"""What a training step keeps in memory between forward and backward, and how high it rises."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils import _pytree as pytree


def held_bytes(output: Any, model: nn.Module, inputs: Any = ()) -> int:
    """Bytes that autograd holds for the backward of ``output`` on top of what is there anyway.

    Call it between forward and backward, with the loss (or any nest of outputs). Every storage is
    counted once and whole, as the allocator does: three views of one qkv tensor are one tensor.
    What waits in pinned host memory is none of the device's.
    Parameters, buffers and ``inputs`` are left out; they stay alive with or without a backward.
    Works the same for eager and compiled models, on CPU and CUDA.
    """
    return storage_bytes(held_tensors(output, model, inputs))


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the whole storages of ``tensors``, which must not share any."""
    return sum(t.untyped_storage().nbytes() for t in tensors)


def held_tensors(output: Any, model: nn.Module, inputs: Any = ()) -> list[Tensor]:
    """The tensors that ``held_bytes`` counts, one per storage: their dtypes and shapes tell why."""
    theirs = _tensors_in([*model.parameters(), *model.buffers(), inputs])
    seen = {_storage_key(t) for t in theirs}
    held = []
    for saved in _saved_tensors(output):
        if (key := _storage_key(saved)) not in seen and not saved.is_pinned():
            seen.add(key)
            held.append(saved)
    return held


def _storage_key(tensor: Tensor) -> tuple[str, int]:
    return str(tensor.device), tensor.untyped_storage().data_ptr()


def _tensors_in(nest: Any) -> list[Tensor]:
    """The tensors of a nest that have memory of their own: a sparse one's indices and values."""
    return [
        part
        for leaf in pytree.tree_leaves(nest)
        if isinstance(leaf, Tensor)
        for part in _parts(leaf)
    ]


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


def _saved_tensors(output: Any) -> Iterator[Tensor]:
    leaves = pytree.tree_leaves(output)
    for node in _autograd_nodes(t.grad_fn for t in leaves if isinstance(t, Tensor)):
        yield from saved_by(node)


def _autograd_nodes(roots: Iterable[Any]) -> Iterator[Any]:
    stack, seen = [r for r in roots if r is not None], set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        stack.extend(parent for parent, _ in node.next_functions if parent is not None)


def saved_by(node: Any) -> list[Tensor]:
    """Tensors saved by one autograd node, whether written in C++ or in Python."""
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        # AOTAutograd's CompiledFunction is one of these. Tensors that the compiler knows nobody
        # mutates bypass save_for_backward and lie in a plain list.
        return _tensors_in([node.saved_tensors, getattr(node, "_tensors_no_vc_check", None)])
    names = [n for n in dir(node) if n.startswith("_saved_")]  # dir() evaluates nothing
    return [t for name in names for t in _tensors_in(getattr(node, name))]


def peak_bytes(call: Callable[[], Any], device: torch.device) -> int:
    """The most bytes of tensors alive at once during ``call``, above what was alive before it."""
    found: list[int] = []
    with risen(device, found.append):
        call()
    return found[0]


def risen(
    device: torch.device, tell: Callable[[int], Any]
) -> contextlib.AbstractContextManager[None]:
    """Tells, at its end, the most bytes of tensors alive at once inside, above those before it."""
    return _risen_on_gpu(device, tell) if device.type == "cuda" else _risen_on_cpu(tell)


@contextlib.contextmanager
def _risen_on_gpu(device: torch.device, tell: Callable[[int], Any]) -> Iterator[None]:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    yield
    torch.cuda.synchronize(device)
    tell(torch.cuda.max_memory_allocated(device) - before)


@contextlib.contextmanager
def _risen_on_cpu(tell: Callable[[int], Any]) -> Iterator[None]:
    """Every allocation and release of the CPU allocator, replayed in order.

    Unlike resident set size this does not depend on what malloc gives back to the system, so it is
    the same number in every run.
    """
    prof: Any = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with _silent():
        prof.start()
    try:
        yield
    finally:
        with _silent():
            prof.stop()
    events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    alive = peak = 0
    for event in events:
        alive += event.nbytes()
        peak = max(peak, alive)
    tell(peak)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Without stderr: the profiler's library writes there, and is told its level at start only."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
