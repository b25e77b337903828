"""Operators that write codes, as ``pointwise.py`` has those that restore numbers.

* ``hot::finite_size``: magnitudes, for the largest of a row or group.
* ``hot::group_size``: the largest of a group that is cut in pieces.
* ``hot::scale_word``: that, as bits of a bf16 number that is not below it.
* ``hot::code``: whole numbers from what is divided by such a scale.
* ``hot::plane``: the same bits of several codes, in one word.

As nodes they were forty a tensor, each evaluated by Inductor once for every use: a third of the
time that a model's forward took to be lowered. Importing this registers the operators.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hot_compile.runtime.planes import UPPER_HALF
from hot_compile.runtime.pointwise import WHOLE, WHOLE_WORD, Number, taught

_NAN_WORD = 0x7FC00000
_SHORT = 32
"""Elements of a piece up to which a group's reduction is told to be a tiny one."""
_LIBRARY = torch.library.Library("hot", "FRAGMENT")
for _schema in (
    "finite_size(Tensor x) -> Tensor",
    "scale_word(Tensor width) -> Tensor",
    "code(Tensor x, Tensor reciprocal, int levels, bool root, bool finite=False) -> Tensor",
    "plane(Tensor[] codes, int shift, int bits, ScalarType dtype) -> Tensor",
):
    _LIBRARY.define(_schema, tags=(torch.Tag.pointwise,))
_LIBRARY.define("group_size(Tensor[] pieces) -> Tensor")

Bits = Callable[[Any], Any]
"""fp32 -> its bits as int32."""


def _finite(x: Any, do: Any, number: Number) -> Any:
    size = do.abs(x)
    return do.where(do.lt(size, number(math.inf)), size, number(0.0))


def _largest(pieces: Sequence[Any], do: Any, number: Number) -> Any:
    return functools.reduce(do.maximum, (_finite(piece, do, number) for piece in pieces))


def _word(width: Any, do: Any, number: Number, whole: Number, bits: Bits) -> Any:
    """Rounded up by hand, on the bits: Inductor keeps a value it casts to bf16 and back in fp32."""
    up = do.bitwise_and(do.add(bits(width), whole(0xFFFF)), whole(UPPER_HALF))
    return do.where(do.lt(width, number(math.inf)), up, whole(_NAN_WORD))


def _coded(
    share: Any, do: Any, number: Number, whole: Number, nearest: Callable[[Any], Any],
    levels: int, root: bool, finite: bool, on_gpu: bool,
) -> Any:  # fmt: skip
    """What :func:`_code` says of ``share``, a value over its scale."""
    if root:
        # a GPU has an instruction for reciprocal square roots: two of them, and no division
        rooted = do.rsqrt if on_gpu else do.sqrt
        size, largest = rooted(rooted(do.abs(share))), number((levels + 1) / levels)
        if not finite:
            size = do.where(do.lt(size, largest), size, largest)
        step = do.mul(do.copysign(size, share), number(float(levels)))
    else:
        step = do.minimum(share, number(levels + 1.0))
        step = do.maximum(step, number(-levels - 1.0))
    code = nearest(step)
    return code if finite else do.where(do.eq(share, share), code, whole(-levels - 2))


def _joined(
    codes: Sequence[Any], do: Any, whole: Number, shift: int, bits: int, signed: bool
) -> Any:
    """``bits`` bits of each code, from the one of that place on, the first code's lowest.

    ``signed``: the word's sign is the last code's.
    """
    word = None
    for place, code in enumerate(codes):
        field = do.bitwise_right_shift(code, whole(shift)) if shift else code
        if not (signed and place == len(codes) - 1):
            field = do.bitwise_and(field, whole((1 << bits) - 1))
        if place:
            field = do.bitwise_left_shift(field, whole(place * bits))
        word = field if word is None else do.bitwise_or(word, field)
    return word


def _tensors(like: Tensor) -> tuple[Number, Number, Bits]:
    def number(value: float) -> Tensor:
        return like.new_full((), value, dtype=torch.float32)

    def whole(value: float) -> Tensor:
        return like.new_full((), value, dtype=torch.int32)

    return number, whole, lambda t: t.view(torch.int32)


def _finite_size(x: Tensor) -> Tensor:
    """Magnitudes of fp32 ``x``; 0 for what is not finite, whose neighbours keep their digits."""
    return _finite(x, torch, _tensors(x)[0])


def _group_size(pieces: list[Tensor]) -> Tensor:
    """The largest finite magnitude of groups, as [..., 1, lanes], whose fp32 ``pieces`` are all
    [..., group / n, lanes]."""
    return _largest(pieces, torch, _tensors(pieces[0])[0]).amax(-2, True)


def _scale_word(width: Tensor) -> Tensor:
    """Bits (int32) of fp32 ``width``, which is not negative, rounded up to bf16; NaN's unless it is
    finite."""
    return _word(width, torch, *_tensors(width))


