"""``hot::head_rows``: wide products whose results only a *body* reads, chunk by chunk of rows.

A body is code of plain ATen operators that a pass has written (``passes/head``): of the products'
results of some rows, and of what else belongs to these rows, it makes small results and gradients
as wide as the products. The operator computes products, body and the products that read the
gradients; nothing as large as all rows times all columns exists. Inductor compiles a body when it
first runs. On a CPU, where that takes many steps' time of a small head, such a one works operator
by operator on blocks that stay in cache.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hot_compile.runtime.head.parts import (
    add_product,
    multiply_parts,
    parts_of,
    wide,
    width_of,
)
from hot_compile.runtime.head.products import chunk_rows, exactly
from hot_compile.runtime.head.rows import blocks, has_triton


@dataclasses.dataclass(frozen=True)
class Body:
    """What ``hot::head_rows`` does, as its text says."""

    code: str
    """``forward(self, *products, *rows, *shared)`` of a chunk: results, then gradients."""
    products: tuple[tuple[int, int, int], ...]
    """x W^T + b: their places in ``rows``, ``shared`` and ``shared``; -1: no bias."""
    results: tuple[tuple[int, str], ...]
    """Columns and dtype of each [L, columns]."""
    gradients: tuple[int, ...]
    """Columns of each."""
    readers: tuple[tuple[str, int, int], ...]
    """What is returned behind the results: "rows" (g W [L, I], W in ``shared``), "total" (g^T x
    [O, I], x in ``rows``; in fp32) or "columns" (g summed over rows [O], in fp32); of which
    gradient; of what."""

    def text(self) -> str:
        """For ``read``."""
        return json.dumps(dataclasses.astuple(self))

    @staticmethod
    @functools.cache
    def read(text: str) -> Body:
        """What ``text`` says."""
        given = json.loads(text)
        return Body(*(_frozen(part) for part in given))


def _frozen(part: Any) -> Any:
    return tuple(map(_frozen, part)) if isinstance(part, list) else part


WORTH = 2**24
"""Values of a head's products, all rows, from which on compiling its body for a CPU is repaid in
some hundred steps."""
COMPARED = 16
"""Most rows of the first chunk that a compiled body is compared on."""
OFF = 0.25
"""Most of what it makes by which it may differ: wrong code is off by all of it, rounding by a
hundredth."""


class Function:
    """A body's code. Compiled, it is compared once with the same operators run one by one."""

    def __init__(self, code: str, compiled: bool) -> None:
        names: dict[str, Any] = {
            "torch": torch,
            "device": torch.device,
            "inf": float("inf"),
            "nan": float("nan"),
        }
        exec(code, names)
        self._plain = functools.partial(names["forward"], None)
        self._run = torch.compile(self._plain) if compiled else self._plain
        self.compiled = compiled
        self._compared = False

    @staticmethod
    @functools.cache
    def of(code: str, compiled: bool, dtype: torch.dtype) -> Function:
        """The one there is for a code and a dtype of its products."""
        return Function(code, compiled)

    def __call__(self, *given: Tensor) -> Sequence[Tensor]:
        """Results, then gradients."""
        return self._run(*given)

    def agrees(
        self, found: Sequence[Tensor], made: list[Tensor], rows: list[Tensor], shared: list[Tensor]
    ) -> bool:
        """Whether some rows of ``found`` are right; if not, a warning, and no such code again."""
        if self._compared or (found[0].is_cuda and torch.cuda.is_current_stream_capturing()):
            return True
        self._compared = True
        count = len(found[0])
        some = torch.arange(0, count, -(-count // COMPARED), device=found[0].device)
        given = [*(t[some] for t in (*made, *rows)), *shared]
        off = self._off([t[some] for t in found], given)
        if not off <= OFF:
            self.compiled, self._run = False, self._plain
            warnings.warn(
                f"hot: a head's loss is run operator by operator: what torch {torch.__version__} "
                f"compiles it to is off by {off:.0%}",
                stacklevel=2,
            )
        return self.compiled

    def _off(self, found: list[Tensor], given: list[Tensor]) -> float:
        """Largest error of ``found``; none where the operators' own rounding is as large."""
        plain = self._plain(*given)
        off = max(map(_distance, found, plain))
        if not off <= OFF:
            with contextlib.suppress(RuntimeError):  # a dtype that the code names meets another
                truth = self._plain(*(t.double() if t.is_floating_point() else t for t in given))
                off = max(map(_distance, found, truth))
                if off < 2 * max(map(_distance, plain, truth)):
                    return 0.0
        return off


def _distance(found: Tensor, want: Tensor) -> float:
    """Norm of the difference over that of ``want``; nothing where both are the same, NaN or not."""
    if not want.is_floating_point():
        return float((found != want).float().mean())
    same = (found == want) | (found.isnan() & want.isnan())
    gap = torch.where(same, 0.0, found.double() - want.double()).norm()
    return float(gap / want.double().nan_to_num(0.0, 0.0, 0.0).norm().clamp_min(1e-30))


def _head_rows(text: str, rows: list[Tensor], shared: list[Tensor]) -> list[Tensor]:
    body = Body.read(text)
    outputs = _outputs(body, rows, shared)
    chunks = _Chunks(body, rows, shared)
    count = rows[0].shape[0]
    with exactly(rows[0].device):
        for first in range(0, count, chunks.size):
            chunks.run(slice(first, min(first + chunks.size, count)), outputs)
    return outputs


class _Chunks:
    """Room for a chunk, and what is the same for all."""

    def __init__(self, body: Body, rows: list[Tensor], shared: list[Tensor]) -> None:
        self.body, self._rows, self._shared = body, rows, shared
        self._weights = {
            weight: parts_of(shared[weight], None if bias < 0 else shared[bias])
            for _, weight, bias in body.products
        }
        for kind, _, weight in body.readers:
            if kind == "rows" and weight not in self._weights:
                self._weights[weight] = parts_of(shared[weight], None)
        x = rows[body.products[0][0]]
        widths = [width_of(self._weights[weight]) for _, weight, _ in body.products]
        columns = sum(widths) + sum(body.gradients)
        total = sum(
            body.gradients[gradient] * rows[operand].shape[1]
            for kind, gradient, operand in body.readers
            if kind == "total"
        )
        self.size = chunk_rows(x.shape[0], columns, x.element_size(), total)
        room = min(self.size, x.shape[0])
        self._buffers = [x.new_empty((room, width)) for width in widths]
        worth = x.device.type == "cpu" and x.shape[0] * sum(widths) >= WORTH
        self._function = Function.of(body.code, worth or has_triton(x), x.dtype)

    def run(self, own: slice, outputs: list[Tensor]) -> None:
        """Write a chunk's rows to ``outputs``, and add its sums."""
        rows = [tensor[own] for tensor in self._rows]
        made = []
        for (x, weight, _), buffer in zip(self.body.products, self._buffers, strict=True):
            parts = self._weights[weight]
            y = wide(buffer[: len(rows[0])], parts)
            multiply_parts(rows[x], parts, y)
            made.append(y.whole[:, : self._shared[weight].shape[0]])
        results = [out[own] for out in outputs[: len(self.body.results)]]
        gradients = self._body(made, rows, results)
        for (kind, gradient, operand), out in zip(
            self.body.readers, outputs[len(self.body.results) :], strict=True
        ):
            g = gradients[gradient]
            if kind == "columns":
                out.add_(g.sum(0, dtype=out.dtype))
            elif kind == "rows":
                torch.mm(g, self._shared[operand], out=out[own])
            else:
                add_product(out, g.t(), rows[operand], own.start == 0)

    def _body(self, made: list[Tensor], rows: list[Tensor], results: list[Tensor]) -> list[Tensor]:
        """The gradients of a chunk; ``results`` are written."""
        if self._function.compiled:  # one kernel's worth of memory: nothing is copied
            for tensor in (*made, *rows) if made[0].is_cpu else ():  # the last chunk is shorter
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
            found = self._function(*made, *rows, *self._shared)
            if self._function.agrees(found, made, rows, self._shared):
                for out, value in zip(results, found, strict=False):
                    out.copy_(value)
                return list(found[len(results) :])
        gradients = [made[0].new_empty((len(rows[0]), width)) for width in self.body.gradients]
        for own in blocks(made[0]):
            given = (*(y[own] for y in made), *(tensor[own] for tensor in rows))
            found = self._function(*given, *self._shared)
            for out, value in zip([*results, *gradients], found, strict=True):
                out[own] = value
        return gradients


def _outputs(body: Body, rows: list[Tensor], shared: list[Tensor]) -> list[Tensor]:
    """Room for what the operator returns."""
    like, count = rows[0], rows[0].shape[0]
    total = torch.promote_types(like.dtype, torch.float32)
    found = [like.new_empty((count, n), dtype=getattr(torch, t)) for n, t in body.results]
    for kind, gradient, operand in body.readers:
        columns = body.gradients[gradient]
        if kind == "rows":
            found.append(like.new_empty((count, shared[operand].shape[1])))
        elif kind == "total":
            found.append(like.new_zeros((columns, rows[operand].shape[1]), dtype=total))
        else:
            found.append(like.new_zeros((columns,), dtype=total))
    return found


_LIBRARY = torch.library.Library("hot", "FRAGMENT")
_LIBRARY.define(
    "head_rows(str body, Tensor[] rows, Tensor[] shared) -> Tensor[]",
    tags=(torch.Tag.needs_exact_strides,),
)
for _device in ("CPU", "CUDA"):
    _LIBRARY.impl("head_rows", _head_rows, _device)


@torch.library.register_fake("hot::head_rows")
def _(text: str, rows: list[Tensor], shared: list[Tensor]) -> list[Tensor]:
    return _outputs(Body.read(text), rows, shared)
