"""Definition of the convolution operators.

Notation: a convolution relates a *small* tensor, which has one value for every kernel position (y;
of a transposed convolution: x), to a *big* one, which the kernel slides over (x; transposed: y).
Position p of the small one and offset k of the kernel meet at p * stride + k * dilation - padding
of the big one, in each of 1 to 3 spatial dimensions; outside it there are zeros. kk is the number
of kernel offsets, L that of small positions, batch included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hot_compile.runtime.reference.arithmetic import butterflies, low_pass
from hot_compile.runtime.reference.sizes import HADAMARD_ORDER

Sizes = Sequence[int]


def tile_shape(dimensions: int) -> tuple[int, ...]:
    """Small positions of one Hadamard block of ``hla8``: 4 x 4 of the last two dimensions."""
    return {1: (16,), 2: (4, 4), 3: (1, 4, 4)}[dimensions]


def tile_counts(small_size: Sizes) -> tuple[int, ...]:
    """Tiles in each dimension; the last ones may reach over the edge."""
    shape = tile_shape(len(small_size))
    return tuple((size + tile - 1) // tile for size, tile in zip(small_size, shape, strict=True))


def _sources(
    positions: Sequence[Tensor],
    batch: int,
    big_size: Sizes,
    kernel: Sizes,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
) -> Tensor:
    """Where each kernel offset finds each small position: [kk, batch, *positions], -1 outside.

    positions: for each dimension the small coordinates wanted, any shapes that broadcast. The
    index is flat into [batch, *big_size].
    """
    offsets = torch.cartesian_prod(*(torch.arange(k, device="cpu") for k in kernel)).reshape(
        -1, len(kernel)
    )
    shape = torch.broadcast_shapes(*(p.shape for p in positions))
    index = torch.arange(batch, device="cpu").reshape(1, -1, *(1 for _ in shape))
    inside = torch.ones((), dtype=torch.bool, device="cpu")
    for d, position in enumerate(positions):
        offset = offsets[:, d].reshape(-1, 1, *(1 for _ in shape)) * dilation[d]
        at = position * stride[d] + offset - padding[d]
        inside = inside & (at >= 0) & (at < big_size[d])
        index = index * big_size[d] + at
    return torch.where(inside, index, -1).expand(len(offsets), batch, *shape)


def _small_positions(small_size: Sizes, tiled: bool) -> list[Tensor]:
    """Small coordinates, a tensor a dimension: plain, or as [*tiles, *tile] where ``tiled``."""
    dims = len(small_size)
    if not tiled:
        grid = torch.meshgrid(*(torch.arange(n, device="cpu") for n in small_size), indexing="ij")
        return [axis.flatten() for axis in grid]
    shape, counts = tile_shape(dims), tile_counts(small_size)
    grid = torch.meshgrid(
        *(torch.arange(n, device="cpu") for n in (*counts, *shape)), indexing="ij"
    )
    return [(grid[d] * shape[d] + grid[dims + d]).flatten() for d in range(dims)]


def unfold(big: Tensor, sources: Tensor, rank: int) -> Tensor:
    """[C, K] integers -> [C, kk, K'] as the kernel sees them, 0 outside.

    rank 0: K' = L. Otherwise ``sources`` is tiled and each tile's 16 integers become ``rank`` sums
    of their transform, divided by 16 and rounded half up, so that they fit int8.
    """
    flat = sources.flatten(1)
    seen = torch.where(flat < 0, 0, big[:, flat.clamp(min=0)].long())
    if rank == 0:
        return seen
    sums = butterflies(seen.reshape(*seen.shape[:2], -1, HADAMARD_ORDER))
    kept = low_pass(sums, rank)
    return ((kept + 8) >> 4).flatten(2)


def conv_grad_weight(
    small: Tensor,
    big: Tensor,
    small_scale: Tensor,
    big_scale: Tensor,
    batch: int,
    small_size: list[int],
    big_size: list[int],
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    rank: int,
    out_dtype: torch.dtype,
) -> Tensor:
    """g_w of a convolution as an integer product over small positions: [S, *kernel, C].

    out[s, k, c] = sum over p of small[s, p] * big[c, p * stride + k * dilation - padding].

    small: int8 [S, K], value small * small_scale[:, None]; K = L padded, or, with rank > 0, what
    ``quantize_columns(tiled(...), rank, 1, ...)`` writes of rows in order of tiles, as
    ``passes/layers/positions.py`` puts them. big: int8 [C, K'], likewise, of the
    big tensor itself; it is unfolded (and, with rank > 0, transformed) here.
    """
    device = small.device
    sources = _sources(
        _small_positions(small_size, rank > 0), batch, big_size, kernel, stride, padding, dilation
    ).to(device)
    seen = unfold(big, sources, rank)  # [C, kk, K]
    length = seen.shape[2]
    left = small[:, :length].double()
    product = torch.einsum("sp,ckp->skc", left, seen.double()).float()
    wide = big_scale * 4.0 if rank else big_scale
    out = product * small_scale[:, None, None] * wide
    return out.reshape(small.shape[0], *kernel, big.shape[0]).to(out_dtype)


def conv_grad_input(
    rows: Tensor,
    weight: Tensor,
    row_scale: Tensor,
    weight_scale: Tensor,
    batch: int,
    small_size: list[int],
    big_size: list[int],
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    out_dtype: torch.dtype,
) -> Tensor:
    """g_x of a convolution: integer product of g_y's rows with W, added up where the kernel lay.

    rows: int8 [L, K] with scale [L] (``quantize_rows`` of g_y's positions), weight: int8
    [kk * C, K] with scale [kk * C], offset-major. Returns [batch, *big_size, C]. Each product is
    dequantised in fp32 and summed in fp32; the order of that sum is the provider's.
    """
    length, kk = batch * math.prod(small_size), math.prod(kernel)
    sources = _sources(
        _small_positions(small_size, False), batch, big_size, kernel, stride, padding, dilation
    ).to(rows.device)
    product = (rows[:length].double() @ weight.double().t()).float()
    product = product * row_scale.unsqueeze(1) * weight_scale
    parts = product.reshape(length, kk, len(weight) // kk).permute(1, 0, 2)  # [kk, L, C]
    out = product.new_zeros(batch * math.prod(big_size) + 1, parts.shape[2])
    for at, part in zip(sources.flatten(1), parts, strict=True):
        out.index_add_(0, torch.where(at < 0, len(out) - 1, at), part)
    return out[:-1].reshape(batch, *big_size, out.shape[1]).to(out_dtype)