def _code(x: Tensor, reciprocal: Tensor, levels: int, root: bool, finite: bool = False) -> Tensor:
    """int32 codes of fp32 ``x`` times the ``reciprocal`` of its scale, which broadcasts to it.

    ``root``: from ``-levels`` to ``levels``, its fourth root in as many steps, rounded. Else ``x``
    times ``reciprocal`` itself, rounded. One more than ``levels`` is infinity, -levels - 2 is NaN;
    but any code, where the caller says that all are ``finite`` or what is not is lost anyway.
    """
    number, whole, _ = _tensors(x)

    def nearest(step: Tensor) -> Tensor:
        return step.round().int()

    return _coded(x * reciprocal, torch, number, whole, nearest, levels, root, finite, x.is_cuda)


def _plane(codes: list[Tensor], shift: int, bits: int, dtype: torch.dtype) -> Tensor:
    """One word of ``dtype``, int16, int32 or uint8, an element of int32 ``codes`` of one shape."""
    whole = _tensors(codes[0])[1]
    return _joined(codes, torch, whole, shift, bits, dtype.is_signed).to(dtype)


for _device in ("CPU", "CUDA"):
    _LIBRARY.impl("finite_size", _finite_size, _device)
    _LIBRARY.impl("group_size", _group_size, _device)
    _LIBRARY.impl("scale_word", _scale_word, _device)
    _LIBRARY.impl("code", _code, _device)
    _LIBRARY.impl("plane", _plane, _device)
torch.library.register_fake("hot::finite_size")(lambda x: x.abs())
torch.library.register_fake("hot::group_size")(lambda pieces: pieces[0].amax(-2, True))
torch.library.register_fake("hot::scale_word")(lambda width: width.abs().to(torch.int32))
torch.library.register_fake("hot::code")(
    lambda x, reciprocal, levels, root, finite=False: (x * reciprocal).to(torch.int32)
)
torch.library.register_fake("hot::plane")(
    lambda codes, shift, bits, dtype: codes[0].to(dtype, copy=True)
)


@taught
def lowered() -> None:
    """Teach Inductor these operators."""
    from torch._inductor.ir import Reduction
    from torch._inductor.lowering import _make_reduction_inner, make_pointwise, register_lowering
    from torch._inductor.runtime.hints import ReductionHint
    from torch._inductor.virtualized import ops

    number = functools.partial(ops.constant, dtype=torch.float32)
    whole = functools.partial(ops.constant, dtype=torch.int32)

    def bits(value: Any) -> Any:
        return ops.to_dtype_bitcast(value, torch.int32, torch.float32)

    @register_lowering(torch.ops.hot.finite_size.default, type_promotion_kind=None)
    def _(x: Any) -> Any:
        return make_pointwise(lambda value: _finite(value, ops, number))(x)

    @register_lowering(torch.ops.hot.group_size.default, type_promotion_kind=None)
    def _(pieces: Any) -> Any:
        size = make_pointwise(lambda *values: _largest(values, ops, number))(*pieces)
        # of four pieces whose groups are short Inductor would try 128 at a time, too, all of them
        # in registers: the kernel that packs a SiLU's and its factor took 25 s to compile
        short = len(pieces) > 2 and size.get_size()[-2] <= _SHORT
        result: Any = Reduction.create(
            input_node=size,
            reduction_hint=ReductionHint.OUTER_TINY if short else ReductionHint.DEFAULT,
            **_make_reduction_inner(
                size, axis=[-2], keepdims=True, dtype=None, override_return_dtype=None,
                reduction_type="max",
            ),
            reduction_type="max",
        )  # fmt: skip
        if isinstance(result.data.data, Reduction):
            result.realize()
        return result

    @register_lowering(torch.ops.hot.scale_word.default, type_promotion_kind=None)
    def _(width: Any) -> Any:
        def element(value: Any) -> Any:
            return _word(value, ops, number, whole, bits)

        return make_pointwise(element, override_return_dtype=torch.int32)(width)

    @register_lowering(torch.ops.hot.code.default, broadcast=True, type_promotion_kind=None)
    def _(x: Any, reciprocal: Any, levels: int, root: bool, finite: bool = False) -> Any:
        on_gpu = x.get_device().type == "cuda"

        def nearest(step: Any) -> Any:
            if not on_gpu:  # which has instructions for both; Inductor's vectors have no bits
                return ops.to_dtype(ops.round(step), torch.int32)
            # below 2 ** 22 in size, the last bits of this sum are the nearest whole number:
            # conversions take a GPU as long as eight additions
            return ops.sub(bits(ops.add(step, number(WHOLE))), whole(WHOLE_WORD))

        def element(value: Any, factor: Any) -> Any:
            share = ops.mul(value, factor)
            return _coded(share, ops, number, whole, nearest, levels, root, finite, on_gpu)

        return make_pointwise(element, override_return_dtype=torch.int32)(x, reciprocal)

    @register_lowering(torch.ops.hot.plane.default, type_promotion_kind=None)
    def _(codes: Any, shift: int, bits: int, dtype: torch.dtype) -> Any:
        def element(*values: Any) -> Any:
            word = _joined(values, ops, whole, shift, bits, dtype.is_signed)
            return ops.to_dtype(word, dtype, torch.int32)

        return make_pointwise(element, override_return_dtype=dtype)(*codes)
