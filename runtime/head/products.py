"""Operators of a head that go through it in chunks: no logits, no gradient of theirs, as a whole.

Logits are z = outer * tanh(inner * y), or outer * y without a cap, of y = x W^T + b. Every loss
made of log-softmax reads four numbers of a row of them, its *statistics*: the largest, log-sum-exp
(lse), z at ``target``, the sum of z times ``column``. Its gradient is

    g_z = A exp(z - lse) + B onehot(target) + C column (+ extra_scale * extra)

with one number A, B, C a row, the *coefficients*, which hold the chain's constant factors; times
the cap's slope, 1 - tanh(inner * y)^2. Each operator is functional, returns fresh contiguous
tensors and reads nothing back to the host. Products are the library's. Importing this registers:

* ``hot::head_statistics``: of every row of the logits, and the logits if the caller gets them;
* ``hot::head_gradients``: g_x, g_w, g_b, with the logits multiplied out again;
* ``hot::head_both``: both in one go, where the coefficients are known before the loss.

Outputs of the weight from ``width`` on, if that is given, are zeros that are no logits: they make
products fast (``parts.py``). Chunks are rows, whose softmax needs all columns. Their gradients'
products are exact, or with ``int8`` those of ``integers.py``.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import torch
from torch import Tensor

from hot_compile.runtime.head import loop
from hot_compile.runtime.head.integers import ALIGN, IntegerProducts
from hot_compile.runtime.head.parts import (
    Part,
    Wide,
    add_product,
    multiply_back,
    multiply_parts,
    parts_of,
    wide,
    width_of,
)
from hot_compile.runtime.head.rows import Chunk, Form, Gradient, calls_of, chunk_pass, repeated

STATISTICS = 4
CHUNK_BYTES = 2**29
"""Most bytes of a chunk of logits, where g_w in their dtype takes no more."""
_LEAST_BYTES = 2**23
_LINES = 16
"""Rows after which tensors are as well aligned again as they were."""
_FEW, _FEW_BYTES = 5, 3 * 2**26
"""More chunks than that cost the host more than so many bytes each are worth."""

_HEAD = "Tensor x, Tensor weight, Tensor? bias, Tensor? target, Tensor? column"
_FORM = "float inner, bool cap, float outer"
SCHEMAS = {
    "head_statistics": (
        f"({_HEAD}, {_FORM}, ScalarType? logits_dtype, int width=0)"
        " -> (Tensor statistics, Tensor logits)"
    ),
    "head_gradients": (
        f"({_HEAD}, Tensor coefficients, Tensor? extra, float extra_scale, {_FORM},"
        " bool[3] wanted, bool int8=False, int width=0)"
        " -> (Tensor grad_x, Tensor grad_weight, Tensor grad_bias)"
    ),
    "head_both": (
        f"({_HEAD}, Tensor coefficients, {_FORM}, ScalarType? logits_dtype, bool[3] wanted,"
        " bool int8=False, int width=0)"
        " -> (Tensor statistics, Tensor logits, Tensor grad_x, Tensor grad_weight,"
        " Tensor grad_bias)"
    ),
}

_LIBRARY = torch.library.Library("hot", "FRAGMENT")
for _name, _schema in SCHEMAS.items():
    _LIBRARY.define(_name + _schema, tags=(torch.Tag.needs_exact_strides,))


def chunk_rows(rows: int, columns: int, itemsize: int, grad_weight: int) -> int:
    """Rows of a chunk, so that chunks are even.

    Each chunk adds to g_w, in fp32, which is read and written anew: so a chunk may take as much
    memory as g_w does, which is there anyway; and if that is much, as g_w in ``itemsize`` bytes,
    which is made of it when all chunks are through. Without g_w small chunks cost nothing.

    Args:
        rows: of all chunks.
        columns: of the logits, and of their gradient where it does not take their place.
        itemsize: bytes of each of these values.
        grad_weight: elements of g_w; 0: it is not asked for.
    """
    row = columns * itemsize
    few = min(_FEW_BYTES, -(-rows * row // _FEW))
    most = max(grad_weight * 4, few) if grad_weight else 8 * _LEAST_BYTES
    later = grad_weight * itemsize
    most = min(max(most, _LEAST_BYTES), max(CHUNK_BYTES, later))
    count = max(1, -(-rows * row // most))
    even = max(1, -(-rows // count))
    if even < _LINES:
        return even
    whole = 128 if even >= 512 else _LINES  # tiles of a product
    return min(rows, -(-even // whole) * whole)


def exactly(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A step under autocast must not cast operands that the graph has cast already."""
    if not torch.is_autocast_enabled(device.type):
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


