"""How a tensor is stored between forward and backward: packed by plain operators Inductor fuses.

Groups lie along memory, so that a group's values, packed bytes and parameters are read and written
together; in a channels-last tensor along positions, so that a group holds values of one channel:
what a convolution leaves differs in scale from channel to channel, and a batch norm undoes just
that. There INT8 has one group a channel, which costs next to nothing: its absmax is a reduction
like the batch norm's statistics, and quantising is pointwise, so that Inductor makes both part of
kernels that read the tensor anyway. INT4, in smaller groups, is a pass of its own there. A byte of
INT4 takes elements j and j + group/2 of its group, not neighbours: then both the reduction over a
group and the packing walk the same half group, and Inductor makes them one kernel that reads the
tensor once.
"""

from __future__ import annotations

import dataclasses
from enum import Enum

import torch
from torch import Tensor, fx

from hot_compile.passes.emit import Emitter, prims
from hot_compile.passes.graph import CHANNEL_DIM, IMAGE_DIMS, aten
from hot_compile.passes.site import bytes_of, hint

GROUP = 128
"""Elements that share a scale, at most."""
_SMALLEST_GROUP = 32
_TINY = 2.0**-120
_MASK_BITS = 8
_UPPER_HALF = -0x10000
"""Of a 32-bit word: the bits of a bf16 number in those of the same number in fp32."""
_NAN_WORD = 0x7FC00000


class Scheme(str, Enum):
    """What a crossing tensor is stored as."""

    EXACT = "exact"
    """As it is."""
    INT8 = "int8"
    """Symmetric INT8, a bf16 scale per group; in channels-last images per channel."""
    ROWS = "int8_rows"
    """Symmetric INT8, a bf16 scale per row, in channels-last images per position. Its absmax is
    one more reduction of a kernel that goes over the row anyway, or all its own."""
    INT8_MASK = "int8_mask"
    """As INT8, on a grid of seven bits: the lowest of each byte holds an element of a mask, which
    so costs neither memory nor a pass of its own."""
    ROWS_MASK = "int8_rows_mask"
    """As ROWS, likewise."""
    INT4 = "int4"
    """Min-max INT4, two to a byte; a group's bf16 scale and minimum in one 32-bit word, so that
    whoever unpacks makes one load of both."""
    BITS = "bits"
    """A mask, eight elements to a byte. Lossless."""

    def __str__(self) -> str:
        return self.value

    @property
    def plain(self) -> Scheme:
        """The scheme whose bytes hold no mask."""
        return {Scheme.INT8_MASK: Scheme.INT8, Scheme.ROWS_MASK: Scheme.ROWS}.get(self, self)

    @property
    def masked(self) -> Scheme:
        """The scheme whose bytes hold a mask, too; itself where there is none."""
        return {Scheme.INT8: Scheme.INT8_MASK, Scheme.ROWS: Scheme.ROWS_MASK}.get(self, self)


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a tensor's memory is cut into groups."""

    order: tuple[int, ...]
    """Its dimensions by stride, outermost first."""
    outer: int
    """How many of them, from the outside, stay dimensions of the packed tensor."""
    groups: int
    """The rest: this many groups ..."""
    group: int
    """... of this many elements ..."""
    lanes: int = 1
    """... side by side: so many elements lie between neighbours of a group, each of another."""
    whole: bool = False
    """A group goes on over the outer dimensions: there is one a lane."""

    @property
    def inverse(self) -> tuple[int, ...]:
        """Undoes ``order``."""
        return tuple(self.order.index(dim) for dim in range(len(self.order)))


