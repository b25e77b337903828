"""What a convolution's backward costs: the kernel's overlap decides.

L counts small positions, O the channels on the small side, I those on the big side times kernel
offsets (``Site``'s terms). X, S: elements of the big and the small tensor. W: how many times longer
than L the contraction of g_w gets by frames (``frames.hpp``); T: likewise with Hadamard tiles.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import sympy
import torch

from hot_compile.config import Rows, Strategy
from hot_compile.passes.base.site import Convolution, Site, elements_of, hint
from hot_compile.passes.cost.linear import (
    VARIABLES,
    ZERO,
    Cost,
    E,
    I,
    L,
    Numbers,
    O,
    Price,
    R,
    Rates,
    seconds,
)
from hot_compile.runtime.reference.conv import tile_shape

ONE = sympy.Integer(1)
NO_CONVOLUTIONS = "convolution: the device's own are faster than ours"

X, S, W, T = sympy.symbols("X S waste tiled", positive=True)
_ALL = (*VARIABLES, X, S, W, T)


@dataclasses.dataclass(frozen=True)
class ConvCost:
    """A ``Cost`` and what only convolutions do."""

    cost: Cost
    unfolded: sympy.Expr = ZERO
    """Elements laid out as the kernel sees them."""
    folded: sympy.Expr = ZERO
    """Elements of products added into g_x."""


def _numbers(site: Site, rank: int) -> Numbers:
    conv = site.conv
    assert conv is not None
    rows, outputs, inputs = map(hint, (site.rows, site.outputs, site.inputs))
    small = rows * (inputs if conv.transposed else outputs)
    big = hint(conv.batch) * math.prod(map(hint, (conv.big_channels, *conv.big_size)))
    plain = (1,) * len(conv.kernel)
    wasted = (_waste(conv, tile) for tile in (plain, tile_shape(len(conv.kernel))))
    sizes = (rows, outputs, inputs, site.dtype.itemsize, rank, big, small)
    return dict(zip(_ALL, (*sizes, *wasted), strict=True))


def _waste(conv: Convolution, tile: tuple[int, ...]) -> float:
    """Length of frames over that of the small tensor; the zeros of padding serve two rows."""
    waste = 1.0
    axes = (conv.small_size, conv.kernel, conv.stride, conv.dilation, conv.padding, tile)
    for size, k, s, d, p, t in zip(*axes, strict=True):
        reach = ((t - 1) * s + (k - 1) * d) // (t * s)
        shared = min(reach, p) if t * s == 1 else 0
        waste *= (-(-hint(size) // t) + reach - shared) * t / max(hint(size), 1)
    return waste


def products_of(args: Any, result: Any) -> int:
    """Multiplications of a call of ``aten.convolution`` or its backward, sizes by hint.

    A weight is applied at each place of the image that is not strided over. PyTorch's own count
    forgets the groups of a backward: of 1536 it counts as many times too much for the weight's
    gradient.

    Args:
        args: the call's, tensors in the place of nodes. result: its own, a tensor if a forward's.
    """
    if isinstance(result, torch.Tensor):
        y, (x, weight), transposed, products = result, args[:2], args[6], 1
    else:
        (y, x, weight), transposed, products = args[:3], args[7], sum(args[10][:2])
    image = x if transposed else y
    places = elements_of(image) // max(1, hint(image.shape[1]))
    return products * places * elements_of(weight)


def saved_elements(conv: Convolution) -> sympy.Expr:
    """Elements of x: what the forward would keep."""
    return S if conv.transposed else X


def _layout(conv: Convolution, gx: bool) -> sympy.Expr:
    """Bytes of laying x, g_y and g_x out channels last where they are not so already."""
    return ZERO if conv.rows_last else 2 * E * (X * (1 + int(gx)) + S)


def _weight_grad(strategy: Strategy, conv: Convolution, im2col: bool) -> ConvCost:
    if im2col:  # the paper's: the unfolded x is written, transformed and kept
        product = Cost(int_ops=2 * L * O * I * R / 16, results=O * I, calls=1)
        return ConvCost(product + Cost(bytes=L * I * (3 * E + R / 16) + L * O * (E + 1), calls=2))
    x = saved_elements(conv)
    other = S + X - x
    half = strategy is Strategy.HLA8
    store = Cost(bytes=x * (E + 1), calls=1)
    columns = Cost(bytes=other * (2 * E + 1), calls=1)
    length = (ONE if conv.is_product else T) * R / 16 if half else W
    product = Cost(int_ops=2 * L * O * I * length, results=O * I, calls=conv.offsets)
    if not conv.is_product:  # the library packs both operands again for every kernel offset
        product += Cost(bytes=L * length * (conv.offsets * O + I))
    tiles = Cost(bytes=2 * E * (S + X * int(conv.is_product))) if half else Cost()
    unfolded = L * I if half and not conv.is_product else ZERO
    return ConvCost(store + columns + product + tiles, unfolded=unfolded)


def _input_grad(conv: Convolution) -> ConvCost:
    """HQ and the integer product; a kernel's products are added up as they come."""
    if conv.transposed and not conv.is_product:
        return ConvCost(Cost(flops=2 * L * O * I, calls=1))
    rows = Cost(bytes=S * (E + 1), calls=1)
    weight = Cost(bytes=O * I * (E + 1) + 2 * E * O * I * int(conv.offsets > 1), calls=1)
    product = Cost(int_ops=2 * L * O * I, calls=1)
    if conv.is_product:
        return ConvCost(rows + weight + product + Cost(results=L * I))
    return ConvCost(rows + weight + product + Cost(bytes=X * E), folded=L * I)


def _total(strategy: Strategy, gx: bool, gw: bool, conv: Convolution, im2col: bool) -> ConvCost:
    parts = [ConvCost(Cost(bytes=_layout(conv, gx)))]
    if gx and strategy is Strategy.GW_ONLY:
        parts.append(ConvCost(Cost(flops=2 * L * O * I, calls=1)))
    elif gx:
        parts.append(_input_grad(conv))
    if gw and strategy is Strategy.GX_ONLY:
        parts.append(ConvCost(Cost(flops=2 * L * O * I, calls=1)))
    elif gw:
        parts.append(_weight_grad(strategy, conv, im2col))
    return ConvCost(
        sum((p.cost for p in parts), Cost()),
        sum((p.unfolded for p in parts), ZERO),
        sum((p.folded for p in parts), ZERO),
    )


def _seconds(total: ConvCost, rates: Rates, dtype: str) -> sympy.Expr:
    own = dataclasses.replace(rates, exact={**rates.exact, **rates.convolution})
    time = seconds(total.cost, own, dtype)
    return time + total.unfolded / rates.unfold + total.folded / rates.fold


def backward_price(site: Site, strategy: Strategy, rates: Rates, rows: Rows, rank: int) -> Price:
    """A convolution's backward by ``strategy``."""
    conv, dtype = site.conv, str(site.dtype).removeprefix("torch.")
    assert conv is not None
    gx, gw = site.needs_grad_input, site.needs_grad_weight
    products = int(gx) + int(gw)
    exact = ConvCost(Cost(flops=2 * L * O * I * products, calls=products))
    im2col = rows is Rows.CONSECUTIVE and strategy is Strategy.HLA8 and not conv.is_product
    ours = _total(strategy, gx, gw, conv, im2col)
    times = _seconds(exact, rates, dtype), _seconds(ours, rates, dtype)
    return Price(*times, _numbers(site, rank), hint(conv.batch), (L, X, S))
