"""What every ``hot::`` operator computes, readably, in PyTorch. Providers are tested against this.

Integers and scales here are the definition, bit for bit: each float operation is a single IEEE fp32
operation in the order written (no fused multiply-add). The one exception are float epilogues of
products (``scaled_int_mm``, ``conv_*``), which providers may round differently within a stated
budget.
"""

from hot_compile.runtime.reference.arithmetic import pack_int4, unpack_int4
from hot_compile.runtime.reference.conv import conv_grad_input, conv_grad_weight
from hot_compile.runtime.reference.gemm import hadamard_int_mm, scaled_int_mm
from hot_compile.runtime.reference.one_read import quantize_one_read
from hot_compile.runtime.reference.storage import (
    compress_int8,
    rescale_int8,
)
from hot_compile.runtime.reference.two_reads import quantize_columns, quantize_grad, quantize_rows

OPERATORS = (
    *(quantize_rows, quantize_columns, quantize_grad, quantize_one_read),
    *(compress_int8, rescale_int8),
    *(scaled_int_mm, hadamard_int_mm, conv_grad_weight, conv_grad_input),
)
"""The definitions of operators; an operator has its definition's name and arguments."""

__all__ = [
    "OPERATORS",
    "compress_int8",
    "conv_grad_input",
    "conv_grad_weight",
    "hadamard_int_mm",
    "pack_int4",
    "quantize_columns",
    "quantize_grad",
    "quantize_one_read",
    "quantize_rows",
    "rescale_int8",
    "scaled_int_mm",
    "unpack_int4",
]