def layout_of(value: Tensor, scheme: Scheme) -> Layout | str:
    """How ``scheme`` would cut ``value`` (fake), or why it cannot."""
    sizes, strides, scheme = value.shape, value.stride(), scheme.plain
    if any(hint(strides[d]) == 0 and hint(sizes[d]) > 1 for d in range(value.dim())):
        return "expanded: its memory is smaller than it looks"
    order = sorted(range(value.dim()), key=lambda d: (hint(sizes[d]) > 1, -hint(strides[d])))
    run, outer = 1, len(order)
    for dim in reversed(order):
        if not isinstance(sizes[dim], int) or (sizes[dim] > 1 and strides[dim] != run):
            break
        run, outer = run * sizes[dim], outer - 1
    innermost = sizes[order[-1]] if outer < len(order) else run
    image = _channels_last(value, order, run)
    if scheme in (Scheme.INT8, Scheme.INT4) and image:
        positions = run // innermost
        if scheme is Scheme.INT8:
            return Layout(tuple(order), outer, 1, positions, innermost, whole=True)
        group = _group((positions,), scheme)
        if group is not None:
            return Layout(tuple(order), outer, positions // group, group, innermost)
    across = scheme is Scheme.ROWS and order[-1] != value.dim() - 1 and not image
    group = None if across else _group((innermost, run), scheme)
    if group is None:
        return f"its innermost {run} contiguous elements do not divide into groups"
    return Layout(tuple(order), outer, run // group, group)


def by_channel(value: Tensor) -> bool:
    """Whether INT8 of ``value`` (fake) has one scale per channel."""
    layout = layout_of(value, Scheme.INT8)
    return isinstance(layout, Layout) and layout.whole


def _channels_last(value: Tensor, order: list[int], run: int) -> bool:
    """Images and the like whose channels lie innermost, more than one of them."""
    channels = value.shape[CHANNEL_DIM] if value.dim() >= IMAGE_DIMS else 1
    return order[-1] == 1 and isinstance(channels, int) and channels > 1 and run % channels == 0


def _group(lengths: tuple[int, ...], scheme: Scheme) -> int | None:
    """Elements of a group: of the first of these lengths that divides well."""
    if scheme is Scheme.BITS:
        run = lengths[-1]
        return run if run > 0 and run % _MASK_BITS == 0 else None
    if scheme is Scheme.ROWS:
        return lengths[0] if lengths[0] >= _SMALLEST_GROUP else None
    for length in lengths:
        for group in range(min(GROUP, length), _SMALLEST_GROUP - 1, -1):
            if length % group == 0 and group % 2 == 0:
                return group
    return None


def packed_bytes(value: Tensor, scheme: Scheme) -> int:
    """Bytes of ``value`` (fake) stored by ``scheme``, its parameters included; sizes by hint."""
    elements = bytes_of(value) // value.dtype.itemsize
    if scheme is Scheme.EXACT:
        return bytes_of(value)
    layout = layout_of(value, scheme)
    assert isinstance(layout, Layout), layout
    if scheme is Scheme.BITS:
        return elements // _MASK_BITS
    groups = layout.lanes if layout.whole else elements // layout.group
    parameters = groups * torch.bfloat16.itemsize
    if scheme is Scheme.INT4:
        return elements // 2 + 2 * parameters
    return elements + parameters


def pack(
    emit: Emitter, x: fx.Node, scheme: Scheme, mask: fx.Node | None = None
) -> tuple[fx.Node, ...]:
    """Nodes that hold ``x`` as ``scheme``: the packed tensor, then its parameters.

    ``mask``, bool and laid out as ``x`` is, goes into the bytes of a scheme that holds one.
    """
    if scheme is Scheme.EXACT:
        return (x,)
    layout = layout_of(x.meta["val"], scheme)
    assert isinstance(layout, Layout), layout
    memory = emit.permute(x, layout.order)
    outer = [emit.size(memory, dim) for dim in range(layout.outer)]
    if scheme is Scheme.BITS:
        lanes = emit(aten.view.default, memory, [*outer, _MASK_BITS, layout.group // _MASK_BITS])
        return (_pack_bits(emit, lanes),)
    cut = [*outer, layout.groups, layout.group, layout.lanes]
    grouped = emit(aten.view.default, memory, cut)
    if scheme is Scheme.INT4:
        return _pack_int4(emit, grouped)
    dims = [*range(layout.outer), -3, -2] if layout.whole else [-2]
    q, scale = _quantize(emit, grouped, dims, steps=127 if mask is None else 63)
    if mask is not None:
        lowest = emit(aten.view.default, emit.permute(mask, layout.order), cut)
        lowest = emit.cast(lowest, torch.float32)
        q = emit(aten.add.Tensor, emit(aten.mul.Tensor, q, 2.0), lowest)
    return emit.cast(q, torch.int8), scale


def unpack(emit: Emitter, parts: tuple[fx.Node, ...], like: Tensor, scheme: Scheme) -> fx.Node:
    """Node that has ``like``'s shape, dtype and order of strides, from what ``pack`` made."""
    if scheme is Scheme.EXACT:
        return parts[0]
    flat = emit.cast(_restore(emit, parts, scheme), like.dtype)
    return _laid_out(emit, flat, parts[0], like, scheme)


def unpack_mask(emit: Emitter, packed: fx.Node, like: Tensor, scheme: Scheme) -> fx.Node:
    """The mask in the bytes that ``pack`` made by ``scheme`` of a tensor like ``like``."""
    mask = emit.cast(emit(aten.bitwise_and.Scalar, packed, 1), torch.bool)
    return _laid_out(emit, mask, packed, like, scheme)


def _laid_out(
    emit: Emitter, flat: fx.Node, packed: fx.Node, like: Tensor, scheme: Scheme
) -> fx.Node:
    """Groups side by side -> ``like``'s shape and order of strides."""
    layout = layout_of(like, scheme)
    assert isinstance(layout, Layout), layout
    outer = [emit.size(packed, dim) for dim in range(layout.outer)]
    inner = [like.shape[dim] for dim in layout.order[layout.outer :]]
    return emit.permute(emit(aten.view.default, flat, [*outer, *inner]), layout.inverse)


def _restore(emit: Emitter, parts: tuple[fx.Node, ...], scheme: Scheme) -> fx.Node:
    if scheme is Scheme.BITS:
        return _unpack_bits(emit, *parts)
    if scheme is Scheme.INT4:
        return _unpack_int4(emit, *parts)
    q, scale = parts
    if scheme is not scheme.plain:
        wide = emit.cast(q, torch.int32)
        q = emit(aten.bitwise_right_shift.Tensor_Scalar, wide, 1)  # keeps the sign
    return emit(aten.mul.Tensor, emit.cast(q, torch.float32), emit.cast(scale, torch.float32))


def _quantize(emit: Emitter, x: fx.Node, dims: list[int], steps: int) -> tuple[fx.Node, fx.Node]:
    """(whole numbers of ``-steps`` to ``steps`` in fp32, bf16 scale), a scale over ``dims``."""
    values = emit.cast(x, torch.float32)
    absmax = emit(aten.amax.default, emit(aten.abs.default, values), dims, True)
    scale = _as_float(emit, _scale_word(emit, absmax, steps))
    reciprocal = _reciprocal(emit, scale)
    if len(dims) > 1:  # a scale a channel, found in another kernel than this
        reciprocal = emit.from_memory(reciprocal)
    q = emit(aten.round.default, emit(aten.mul.Tensor, values, reciprocal))
    return q, emit.cast(scale, torch.bfloat16)


def _pack_int4(emit: Emitter, x: fx.Node) -> tuple[fx.Node, ...]:
    group = x.meta["val"].shape[-2]
    first = emit.cast(emit(aten.slice.Tensor, x, -2, 0, group // 2), torch.float32)
    second = emit.cast(emit(aten.slice.Tensor, x, -2, group // 2, group), torch.float32)
    low = emit(aten.amin.default, emit(aten.minimum.default, first, second), [-2], True)
    high = emit(aten.amax.default, emit(aten.maximum.default, first, second), [-2], True)
    minimum_word = _minimum_word(emit, low)
    minimum = _as_float(emit, minimum_word)
    scale_word = _scale_word(emit, emit(aten.sub.Tensor, high, minimum), steps=15)
    reciprocal = _reciprocal(emit, _as_float(emit, scale_word))

    def nibble(values: fx.Node) -> fx.Node:
        centred = emit(aten.sub.Tensor, values, minimum)
        return emit(aten.round.default, emit(aten.mul.Tensor, centred, reciprocal))

    packed = emit(aten.add.Tensor, nibble(first), emit(aten.mul.Tensor, nibble(second), 16.0))
    lower = emit(aten.bitwise_right_shift.Tensor_Scalar, minimum_word, 16)
    lower = emit(aten.bitwise_and.Scalar, lower, 0xFFFF)  # the shift repeats the sign
    word = emit(aten.bitwise_or.Tensor, scale_word, lower)
    return emit.cast(packed, torch.uint8), word


def _unpack_int4(emit: Emitter, packed: fx.Node, word: fx.Node) -> fx.Node:
    q = _fields(emit, packed, count=2, bits=4, behind=2)
    word = emit(aten.unsqueeze.default, word, -3)
    scale = _as_float(emit, emit(aten.bitwise_and.Scalar, word, _UPPER_HALF))
    minimum = _as_float(emit, emit(aten.bitwise_left_shift.Tensor_Scalar, word, 16))
    scaled = emit(aten.mul.Tensor, emit.cast(q, torch.float32), scale)
    return emit(aten.add.Tensor, scaled, minimum)


def _scale_word(emit: Emitter, width: fx.Node, steps: int) -> fx.Node:
    """Bits of ``width / steps`` rounded up to bf16, NaN unless ``width`` is finite.

    Rounded by hand, on the bits: Inductor keeps a value it casts to bf16 and back in fp32.
    """
    bits = _as_int(emit, emit(aten.mul.Tensor, width, 1 / steps))
    up = emit(aten.bitwise_and.Scalar, emit(aten.add.Tensor, bits, 0xFFFF), _UPPER_HALF)
    finite = emit(aten.lt.Scalar, width, float("inf"))
    return emit(aten.where.self, finite, up, _constant(emit, _NAN_WORD, like=bits))


def _minimum_word(emit: Emitter, low: fx.Node) -> fx.Node:
    """Bits of ``low`` rounded down to bf16: away from zero where it is negative."""
    bits = _as_int(emit, low)
    away = emit(aten.where.self, emit(aten.lt.Scalar, low, 0.0), *_constants(emit, bits))
    return emit(aten.bitwise_and.Scalar, emit(aten.add.Tensor, bits, away), _UPPER_HALF)


def _constants(emit: Emitter, like: fx.Node) -> tuple[fx.Node, fx.Node]:
    return _constant(emit, 0xFFFF, like), _constant(emit, 0, like)


def _constant(emit: Emitter, value: int, like: fx.Node) -> fx.Node:
    fake = like.meta["val"]
    return emit(
        aten.full.default, [], value, dtype=fake.dtype, device=fake.device, pin_memory=False
    )


def _as_int(emit: Emitter, value: fx.Node) -> fx.Node:
    return emit(aten.view.dtype, value, torch.int32)


def _as_float(emit: Emitter, bits: fx.Node) -> fx.Node:
    return emit(aten.view.dtype, bits, torch.float32)


def _pack_bits(emit: Emitter, mask: fx.Node) -> fx.Node:
    bits = emit.cast(mask, torch.uint8)
    packed = emit(aten.select.int, bits, -2, 0)
    for bit in range(1, _MASK_BITS):
        lane = emit(aten.select.int, bits, -2, bit)
        shifted = emit(aten.bitwise_left_shift.Tensor_Scalar, lane, bit)
        packed = emit(aten.bitwise_or.Tensor, packed, shifted)
    return packed


def _unpack_bits(emit: Emitter, packed: fx.Node) -> fx.Node:
    return emit.cast(_fields(emit, packed, count=_MASK_BITS, bits=1, behind=1), torch.bool)


def _fields(emit: Emitter, packed: fx.Node, count: int, bits: int, behind: int) -> fx.Node:
    """Field k of every byte along a new dimension, before the last ``behind`` of them."""
    shifts = emit(
        prims.iota.default,
        count,
        start=0,
        step=bits,
        dtype=torch.int32,
        device=packed.meta["val"].device,
        requires_grad=False,
    )
    lanes = emit.cast(emit(aten.unsqueeze.default, packed, -1 - behind), torch.int32)
    column = emit(aten.view.default, shifts, [count, *[1] * behind])
    shifted = emit(aten.bitwise_right_shift.Tensor, lanes, column)
    return emit(aten.bitwise_and.Scalar, shifted, (1 << bits) - 1)


def _reciprocal(emit: Emitter, scale: fx.Node) -> fx.Node:
    """1 / ``scale``; large for a scale of 0, whose group holds nothing but its minimum."""
    return emit(aten.reciprocal.default, emit(aten.clamp_min.default, scale, _TINY))
