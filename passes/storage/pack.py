"""Writes and restores a stored tensor by plain operators that Inductor fuses.

A group whose elements share bytes is cut in 2 or 4 pieces, and a byte takes the same element of
each: then the reduction over the group and the packing walk the same piece, and Inductor makes them
one kernel that reads the tensor once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx
from torch._inductor import inductor_prims

from hot_compile.passes.base.emit import Emitter, prims
from hot_compile.passes.base.graph import CHANNEL_DIM, aten, strip
from hot_compile.passes.base.operators import CASTS
from hot_compile.passes.base.schemes import Scheme, Unit
from hot_compile.passes.storage.around import Sample, less_batch_mean, plus_batch_mean
from hot_compile.passes.storage.layout import Layout, layout_of
from hot_compile.runtime import coding, planes, pointwise
from hot_compile.runtime.planes import MASK_BITS, STEPS12, UPPER_HALF

_TINY = 2.0**-120
_STEPS4 = 15
_LEFT, _RIGHT = aten.bitwise_left_shift.Tensor_Scalar, aten.bitwise_right_shift.Tensor_Scalar


def pack(
    emit: Emitter,
    x: fx.Node,
    scheme: Scheme,
    mask: fx.Node | None = None,
    mean: fx.Node | None = None,
    sample: Sample = (),
) -> tuple[fx.Node, ...]:
    """Nodes that hold ``x`` as ``scheme``: packed tensors, then their scales.

    Args:
        emit: makes the nodes. x: a floating-point tensor, or bool for ``BITS``.
        scheme: one that ``layout_of`` allows.
        mask: bool and laid out as ``x``: goes into the bytes of a scheme that holds one.
        mean: of each channel, shaped to broadcast with ``x``, if it is known already.
        sample: ``sample_of`` x, wanted by schemes around the batch's mean.
    """
    if scheme is Scheme.EXACT:
        return (x,)
    if scheme.spec.around:
        distance, common = less_batch_mean(emit, x, sample)
        return *pack(emit, distance, scheme.spec.around), common
    coding.lowered()
    layout = layout_of(x.meta["val"], scheme)
    assert isinstance(layout, Layout), layout
    if coder := _coder(scheme):
        write, _ = coder
        return write(emit, x, layout, scheme)
    values = emit.cast(_cut(emit, x, layout), torch.float32)
    centre: tuple[fx.Node, ...] = ()
    unit = scheme.spec.unit
    if unit is Unit.CHANNEL:
        given = None if mean is None else _shaped(emit, emit.permute(mean, layout.order), layout)
        values, width, centre = _centred(emit, values, layout.over, given)
    else:
        size = emit(torch.ops.hot.finite_size.default, values)
        width = emit(aten.amax.default, size, list(layout.over), True)
    scale = _as_float(emit, _scale_word(emit, width))
    reciprocal = _reciprocal(emit, scale)
    levels, by_channel = scheme.spec.levels, unit is Unit.CHANNEL
    if by_channel:  # found in another kernel than the one that applies it
        reciprocal = emit.from_memory(reciprocal)
    code = _code(emit, values, reciprocal, levels, finite=by_channel)
    if mask is not None:
        lowest = emit.cast(_cut(emit, mask, layout), torch.int32)
        code = emit(aten.add.Tensor, emit(aten.mul.Tensor, code, 2), lowest)
    # by channel, of a code's fourth power, not of its share's
    scale = emit(aten.mul.Tensor, scale, levels**-4.0) if by_channel else emit.shortened(scale)
    return emit.cast(code, torch.int8), scale, *centre


def unpack(emit: Emitter, parts: tuple[fx.Node, ...], like: Tensor, scheme: Scheme) -> fx.Node:
    """Node that has ``like``'s shape, dtype and order of strides, from what ``pack`` made."""
    if scheme is Scheme.EXACT:
        return parts[0]
    if scheme.spec.around:
        *parts_of_distance, common = parts
        wide = like.to(torch.float32)
        distance = unpack(emit, tuple(parts_of_distance), wide, scheme.spec.around)
        return plus_batch_mean(emit, distance, common, like)
    if scheme.spec.unit is Unit.CHANNEL:
        return _restore_channels(emit, parts, like, scheme)
    flat = emit.cast(_restore(emit, parts, scheme), like.dtype)
    return _laid_out(emit, flat, parts[0], like, scheme)


