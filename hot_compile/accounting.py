"""``memory_report``: what crosses from forward to backward, as stored, beside what was measured."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table
from torch import Tensor, fx, nn
from torch._functorch import config as functorch_config
from torch._inductor.compile_fx import compile_fx

from .inspect import budgets, check_arguments, head_table, megabytes, predicted_time, rates_note
from .memory import held_tensors, peak_bytes, storage_bytes
from .page import save_page
from .passes.head.plan import HeadDecision
from .passes.profile.profile import Profile
from .passes.storage.record import Crossing
from .progress import progress
from .record import GraphReport
from .stand_in import Backend, compiled_by
from .stock import FLAGS, Compared
from .tables import PlainTable, as_html, rendered
from .unchanged import Reached, reached, unchanged


@dataclasses.dataclass(frozen=True)
class Measured:
    """One configuration's forward and backward, bytes."""

    held: int
    """Kept by autograd between forward and backward, parameters and inputs aside."""
    copies: int
    """Of these, copies of inputs and parameters in another order of strides: Inductor keeps the
    channels-last form of what a convolution reads. ``predicted_held_bytes`` does not foresee it."""
    peak: int
    """How far memory rises during forward and backward above what is there before. By the CUDA
    allocator's account, or on a CPU by replaying every allocation and release."""


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """What ``backend="hot"`` keeps of a training step; prints itself as tables."""

    crossing: tuple[Crossing, ...]
    """Every tensor that crosses to the backward, largest first."""
    measured: Mapping[str, Measured]
    """By configuration: ``exact`` Inductor, ``exact+recompute`` (Inductor told that it may
    recompute pointwise results) and ``hot``."""
    heads: tuple[HeadDecision, ...] = ()
    """Products that go in chunks with their loss: what of them never exists does not cross."""
    graphs: tuple[GraphReport, ...] = ()
    """Of ``hot``: what was done to each, as ``explain`` tells it."""
    stock: Mapping[str, Sequence[GraphReport]] = dataclasses.field(default_factory=dict, repr=False)
    """By configuration other than ``hot``: the same graphs, as they are traced there."""
    note: str = ""
    """What is to be known of the predictions."""

    @property
    def predicted_held_bytes(self) -> int:
        """What the crossing tensors take as they are stored."""
        return sum(c.bytes for c in self.crossing)

    @property
    def uncompressed_bytes(self) -> int:
        """What the same tensors would take uncompressed."""
        return sum(c.bytes_before for c in self.crossing)

    def to_json(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {
            "predicted_held_bytes": self.predicted_held_bytes,
            "uncompressed_bytes": self.uncompressed_bytes,
            "predicted_seconds": [graph.predicted_seconds for graph in self.graphs],
            "budgets": [dataclasses.asdict(g.budget) for g in self.graphs if g.budget],
            "left_out_bytes": sum(head.bytes_left_out for head in self.heads),
            "measured": {name: dataclasses.asdict(m) for name, m in self.measured.items()},
            "crossing": [dataclasses.asdict(c) for c in self.crossing],
        }

    def save_json(self, path: str | Path) -> None:
        """Write :meth:`to_json` to ``path``."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n")

    def save_html(self, path: str | Path, profile: Profile | str | Path | None = None) -> None:
        """Write one self-contained page: what was measured, layers, what crosses, graphs.

        ``profile``: what calibration measured, or its file; the layers' errors are then shown.
        """
        save_page(path, self.graphs, self.measured, profile, stock=self.stock, note=self.note)

    def tables(self) -> list[Table]:
        """Crossing tensors; heads, if there are any; configurations."""
        heads = [head_table(self.heads)] if self.heads else []
        return [self._crossing_table(), *heads, self._measured_table()]

    def _crossing_table(self) -> Table:
        sizes = ("before", "stored")
        columns = ("tensor", "module", "shape", "stored as", *sizes, "why")
        table = PlainTable("kept for the backward", *columns, right=set(sizes))
        for c in self.crossing:
            scheme = c.dtype if c.scheme == "exact" else c.scheme
            scheme += ", on the host" if c.host_bytes else ""
            shape = " x ".join(c.shape)
            held = megabytes(c.bytes_before), megabytes(c.bytes)
            table.add(c.name, c.module, shape, scheme, *held, c.reason)
        return table

    def _measured_table(self) -> Table:
        table = Table(title="measured", box=box.SIMPLE, title_justify="left")
        table.add_column("configuration")
        for column in ("held", "smaller", "copies", "peak", "smaller"):
            table.add_column(column, justify="right")
        exact = self.measured["exact"]
        for name, m in self.measured.items():
            ratios = f"{exact.held / max(1, m.held):.2f}x", f"{exact.peak / max(1, m.peak):.2f}x"
            held, copies, peak = (megabytes(size) for size in (m.held, m.copies, m.peak))
            table.add_row(name, held, ratios[0], copies, peak, ratios[1])
        return table

    def __str__(self) -> str:
        return rendered(self._parts())

    def _repr_html_(self) -> str:
        return as_html(self._parts())

    def _parts(self) -> list[Table | str]:
        """What is printed, in order."""
        predicted = f"predicted for hot: {megabytes(self.predicted_held_bytes)} held"
        notes = [self.note] if self.note else []
        lines = [predicted, predicted_time(self.graphs), *notes, *budgets(self.graphs)]
        return [*self.tables(), *lines]


def memory_report(
    model: Callable[..., Any],
    *inputs: Any,
    loss_fn: Callable[..., Tensor] | None = None,
    options: Mapping[str, Any] | None = None,
    **keywords: Any,
) -> MemoryReport:
    """Compile and run ``model``'s forward and backward three ways, and account for the memory.

    Prints the tables. Gradients, buffers and the random state are put back as they were.

    Args:
        model: a module in training mode, on CPU or CUDA; or a function that runs such modules and
            returns the loss, without calling ``backward``. Modules are found through its arguments,
            closure and globals. What is compiled by "hot" already is compiled piece by piece as it
            is there, each of the three ways.
        inputs, keywords: what a training step passes to it. A model with an argument ``options`` or
            ``loss_fn`` of its own goes into a function: ``memory_report(lambda: model(...))``.
        loss_fn: makes a scalar of what ``model`` returns; by default that itself if it is a scalar,
            or a Hugging Face output's ``loss``, else the mean of its squares.
        options: as for ``torch.compile(model, backend="hot", options=...)``; over those that a
            compiled model has of its own.

    Returns:
        A :class:`MemoryReport`: ``to_json()``, ``save_json(path)``, ``save_html(path)``.

    Raises:
        TypeError: ``model`` cannot be called, calls ``backward`` itself, or returns nothing that a
            loss can be made of; ``options`` is no dict.
    """
    check_arguments("memory_report", model, options)
    compared = Compared()
    step = _Step(model, inputs, keywords, loss_fn or _loss, reached(model, inputs, keywords))
    measured = {}
    with progress(len(FLAGS) + 1) as begin:
        for name, flags in FLAGS.items():
            begin(f"compiling and measuring {name}")
            with functorch_config.patch(dict(flags)):
                measured[name] = _measure(step, _inductor)
        begin("compiling and measuring hot")
        measured["hot"] = _measure(step, compared.backend(options))
    graphs = tuple(compared.graphs)
    crossing = (c for graph in graphs for c in graph.crossing)
    heads = tuple(head for graph in graphs for head in graph.plan.heads)
    largest_first = tuple(sorted(crossing, key=lambda c: -c.bytes))
    note = rates_note(step.found.devices)
    report = MemoryReport(largest_first, measured, heads, graphs, compared.stock, note)
    print(report)
    return report


def _loss(output: Any) -> Tensor:
    """The output if it is a scalar, its entry ``loss``, or the mean of its squares."""
    named = output.get("loss") if isinstance(output, Mapping) else None
    if isinstance(named, Tensor):
        return named
    tensors = [output] if isinstance(output, Tensor) else _floats_in(output)
    if not tensors:
        raise TypeError(
            f"got a model that returns {type(output).__name__} without floating-point tensors; "
            "pass loss_fn=, which makes a scalar of it."
        )
    if len(tensors) == 1 and tensors[0].dim() == 0:
        return tensors[0]
    return torch.stack([t.float().square().mean() for t in tensors]).sum()


def _floats_in(output: Any) -> list[Tensor]:
    values = output.values() if isinstance(output, Mapping) else output
    values = values if isinstance(values, Sequence | type({}.values())) else ()
    return [v for v in values if isinstance(v, Tensor) and v.is_floating_point()]


@dataclasses.dataclass(frozen=True)
class _Step:
    """What is measured: a model or function with its arguments, and what it works on."""

    model: Callable[..., Any]
    inputs: tuple[Any, ...]
    keywords: Mapping[str, Any]
    loss_fn: Callable[..., Tensor]
    found: Reached

    def forward(self, compiled: Callable[..., Any]) -> Tensor:
        """The loss, ready for its backward. Raises TypeError if that has run, or there is none."""
        loss = self.loss_fn(compiled(*self.inputs, **self.keywords))
        if loss.requires_grad and all(p.grad is None for p in self.found.parameters):
            return loss
        raise TypeError(_NO_BACKWARD)

    def whole(self, compiled: Callable[..., Any]) -> None:
        """Forward and backward. Raises TypeError like :meth:`forward`."""
        try:
            self.forward(compiled).backward()
        except RuntimeError as error:
            if "second time" in str(error):  # its backward has run, and gradients were set to None
                raise TypeError(_NO_BACKWARD) from error
            raise
        for parameter in self.found.parameters:
            parameter.grad = None


_NO_BACKWARD = (
    "got a function whose loss has no backward left to run; expected one that returns the loss and "
    "does not call backward, with some parameter that needs a gradient: memory is measured between "
    "the two. Pass the part of the step up to the loss (explain takes whole steps)."
)


def _inductor(gm: fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> Any:
    return compile_fx(gm, example_inputs)


def _measure(step: _Step, backend: Backend) -> Measured:
    """One warm-up, one forward held, one whole step."""
    found = step.found
    device = next(iter(found.devices), torch.device("cpu"))
    with (
        unchanged(found),
        torch.enable_grad(),
        compiled_by(step.model, found, backend) as compiled,
    ):
        step.whole(compiled)  # compiles
        loss = step.forward(compiled)
        held = held_tensors(loss, nn.Module(), (found.parameters, found.buffers, found.tensors))
        sizes = storage_bytes(held), _copies(held, found)
        del loss, held
        return Measured(*sizes, peak_bytes(functools.partial(step.whole, compiled), device))


def _copies(held: list[Tensor], found: Reached) -> int:
    given = [*found.parameters, *found.tensors]
    known = {(t.shape, t.dtype) for t in given if t.dim() > 2}
    strides = {t.stride() for t in given}
    return sum(t.nbytes for t in held if (t.shape, t.dtype) in known and t.stride() not in strides)
