"""What would be done to a model on a device that is not here, and what would fit into its memory.

Nothing runs and no memory is filled: tensors are fake, and traced as a CPU's. (Fake CUDA tensors
can be traced forward without a GPU, but autograd's engine asks the driver for the device.)
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from .budget import Ledger
from .config import HotConfig, split_options
from .errors import OptionError
from .inspect import reporting
from .passes.cost.devices import rates_of
from .record import GraphReport, Reports

Made = tuple[nn.Module, tuple[Any, ...]]
"""A model in training mode, and what a step passes to it."""
DTYPES = {"fp32": None, "tf32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""By name: what autocast makes of products; None: fp32, or TF32 on CUDA."""
OPTIMIZERS = {"adamw": 2, "momentum": 1, "sgd": 0}
"""Numbers that an optimizer keeps of each parameter, as large as the parameter."""
_TRIES = 8


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Bytes of a training step, predicted. What kernels need while they run is not in it."""

    batch: int
    graphs: tuple[GraphReport, ...]
    weights: int
    """Parameters and buffers."""
    gradients: int
    states: int
    """The optimizer's."""
    inputs: int

    @property
    def held(self) -> int:
        """Kept from forward to backward."""
        return sum(graph.held_bytes for graph in self.graphs)

    @property
    def total(self) -> int:
        """All of it at once, as it is between forward and backward."""
        return self.weights + self.gradients + self.states + self.inputs + self.held


def maker(spec: str) -> Callable[[int], Made]:
    """What makes a model and its inputs for a batch size.

    ``spec``: ``timm:NAME``, or ``MODULE:FUNCTION`` with a function of the batch size that returns
    the model and its inputs as a tuple.

    Raises:
        OptionError: neither, or there is no such model or function.
    """
    home, _, name = spec.partition(":")
    expected = "timm:NAME, or MODULE:FUNCTION, a function of the batch that returns (model, inputs)"
    try:
        if not name:
            raise ValueError("no colon in it")
        if home == "timm":
            return _timm(name)
        return getattr(importlib.import_module(home), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise OptionError.value("model", spec, f"{expected} ({error})") from error


def _timm(name: str) -> Callable[[int], Made]:
    timm = importlib.import_module("timm")
    if not timm.is_model(name):
        near = timm.list_models(f"*{name.split('_')[0]}*")[:5]
        raise ValueError(f"timm has no such model; it has {', '.join(near) or 'others'}")

    def make(batch: int) -> Made:
        model = timm.create_model(name)
        return model.train(), (torch.empty(batch, *model.default_cfg["input_size"]),)

    return make


def predict(
    make: Callable[[int], Made],
    batch: int,
    device: str,
    dtype: str = "fp32",
    optimizer: str = "adamw",
    options: Mapping[str, Any] | None = None,
) -> Prediction:
    """Trace one step of ``batch`` samples and plan it by the rates of ``device``.

    Args:
        make: makes the model and its inputs.
        batch: samples.
        device: as ``passes.cost.devices.rates_of`` takes it: a name, or a file of rates.
        dtype: one of ``DTYPES``. optimizer: one of ``OPTIMIZERS``.
        options: as for ``torch.compile(model, backend="hot")``; ``STOCK`` for Inductor as it is.

    Raises:
        OptionError: an unknown device, dtype, optimizer or option, or a budget that cannot be met.
    """
    for name, got, valid in (("dtype", dtype, DTYPES), ("optimizer", optimizer, OPTIMIZERS)):
        if got not in valid:
            raise OptionError.value(name, got, f"one of {', '.join(valid)}")
    HotConfig.from_options(split_options(options)[0])  # Dynamo would wrap what it raises later
    rates = rates_of(device, tf32=dtype == "tf32")
    reports = Reports()

    def alone(_: torch.device, asked: int) -> Ledger:
        return Ledger(asked, None)

    backend = reporting(reports, options, prices=lambda _: rates, ledger=alone)
    with torch.random.fork_rng():
        model, inputs = make(batch)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, _compiling():
        inputs = pytree.tree_map_only(Tensor, mode.from_tensor, inputs)
        _make_fake(model, mode)
        with _autocast(DTYPES[dtype]):
            torch.compile(model, backend=backend)(*inputs)
    weights, gradients = _sizes(model)
    states = gradients * OPTIMIZERS[optimizer]
    given = sum(leaf.nbytes for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor))
    graphs = tuple(_without_forms(graph) for graph in reports.graphs)
    return Prediction(batch, graphs, weights, gradients, states, given)


@contextlib.contextmanager
def _compiling() -> Iterator[None]:
    torch._dynamo.reset()
    try:
        with torch.enable_grad():
            yield
    except BackendCompilerFailed as error:
        if isinstance(error.inner_exception, OptionError):
            raise error.inner_exception from None
        raise
    finally:
        torch._dynamo.reset()


def _autocast(dtype: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype) if dtype else contextlib.nullcontext()


def _make_fake(model: nn.Module, mode: FakeTensorMode) -> None:
    """Parameters and buffers without their memory; tied ones stay tied."""
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = mode.from_tensor(tensor)  # type: ignore[assignment]


def _sizes(model: nn.Module) -> tuple[int, int]:
    """Bytes of parameters and buffers, and of what gets a gradient."""
    everything = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    return everything, sum(p.nbytes for p in model.parameters() if p.requires_grad)


def _without_forms(graph: GraphReport) -> GraphReport:
    """Whether exact forms are taken was asked of a CPU: that says nothing of another device."""
    return dataclasses.replace(graph, plan=dataclasses.replace(graph.plan, exact_forms=()))


def largest_batch(total: Callable[[int], int], memory: int, start: int) -> int | None:
    """The largest batch whose ``total`` bytes are at most ``memory``; None: not even one sample.

    ``total`` grows about linearly: a few batches are tried, the answer is one of them.
    """
    known = {batch: total(batch) for batch in {start, start // 2 or 2}}
    for _ in range(_TRIES):
        guess = _guess(known, memory)
        if guess in known:
            break
        known[guess] = total(guess)
    return max((batch for batch, size in known.items() if size <= memory), default=None)


def _guess(known: Mapping[int, int], memory: int) -> int:
    """Where a line through two known batches reaches ``memory``: those on either side, if any."""
    fits = max((batch for batch, size in known.items() if size <= memory), default=0)
    too_big = min((batch for batch, size in known.items() if size > memory), default=0)
    near = sorted(known, key=lambda batch: abs(known[batch] - memory))[:2]
    low, high = (fits, too_big) if fits and too_big else sorted(near)
    slope = max(1, (known[high] - known[low]) / (high - low))
    guess = low + int((memory - known[low]) // slope)
    return max(1, fits, min(guess, too_big - 1 if too_big else guess))