def unpack_mask(emit: Emitter, packed: fx.Node, like: Tensor, scheme: Scheme) -> fx.Node:
    """The mask in the bytes that ``pack`` made by ``scheme`` of a tensor like ``like``."""
    # on a CPU Inductor makes a mask of bytes value by value: 20 times as slow
    wide = packed if _on_gpu(packed) else emit.cast(packed, torch.int32)
    mask = emit.cast(emit(aten.bitwise_and.Scalar, wide, 1), torch.bool)
    return _laid_out(emit, mask, packed, like, scheme)


def _cut(emit: Emitter, x: fx.Node, layout: Layout) -> fx.Node:
    """The view of ``x`` in which scales are found."""
    memory = emit.permute(x, layout.order)
    if not layout.cut:
        return memory
    outer = [emit.size(memory, dim) for dim in range(layout.outer)]
    return emit(aten.view.default, memory, [*outer, *layout.cut])


def _shaped(emit: Emitter, mean: fx.Node, layout: Layout) -> fx.Node:
    """``mean``, one number a channel, to broadcast over the view in which scales are found."""
    if not layout.cut:
        return mean
    channels = mean.meta["val"].shape[-1]
    return emit(aten.view.default, mean, [1] * (layout.outer + 2) + [channels])


def _laid_out(
    emit: Emitter, flat: fx.Node, packed: fx.Node, like: Tensor, scheme: Scheme
) -> fx.Node:
    """The view in which scales are found -> ``like``'s shape and order of strides."""
    layout = layout_of(like, scheme)
    assert isinstance(layout, Layout), layout
    if layout.cut:
        outer = [emit.size(packed, dim) for dim in range(layout.outer)]
        inner = [like.shape[dim] for dim in layout.order[layout.outer :]]
        flat = emit(aten.view.default, flat, [*outer, *inner])
    return emit.permute(flat, layout.inverse)


def _restore(emit: Emitter, parts: tuple[fx.Node, ...], scheme: Scheme) -> fx.Node:
    if coder := _coder(scheme):
        _, restore = coder
        return restore(emit, parts, scheme)
    code, scale = parts
    return _decode(emit, _without_mask(emit, code, scheme), scale, scheme.spec.levels)


def _restore_channels(
    emit: Emitter, parts: tuple[fx.Node, ...], like: Tensor, scheme: Scheme
) -> fx.Node:
    """Scale and mean as steps by channel, which ``affine`` makes one with those that follow.

    A channel that is not finite has a scale of NaN, so no code need say so.
    """
    code, scale, mean = parts
    pointwise.lowered()
    power = emit(torch.ops.hot.fourth_power.default, _without_mask(emit, code, scheme))
    image = _laid_out(emit, power, code, like, scheme)
    shape = [1, emit.size(image, CHANNEL_DIM), *[1] * (like.dim() - 2)]
    for op, vector in ((aten.mul.Tensor, scale), (aten.add.Tensor, mean)):
        image = emit(op, image, emit(aten.reshape.default, vector, shape))
    return emit.cast(image, like.dtype)


def _without_mask(emit: Emitter, code: fx.Node, scheme: Scheme) -> fx.Node:
    if scheme is scheme.plain:
        return code
    wide = emit.cast(code, torch.int32)
    return emit(aten.bitwise_right_shift.Tensor_Scalar, wide, 1)  # keeps the sign


def _code(
    emit: Emitter, values: fx.Node, reciprocal: fx.Node, levels: int, root: bool = True,
    finite: bool = False,
) -> fx.Node:  # fmt: skip
    """What ``coding._code`` says; int32."""
    return emit(torch.ops.hot.code.default, values, reciprocal, levels, root, finite)


def _decode(
    emit: Emitter, code: fx.Node, scale: fx.Node, levels: int, root: bool = True
) -> fx.Node:
    """What ``pointwise.decoded`` says; fp32."""
    pointwise.lowered()
    scale = emit.cast(scale, torch.float32)
    return emit(torch.ops.hot.restored.default, code, scale, levels, root)