def _head_statistics(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor | None,
    column: Tensor | None,
    inner: float,
    cap: bool,
    outer: float,
    logits_dtype: torch.dtype | None,
    width: int = 0,
) -> tuple[Tensor, Tensor]:
    none, form = [False, False, False], (inner, cap, outer)
    made = both(x, weight, bias, target, column, None, *form, logits_dtype, none, False, width)
    return made[0], made[1]


def both(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor | None,
    column: Tensor | None,
    coefficients: Tensor | None,
    inner: float,
    cap: bool,
    outer: float,
    logits_dtype: torch.dtype | None,
    wanted: list[bool],
    int8: bool = False,
    width: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``hot::head_both``. Without coefficients: no gradients."""
    outputs, parts = width or weight.shape[0], parts_of(weight, bias)
    form, target = Form(inner, cap, outer), _dense(target)
    statistics = _statistics(x)
    logits = _logits(x, outputs, logits_dtype)
    as_made = not cap and outer == 1 and outputs == width_of(parts)
    whole = as_made and logits_dtype == x.dtype  # they are there anyway: one product makes them
    made = _Gradients(x, parts, wanted, IntegerProducts(x, weight, wanted) if int8 else None)
    room = logits if whole and coefficients is None else made.new_room()
    chunk = Chunk(logits if whole else room, outputs, target, column, form)
    gradient = None if coefficients is None else Gradient(room, coefficients.contiguous())
    left = None if whole or logits_dtype is None else logits
    made.run(chunk, statistics, left, gradient, whole, target)
    return statistics, logits, *_without_padding(made.sums, outputs)


def gradients(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor | None,
    column: Tensor | None,
    coefficients: Tensor,
    extra: Tensor | None,
    extra_scale: float,
    inner: float,
    cap: bool,
    outer: float,
    wanted: list[bool],
    int8: bool = False,
    width: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """``hot::head_gradients``, g_w in fp32.

    Its softmax is that of the logits it makes itself: a product of another shape rounds some of
    them the other way, and in bf16 that is 6 % of a probability that should be 1.
    """
    outputs, parts = width or weight.shape[0], parts_of(weight, bias)
    made = _Gradients(x, parts, wanted, IntegerProducts(x, weight, wanted) if int8 else None)
    room = made.new_room()
    chunk = Chunk(room, outputs, _dense(target), column, Form(inner, cap, outer))
    gradient = Gradient(room, coefficients.contiguous(), extra, extra_scale)
    made.run(chunk, _statistics(x), None, gradient)
    return _without_padding(made.sums, outputs)


class _Gradients:
    """g_x, g_w and g_b, as chunks of rows make them."""

    def __init__(
        self,
        x: Tensor,
        parts: tuple[Part, ...],
        wanted: list[bool],
        integers: IntegerProducts | None,
    ) -> None:
        self._x, self._parts, self._integers = x, parts, integers
        (rows, inputs), width = x.shape, width_of(parts)
        size = chunk_rows(rows, width, x.element_size(), wanted[1] * width * inputs)
        if integers:
            size = -(-size // ALIGN) * ALIGN
        self._room = min(size, rows), width
        self._wide: dict[int, Wide] = {}
        self.sums = gradients_of(x, width, wanted)
        if not rows:
            self.sums[1].zero_()
        self._grad_weight = [self.sums[1][part.columns] for part in parts] if wanted[1] else []

    def new_room(self) -> Tensor:
        """For y of a chunk, and then its gradient; all chunks use it."""
        return self._x.new_empty(self._room)

    def run(
        self,
        chunk: Chunk,
        statistics: Tensor,
        logits: Tensor | None,
        gradient: Gradient | None,
        kept: bool = False,
        checked: Tensor | None = None,
    ) -> None:
        """Go through all chunks.

        Args:
            chunk: all rows'; y is a chunk's room, or all rows' if it is kept.
            statistics: [4, R].
            logits: what is written of them beside y.
            gradient: all rows', but for its place, a chunk's room; without one, y that is kept is
                one chunk.
            kept: y is.
            checked: labels to be found in range.
        """
        rows, room = len(self._x), chunk.y if gradient is None else gradient.out
        if not rows:
            return
        if not self._integers and loop.serves(self._x):
            calls = calls_of(chunk, statistics, logits, gradient, len(room))
            own = self._x, self._parts, chunk.width, room, chunk.y if kept else None, self.sums
            if loop.run(*own, checked, calls):
                return
        _check(checked, self._x, chunk.width)
        chunk = dataclasses.replace(chunk, launches=repeated(self._x))
        with exactly(self._x.device):
            if kept:
                multiply_parts(self._x, self._parts, wide(chunk.y, self._parts))
            for first in range(0, rows, len(room)):
                part = slice(first, min(first + len(room), rows))
                g = self._wide_room(room, part)
                if not kept:
                    multiply_parts(self._x[part], self._parts, g)
                mine = chunk.of_rows(part, chunk.y[part] if kept else g.whole)
                made = gradient and gradient.of_rows(part, g.whole)
                left = None if logits is None else logits[part]
                chunk_pass(mine, statistics[:, part], left, made)
                if made is not None:
                    self._add(g, part, mine.target)

    def _wide_room(self, room: Tensor, own: slice) -> Wide:
        """Of a chunk's rows."""
        rows = own.stop - own.start
        if rows not in self._wide:
            self._wide[rows] = wide(room[:rows], self._parts)
        return self._wide[rows]

    def _add(self, g: Wide, own: slice, target: Tensor | None) -> None:
        """What rows of x whose gradient of y is ``g`` give; ``g`` may change."""
        x, grad_x = self._x[own], self.sums[0][own] if self.sums[0].numel() else None
        if self.sums[2].numel():
            self.sums[2].add_(g.whole.sum(0, dtype=torch.float32))
        if self._integers:
            self._integers.add(g.whole, x, target, grad_x, self.sums[1])
            return
        if grad_x is not None:
            multiply_back(g, self._parts, grad_x)
        for total, part in zip(self._grad_weight, g.transposed, strict=False):
            add_product(total, part, x, own.start == 0)  # nothing is there yet to add to


def _logits(x: Tensor, outputs: int, dtype: torch.dtype | None) -> Tensor:
    if dtype is None:
        return x.new_empty(0)
    return x.new_empty((x.shape[0], outputs), dtype=dtype)


def gradients_of(x: Tensor, outputs: int, wanted: list[bool]) -> tuple[Tensor, Tensor, Tensor]:
    """Room for g_x, and in fp32 for g_w and g_b."""
    return (
        x.new_empty(tuple(x.shape) if wanted[0] else 0),
        x.new_empty((outputs, x.shape[1]) if wanted[1] else 0, dtype=torch.float32),
        x.new_zeros((outputs,) if wanted[2] else 0, dtype=torch.float32),
    )


def _without_padding(
    gradients: tuple[Tensor, Tensor, Tensor], outputs: int
) -> tuple[Tensor, Tensor, Tensor]:
    grad_x, grad_weight, grad_bias = gradients
    if outputs == len(grad_weight):
        return gradients
    return grad_x, grad_weight[:outputs], grad_bias[:outputs]


def _check(target: Tensor | None, x: Tensor, outputs: int) -> None:
    """On a GPU a label out of range trips gather's assertion, as in the exact graph; on a CPU
    whoever reads it raises."""
    if target is not None and target.is_cuda:
        x.select(1, 0)[:1].expand(outputs).gather(0, target)


def _dense(target: Tensor | None) -> Tensor | None:
    return None if target is None else target.contiguous()


for _name, _own in (
    ("head_statistics", _head_statistics),
    ("head_gradients", gradients),
    ("head_both", both),
):
    for _device in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _own, _device)


def _statistics(x: Tensor) -> Tensor:
    return x.new_empty((STATISTICS, x.shape[0]), dtype=torch.float32)


@torch.library.register_fake("hot::head_statistics")
def _(x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _statistics(x), _logits(x, _width(weight, rest[7:]), rest[6])


@torch.library.register_fake("hot::head_gradients")
def _(x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return gradients_of(x, _width(weight, rest[11:]), rest[9])


@torch.library.register_fake("hot::head_both")
def _(x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    width = _width(weight, rest[10:])
    return _statistics(x), _logits(x, width, rest[7]), *gradients_of(x, width, rest[8])


def _width(weight: Tensor, told: tuple[int, ...]) -> int:
    """Logits of a row; ``told``: the argument ``width`` if it is given."""
    return (told[0] if told else 0) or weight.shape[0]
