"""Every ``hot::`` operator: its schema, its fake, its definition. Importing this registers them.

Notation (paper, section 3): a layer is y = x W^T with L rows, I inputs, O outputs.
g_x = g_y W contracts O; g_w = g_y^T x contracts L. Quantised operands are written contiguous
along the contracted dimension, which is what integer tensor cores and VNNI read fastest.

Each operator is *defined* by the function of its name in ``reference``, whose signature is its
schema and which computes it on any device that has nothing better; providers (CPU, CUDA) match it
bitwise on integers and scales. All operators are functional, return fresh contiguous tensors, draw
no random numbers and read nothing back to the host.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hot_compile.runtime import reference
from hot_compile.runtime.reference.sizes import (
    CONTRACT_ALIGN,
    HADAMARD_ORDER,
    UNITS_PER_TILE,
    contracted_rows,
    round_up,
    sum_rows,
    unit_rows,
)

SCHEMAS = {
    definition.__name__: torch.library.infer_schema(definition, mutates_args=())
    for definition in reference.OPERATORS
}

_LIBRARY = torch.library.Library("hot", "DEF")


def _register(definition: Callable[..., Any]) -> None:
    name = definition.__name__
    _LIBRARY.define(name + SCHEMAS[name], tags=(torch.Tag.needs_exact_strides,))
    _LIBRARY.impl(name, definition, "CompositeExplicitAutograd")


for _definition in reference.OPERATORS:
    _register(_definition)


def _fake(shapes: Callable[..., Any]) -> None:
    """Register the operator's fake: ``shapes``, called with the arguments that it names."""
    name = shapes.__name__.removeprefix("_")
    signature = inspect.signature(getattr(reference, name))

    def fake(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return shapes(**bound.arguments)

    torch.library.register_fake(f"hot::{name}", fake)


def _int8(like: Tensor, *size: int) -> Tensor:
    return like.new_empty(size, dtype=torch.int8)


def _fp32(like: Tensor, *size: int) -> Tensor:
    return like.new_empty(size, dtype=torch.float32)


def _bf16(like: Tensor, *size: int) -> Tensor:
    return like.new_empty(size, dtype=torch.bfloat16)


def _operand(like: Tensor, rows: int, contracted: int, packed: bool) -> Tensor:
    """An operand of the integer product: int8, or INT4 with two values a byte."""
    if packed:
        return like.new_empty((rows, contracted // 2), dtype=torch.uint8)
    return _int8(like, rows, contracted)


@_fake
def _quantize_rows(x: Tensor, packed: bool, **_: Any) -> tuple[Tensor, ...]:
    rows, cols = x.shape
    return _operand(x, rows, round_up(cols, CONTRACT_ALIGN), packed), _fp32(x, rows)


@_fake
def _quantize_columns(
    x: Tensor, rank: int, tokens: int, packed: bool, **_: Any
) -> tuple[Tensor, ...]:
    rows, cols = x.shape
    q = _operand(x, cols, contracted_rows(rows, rank, tokens), packed)
    return q, _fp32(x, cols)


@_fake
def _quantize_grad(
    grad_output: Tensor, rank: int, tokens: int, packed: bool, **_: Any
) -> tuple[Tensor, ...]:
    ops = torch.ops.hot
    return (
        *ops.quantize_rows(grad_output, 8, True, True, packed),
        *ops.quantize_columns(grad_output, rank, tokens, 8, True, True),
    )


@_fake
def _quantize_one_read(
    grad_output: Tensor, rank: int, tokens: int, summed: bool, **_: Any
) -> tuple[Tensor, ...]:
    g, (rows, cols) = grad_output, grad_output.shape
    contracted = contracted_rows(rows, rank, tokens)
    units = contracted // unit_rows(rank)
    return (
        *(_int8(g, rows, round_up(cols, CONTRACT_ALIGN)), _fp32(g, rows)),
        _int8(g, round_up(cols, HADAMARD_ORDER), contracted),
        *(_fp32(g, contracted), _fp32(g, units), _fp32(g, round_up(cols, HADAMARD_ORDER))),
        _fp32(g, sum_rows(units) if summed else 0, cols),
    )


@_fake
def _compress_int8(x: Tensor, rank: int, tokens: int) -> tuple[Tensor, ...]:
    rows, cols = x.shape
    contracted, tile = contracted_rows(rows, rank, tokens), unit_rows(rank) * UNITS_PER_TILE
    return _int8(x, cols, contracted), _bf16(x, cols, (contracted + tile - 1) // tile)


@_fake
def _rescale_int8(stored: Tensor, **_: Any) -> tuple[Tensor, ...]:
    return _int8(stored, *stored.shape), _fp32(stored, stored.shape[0])


@_fake
def _scaled_int_mm(a: Tensor, b: Tensor, out_dtype: torch.dtype, **_: Any) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


@_fake
def _hadamard_int_mm(
    other: Tensor, outputs: int, outputs_last: bool, out_dtype: torch.dtype, **_: Any
) -> Tensor:
    size = (other.shape[0], outputs) if outputs_last else (outputs, other.shape[0])
    return other.new_empty(size, dtype=out_dtype)


@_fake
def _conv_grad_weight(
    small: Tensor, big: Tensor, kernel: list[int], out_dtype: torch.dtype, **_: Any
) -> Tensor:
    return small.new_empty((small.shape[0], *kernel, big.shape[0]), dtype=out_dtype)


@_fake
def _conv_grad_input(
    weight: Tensor,
    batch: int,
    big_size: list[int],
    kernel: list[int],
    out_dtype: torch.dtype,
    **_: Any,
) -> Tensor:
    channels = weight.shape[0] // math.prod(kernel)
    return weight.new_empty((batch, *big_size, channels), dtype=out_dtype)