def _centred(
    emit: Emitter, values: fx.Node, over: Sequence[int], mean: fx.Node | None
) -> tuple[fx.Node, fx.Node, tuple[fx.Node, ...]]:
    """(values less their channel's mean, the largest of these, the mean).

    A channel whose mean is not finite is lost; a batch norm loses it, too.
    """
    dims = list(over)
    mean = _of_columns(emit, aten.mean.dim, values, dims) if mean is None else mean
    high, low = _extremes(emit, values, dims)
    above, below = emit(aten.sub.Tensor, high, mean), emit(aten.sub.Tensor, mean, low)
    width = emit(aten.maximum.default, above, below)
    mean = emit.from_memory(mean)
    return emit(aten.sub.Tensor, values, mean), width, (mean,)


def _extremes(emit: Emitter, values: fx.Node, dims: list[int]) -> tuple[fx.Node, fx.Node]:
    """(the largest of ``values``, the smallest); one of them NaN where there is one.

    A GPU compares whole numbers in one instruction, fp32 in four, for the sake of NaN.
    """
    kinds = aten.amax.default, aten.amin.default
    if not _on_gpu(values):
        high, low = (_of_columns(emit, kind, values, dims) for kind in kinds)
        return high, low
    order = _in_order(emit, _as_int(emit, values))
    high, low = (_in_order(emit, _of_columns(emit, kind, order, dims)) for kind in kinds)
    return _as_float(emit, high), _as_float(emit, low)


def _in_order(emit: Emitter, bits: fx.Node) -> fx.Node:
    """fp32's bits as int32 that have fp32's order, NaN outermost; and these as fp32's bits."""
    sign = emit(_RIGHT, bits, 31)
    return emit(aten.bitwise_xor.Tensor, bits, emit(aten.bitwise_and.Scalar, sign, 0x7FFFFFFF))


def _of_columns(emit: Emitter, kind: object, values: fx.Node, dims: Sequence[int]) -> fx.Node:
    """``kind`` of ``values`` over ``dims``, which are kept, in memory; they are kept by a view.

    Where a kernel sums rows and columns at once, Inductor's code has the columns' results without
    the dimensions that they are said to keep (torch 2.11): what crosses would be of another rank
    than the backward is compiled for.
    """
    rank = values.meta["val"].dim()
    over = {dim % rank for dim in dims}
    shape = [1 if dim in over else emit.size(values, dim) for dim in range(rank)]
    return emit(aten.view.default, emit.from_memory(emit(kind, values, list(dims))), shape)


def in_pieces(emit: Emitter, x: fx.Node, layout: Layout, scheme: Scheme) -> list[fx.Node]:
    """The view of ``x`` in which scales are found, cut along its groups as ``scheme`` packs it."""
    view, count = _cut(emit, x, layout), scheme.spec.pieces
    length = layout.cut[1] // count
    return [emit(aten.slice.Tensor, view, -2, k * length, (k + 1) * length) for k in range(count)]


def _pieces(emit: Emitter, x: fx.Node, layout: Layout, scheme: Scheme) -> list[fx.Node]:
    return [emit.cast(piece, torch.float32) for piece in in_pieces(emit, x, layout, scheme)]


def _pack_planes(emit: Emitter, x: fx.Node, layout: Layout, scheme: Scheme) -> tuple[fx.Node, ...]:
    pieces, levels = _pieces(emit, x, layout, scheme), scheme.spec.levels
    scale = _as_float(emit, _scale_word(emit, emit(torch.ops.hot.group_size.default, pieces)))
    step = scale if levels else emit(aten.mul.Tensor, scale, 1 / STEPS12)
    reciprocal = _reciprocal(emit, step)
    codes = [_code(emit, p, reciprocal, levels or STEPS12, root=bool(levels)) for p in pieces]
    return *_planes(emit, codes, scheme), emit.shortened(scale)


