"""A head's weight in parts whose products a GPU makes fast.

Where a product's width is no multiple of 16 it takes two to six times as long, whatever its strides
are. Zeros behind the last outputs mend that, but a copy of the whole weight for their sake is a
twentieth of GPT-2's peak: so all that divides is multiplied where it lies, and only the last few
outputs are copied.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

ALIGN = 16
"""Outputs of a part are made a multiple of this on a GPU."""


@dataclasses.dataclass(frozen=True)
class Part:
    """Some of a weight's outputs [P, I] with their bias [P], and the columns of y they make."""

    columns: slice
    weight: Tensor
    transposed: Tensor
    """[I, P]: the same memory."""
    bias: Tensor | None


@dataclasses.dataclass(frozen=True)
class Wide:
    """Rows of y, or of its gradient, as the parts make and read them.

    Views are made once for all chunks: one costs the host a third of what a product does.
    """

    whole: Tensor
    """[R, O']."""
    columns: tuple[Tensor, ...]
    """Of each part, [R, P]."""
    transposed: tuple[Tensor, ...]
    """The same, [P, R]."""


def wide(y: Tensor, parts: tuple[Part, ...]) -> Wide:
    """``y`` [R, O'] with the columns of each part."""
    columns = (y,) if len(parts) == 1 else tuple(y[:, part.columns] for part in parts)
    return Wide(y, columns, tuple(own.t() for own in columns))


def parts_of(weight: Tensor, bias: Tensor | None) -> tuple[Part, ...]:
    """``weight`` [O, I] and ``bias`` [O] in parts.

    The last one may have outputs of zeros at its end. A weight with a bias is one part: the library
    adds that on its way only to a contiguous result, any other it fills with the bias first and
    reads again.
    """
    missing = missing_outputs(weight)
    if not missing:
        return (_part(slice(0, weight.shape[0]), weight, bias),)
    outputs = weight.shape[0]
    first = 0 if bias is not None else max(0, outputs + missing - ALIGN)
    own = None if bias is None else bias[first:]
    last = _part(slice(first, outputs + missing), *_padded(weight[first:], own, missing))
    if not first:
        return (last,)
    return _part(slice(0, first), weight[:first], None if bias is None else bias[:first]), last


def _part(columns: slice, weight: Tensor, bias: Tensor | None) -> Part:
    return Part(columns, weight, weight.t(), bias)


def width_of(parts: tuple[Part, ...]) -> int:
    """Columns of y, those of zeros among them."""
    return int(parts[-1].columns.stop)


def missing_outputs(weight: Tensor) -> int:
    """Outputs that are missing to what a GPU's products like."""
    return -weight.shape[0] % ALIGN if weight.is_cuda else 0


def multiply_parts(x: Tensor, parts: tuple[Part, ...], out: Wide) -> None:
    """y = x W^T + b into ``out``."""
    for part, y in zip(parts, out.columns, strict=True):
        if part.bias is None:
            torch.mm(x, part.transposed, out=y)
        else:
            torch.addmm(part.bias, x, part.transposed, out=y)


def multiply_back(g: Wide, parts: tuple[Part, ...], out: Tensor) -> None:
    """g_x = g W [R, I] into ``out``; the few last outputs first, so that the sum is rounded once
    more than one product would only where they have a share in it."""
    torch.mm(g.columns[-1], parts[-1].weight, out=out)
    for part, own in zip(parts[:-1], g.columns, strict=False):
        torch.addmm(out, own, part.weight, out=out)


def add_product(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """total (fp32) += a b, the sum never rounded to the operands' dtype where a library can.

    ``first``: ``total`` holds nothing yet, and is not read: that is a tenth of the product's time.
    """
    if a.dtype == torch.float32:
        torch.mm(a, b, out=total) if first else total.addmm_(a, b)
    elif a.is_cuda and first:
        torch.ops.aten.mm.dtype_out(a, b, torch.float32, out=total)
    elif a.is_cuda:
        torch.ops.aten.addmm.dtype_out(total, a, b, torch.float32, out=total)
    else:
        total.copy_(a @ b) if first else total.add_(a @ b)


def _padded(weight: Tensor, bias: Tensor | None, missing: int) -> tuple[Tensor, Tensor | None]:
    """The same with outputs of zeros at the end."""
    pad = torch.nn.functional.pad
    return pad(weight, (0, 0, 0, missing)), None if bias is None else pad(bias, (0, missing))