def _planes(emit: Emitter, codes: Sequence[fx.Node], scheme: Scheme) -> list[fx.Node]:
    """Signed codes, one a piece: their upper bits in one word, then the rest as uint8.

    The upper bits are one int16 or int32 on a GPU, where whoever restores an element reads every
    plane; bytes on a CPU, whose vectors Inductor does not make of int16.
    """
    low = 8 // len(codes)
    high = scheme.spec.bits - low
    plane = torch.ops.hot.plane.default
    rest = emit(plane, codes, 0, low, torch.uint8)
    if _on_gpu(rest):
        word = torch.int16 if high * len(codes) == 16 else torch.int32
        return [emit(plane, codes, low, high, word), rest]
    a_byte = 8 // high
    parts = (codes[first : first + a_byte] for first in range(0, len(codes), a_byte))
    return [*(emit(plane, list(part), low, high, torch.uint8) for part in parts), rest]


def _from_planes(emit: Emitter, parts: Sequence[fx.Node], scheme: Scheme) -> fx.Node:
    """What ``_decode`` makes of all pieces' codes.

    On a GPU one operator, whose kernel finds each element's own code. On a CPU the pieces are
    restored one by one, in vectors, and put side by side.
    """
    *words, scale = parts
    spec = scheme.spec
    pieces, levels, root = spec.pieces, spec.levels or STEPS12, spec.levels > 0
    if _on_gpu(scale):
        planes.lowered()
        return emit(torch.ops.hot.restored_planes.default, *parts, pieces, levels, root)
    low = 8 // pieces
    high = spec.bits - low
    *upper, rest = (emit.cast(word, torch.int32) for word in words)
    restored = []
    for number in range(pieces):
        byte, place = divmod(number, 8 // high)
        # shifted up to the sign and down again: a field's number, and what lay below it
        code = emit(_LEFT, upper[byte], 32 - high * (place + 1))
        code = emit(_RIGHT, code, 32 - high - low)
        code = emit(aten.bitwise_and.Scalar, code, -(1 << low))
        lower = _field(emit, rest, number * low, bits=low)
        code = emit(aten.bitwise_or.Tensor, code, lower)
        restored.append(_decode(emit, code, scale, levels, root))
    return emit(aten.cat.default, restored, -2)


def _on_gpu(node: fx.Node) -> bool:
    return bool(node.meta["val"].device.type == "cuda")


def _iota(emit: Emitter, like: fx.Node, count: int, step: int) -> fx.Node:
    """0, ``step``, ... on a dimension before the last two."""
    row = emit(
        prims.iota.default,
        count,
        start=0,
        step=step,
        dtype=torch.int32,
        device=like.meta["val"].device,
        requires_grad=False,
    )
    return emit(aten.view.default, row, [count, 1, 1])


def _beside(emit: Emitter, plane: fx.Node) -> fx.Node:
    """``plane`` as whole numbers, with a dimension for its pieces before the last two."""
    return emit.cast(emit(aten.unsqueeze.default, plane, -3), torch.int32)


def _field(emit: Emitter, words: fx.Node, shift: fx.Node | int, bits: int) -> fx.Node:
    by = _RIGHT if isinstance(shift, int) else aten.bitwise_right_shift.Tensor
    return emit(aten.bitwise_and.Scalar, emit(by, words, shift), (1 << bits) - 1)


def _pack_int4(emit: Emitter, x: fx.Node, layout: Layout, scheme: Scheme) -> tuple[fx.Node, ...]:
    first, second = _pieces(emit, x, layout, scheme)
    low = emit(aten.amin.default, emit(aten.minimum.default, first, second), [-2], True)
    high = emit(aten.amax.default, emit(aten.maximum.default, first, second), [-2], True)
    minimum_word = _minimum_word(emit, low)
    minimum = _as_float(emit, minimum_word)
    width = emit(aten.mul.Tensor, emit(aten.sub.Tensor, high, minimum), 1 / _STEPS4)
    scale_word = _scale_word(emit, width)
    reciprocal = _reciprocal(emit, _as_float(emit, scale_word))

    def nibble(values: fx.Node) -> fx.Node:
        centred = emit(aten.sub.Tensor, values, minimum)
        return emit(aten.round.default, emit(aten.mul.Tensor, centred, reciprocal))

    packed = emit(aten.add.Tensor, nibble(first), emit(aten.mul.Tensor, nibble(second), 16.0))
    lower = emit(aten.bitwise_right_shift.Tensor_Scalar, minimum_word, 16)
    lower = emit(aten.bitwise_and.Scalar, lower, 0xFFFF)  # the shift repeats the sign
    word = emit(aten.bitwise_or.Tensor, scale_word, lower)
    return emit.cast(packed, torch.uint8), word


def _unpack_int4(emit: Emitter, parts: tuple[fx.Node, ...], scheme: Scheme) -> fx.Node:
    packed, word = parts
    if _on_gpu(packed):
        planes.lowered()
        return emit(torch.ops.hot.restored_nibbles.default, packed, word)
    shift = _iota(emit, packed, 2, step=4)
    step = _field(emit, _beside(emit, packed), shift, bits=4)
    word = emit(aten.unsqueeze.default, word, -3)
    scale = _as_float(emit, emit(aten.bitwise_and.Scalar, word, UPPER_HALF))
    minimum = _as_float(emit, emit(aten.bitwise_left_shift.Tensor_Scalar, word, 16))
    scaled = emit(aten.mul.Tensor, emit.cast(step, torch.float32), scale)
    return emit(aten.add.Tensor, scaled, minimum)


def _scale_word(emit: Emitter, width: fx.Node) -> fx.Node:
    return emit(torch.ops.hot.scale_word.default, width)


def _minimum_word(emit: Emitter, low: fx.Node) -> fx.Node:
    """Bits of ``low`` rounded down to bf16: away from zero where it is negative."""
    bits = _as_int(emit, low)
    away = emit(aten.where.self, emit(aten.lt.Scalar, low, 0.0), *_constants(emit, bits))
    return emit(aten.bitwise_and.Scalar, emit(aten.add.Tensor, bits, away), UPPER_HALF)


def _constants(emit: Emitter, like: fx.Node) -> tuple[fx.Node, fx.Node]:
    return emit.constant(0xFFFF, like), emit.constant(0, like)


def _as_int(emit: Emitter, value: fx.Node) -> fx.Node:
    return emit(aten.view.dtype, value, torch.int32)


def _as_float(emit: Emitter, bits: fx.Node) -> fx.Node:
    return emit(aten.view.dtype, bits, torch.float32)


def _pack_bits(emit: Emitter, mask: fx.Node, layout: Layout, scheme: Scheme) -> tuple[fx.Node, ...]:
    """A byte takes one element of each piece.

    Numbers that were drawn lie in memory, four bytes each, wherever two kernels read them: of them
    the mask is written, which the other kernel reads.
    """
    drawn = any(strip(n, CASTS).target is inductor_prims.random for n in mask.all_input_nodes)
    pieces = in_pieces(emit, emit.from_memory(mask) if drawn else mask, layout, scheme)
    packed, *others = [emit.cast(piece, torch.uint8) for piece in pieces]
    for bit, piece in enumerate(others, 1):
        packed = emit(aten.bitwise_or.Tensor, packed, emit(_LEFT, piece, bit))
    return (packed,)


def _unpack_bits(emit: Emitter, parts: tuple[fx.Node, ...], scheme: Scheme) -> fx.Node:
    (packed,) = parts
    if _on_gpu(packed):
        planes.lowered()
        return emit(torch.ops.hot.restored_bits.default, packed)
    shift = _iota(emit, packed, MASK_BITS, step=1)
    return emit.cast(_field(emit, _beside(emit, packed), shift, bits=1), torch.bool)


def _reciprocal(emit: Emitter, scale: fx.Node) -> fx.Node:
    """1 / ``scale``; large for a scale of 0, whose group holds nothing but its minimum."""
    return emit(aten.reciprocal.default, emit(aten.clamp_min.default, scale, _TINY))


Restore = Callable[[Emitter, tuple[fx.Node, ...], Scheme], fx.Node]


def _coder(scheme: Scheme) -> tuple[Callable[..., tuple[fx.Node, ...]], Restore] | None:
    """How a scheme in which elements share bytes is written and restored; None of any other, in
    which each has a byte of its own."""
    if scheme in _OWN:
        return _OWN[scheme]
    return (_pack_planes, _from_planes) if scheme.spec.pieces > 1 else None


_OWN: dict[Scheme, tuple[Callable[..., tuple[fx.Node, ...]], Restore]] = {
    Scheme.INT4: (_pack_int4, _unpack_int4),
    Scheme.BITS: (_pack_bits, _unpack_bits),
}
"""What is coded otherwise than by its fourth root or a uniform grid around zero."""
