"""Restores what shares bytes, on a GPU: each element's own bits, found by its place in memory.

As nodes, restoring would read a plane at an index that Inductor splits by the rows and columns of
whoever reads. In that Triton finds no vectors unless a row is a multiple of its block: one load an
element and plane, and twice the instructions. In these operators' lowerings the place is one
number, and where its bits lie is worked out by operations, which Triton follows.

* ``hot::restored_planes``: codes of 5, 6 or 12 bits that lie in two planes.
* ``hot::restored_nibbles``: codes of 4 bits.
* ``hot::restored_bits``: masks.

``passes/storage/pack.py`` writes all of them: a group is cut in pieces, and a word takes the same
element of each. Importing this registers the operators.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor

from hot_compile.runtime.pointwise import Number, as_number, decoded, taught, uncounted

UPPER_HALF = -0x10000
"""Of a 32-bit word: the bits of a bf16 number in those of the same number in fp32."""
MASK_BITS = 8
STEPS12 = 2046
"""Codes of 12 bits go from minus this to this; what is not finite lies beyond."""

_LIBRARY = torch.library.Library("hot", "FRAGMENT")
for _schema in (
    "restored_planes(Tensor upper, Tensor lower, Tensor scale, int pieces, int levels, bool root)",
    "restored_nibbles(Tensor packed, Tensor word)",
    "restored_bits(Tensor packed)",
):
    _LIBRARY.define(f"{_schema} -> Tensor")

RESTORING = {
    torch.ops.hot.restored_planes.default,
    torch.ops.hot.restored_nibbles.default,
    torch.ops.hot.restored_bits.default,
}
"""What Inductor works out within whichever kernel reads it."""


def _code(
    upper: Any, lower: Any, piece: Any, do: Any, whole: Number, pieces: int, width: int
) -> Any:
    """The signed code that is field ``piece`` of both planes' int32 words, of which the upper one
    holds ``width`` bits and the lower one eight.

    Its upper bits are shifted up to the sign and down again, so that no bias is needed.
    """
    high, low = width // pieces, 8 // pieces
    left = do.sub(whole(32 - high), do.mul(piece, whole(high)))
    first = do.bitwise_right_shift(do.bitwise_left_shift(upper, left), whole(32 - high - low))
    first = do.bitwise_and(first, whole(-(1 << low)))
    return do.bitwise_or(first, _field(lower, piece, do, whole, low))


def _field(word: Any, piece: Any, do: Any, whole: Number, bits: int) -> Any:
    """Field ``piece`` of ``bits`` bits, without a sign."""
    shifted = do.bitwise_right_shift(word, do.mul(piece, whole(bits)))
    return do.bitwise_and(shifted, whole((1 << bits) - 1))


def _restored_planes(
    upper: Tensor, lower: Tensor, scale: Tensor, pieces: int, levels: int, root: bool
) -> Tensor:
    """fp32 numbers [..., groups * group * lanes] in the order of memory.

    Args:
        upper: int16 or int32 [..., groups, group / pieces, lanes]. lower: uint8, the same shape.
        scale: bf16 [..., groups, 1, lanes].
    """
    piece, whole = _pieces(upper, pieces)
    high, low = (plane.unsqueeze(-3).to(torch.int32) for plane in (upper, lower))
    code = _code(high, low, piece, torch, whole, pieces, _bits_of(upper.dtype)).to(torch.float32)
    scale = scale.unsqueeze(-3).float()
    return decoded(code, scale, torch, float, levels, root).flatten(-4)


def _restored_nibbles(packed: Tensor, word: Tensor) -> Tensor:
    """fp32 numbers [..., groups * group * lanes] in the order of memory.

    Args:
        packed: uint8 [..., groups, group / 2, lanes].
        word: int32 [..., groups, 1, lanes]: bf16 bits of the scale, then of the minimum.
    """
    piece, whole = _pieces(packed, 2)
    step = _field(packed.unsqueeze(-3).to(torch.int32), piece, torch, whole, 4)
    word = word.unsqueeze(-3)
    scale, minimum = (word & UPPER_HALF).view(torch.float32), (word << 16).view(torch.float32)
    return (step.to(torch.float32) * scale + minimum).flatten(-4)


def _restored_bits(packed: Tensor) -> Tensor:
    """bool [..., groups * group * lanes] in the order of memory.

    Args:
        packed: uint8 [..., groups, group / 8, lanes].
    """
    piece, whole = _pieces(packed, MASK_BITS)
    bit = _field(packed.unsqueeze(-3).to(torch.int32), piece, torch, whole, 1)
    return bit.to(torch.bool).flatten(-4)


def _bits_of(dtype: torch.dtype) -> int:
    return 8 * dtype.itemsize


def _pieces(like: Tensor, count: int) -> tuple[Tensor, Number]:
    piece = torch.arange(count, dtype=torch.int32, device=like.device).view(count, 1, 1)
    return piece, functools.partial(piece.new_full, ())


def _fake(plane: Tensor, pieces: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return plane.new_empty((*plane.shape[:-3], math.prod(plane.shape[-3:]) * pieces), dtype=dtype)


for _device in ("CPU", "CUDA"):
    _LIBRARY.impl("restored_planes", _restored_planes, _device)
    _LIBRARY.impl("restored_nibbles", _restored_nibbles, _device)
    _LIBRARY.impl("restored_bits", _restored_bits, _device)
torch.library.register_fake("hot::restored_planes")(
    lambda upper, lower, scale, pieces, levels, root: _fake(upper, pieces)
)
torch.library.register_fake("hot::restored_nibbles")(lambda packed, word: _fake(packed, 2))
torch.library.register_fake("hot::restored_bits")(
    lambda packed: _fake(packed, MASK_BITS, torch.bool)
)


@taught
def _rows_kept_at_hand() -> None:
    """Have Inductor go once along a short row that is restored."""
    from torch._inductor.choices import InductorChoices

    own = InductorChoices.should_use_persistent_reduction

    @functools.wraps(own)
    def at_once(features: Any, cooperative_reduction: bool) -> bool:
        found: bool = own(features, cooperative_reduction)
        return found or (not cooperative_reduction and _along_short_rows(features))

    InductorChoices.should_use_persistent_reduction = staticmethod(at_once)  # type: ignore[method-assign]


@taught
def lowered() -> None:
    """Teach Inductor the three operators."""
    _rows_kept_at_hand()
    from torch._inductor.lowering import register_lowering
    from torch._inductor.virtualized import ops

    number = functools.partial(ops.constant, dtype=torch.float32)
    whole = functools.partial(ops.constant, dtype=torch.int32)

    @register_lowering(torch.ops.hot.restored_planes.default, type_promotion_kind=None)
    def _(upper: Any, lower: Any, scale: Any, pieces: int, levels: int, root: bool) -> Any:
        width = _bits_of(upper.get_dtype())

        def element(words: Sequence[Any], piece: Any) -> Any:
            high, low = (ops.to_dtype(word, torch.int32) for word in words[:2])
            code = as_number(_code(high, low, piece, ops, whole, pieces, width), True)
            return decoded(code, ops.to_dtype(words[2], torch.float32), ops, number, levels, root)

        *outer, groups, part, lanes = upper.get_size()
        place = _Place((*outer, groups), part, lanes, pieces)
        return place.pointwise((upper, lower), (scale,), element, torch.float32)

    @register_lowering(torch.ops.hot.restored_nibbles.default, type_promotion_kind=None)
    def _(packed: Any, word: Any) -> Any:
        def element(words: Sequence[Any], piece: Any) -> Any:
            step = _field(ops.to_dtype(words[0], torch.int32), piece, ops, whole, 4)
            scale = ops.bitwise_and(words[1], whole(UPPER_HALF))
            minimum = ops.bitwise_left_shift(words[1], whole(16))
            scale, minimum = (
                ops.to_dtype_bitcast(bits, torch.float32, torch.int32) for bits in (scale, minimum)
            )
            return ops.add(ops.mul(as_number(step, True), scale), minimum)

        *outer, groups, part, lanes = packed.get_size()
        place = _Place((*outer, groups), part, lanes, 2)
        return place.pointwise((packed,), (word,), element, torch.float32)

    @register_lowering(torch.ops.hot.restored_bits.default, type_promotion_kind=None)
    def _(packed: Any) -> Any:
        def element(words: Sequence[Any], piece: Any) -> Any:
            bit = _field(ops.to_dtype(words[0], torch.int32), piece, ops, whole, 1)
            return ops.to_dtype(bit, torch.bool)

        *outer, groups, part, lanes = packed.get_size()
        place = _Place((*outer, groups), part, lanes, MASK_BITS)
        return place.pointwise((packed,), (), element, torch.bool)


_RESTORED = "hot_restores"
"""Attribute of Inductor's graphs that have one of these operators."""
_SHORT, _LOOKED_AT = 1024, 8


def _along_short_rows(features: Any) -> bool:
    """Its sums go along rows of which some are restored.

    Inductor takes a restored row for one whose elements lie anywhere, and goes over it twice: for
    the sum, and for what the sum is needed for. Each time it is restored.
    """
    from torch._inductor.virtualized import V

    numel = features.reduction_numel
    if not getattr(V.graph, _RESTORED, False) or not isinstance(numel, sympy.Integer):
        return False
    reads = [dep for node in features.reduction_nodes() for dep in node.read_writes.reads]
    return numel <= _SHORT and all(map(_goes_on, reads))


def _goes_on(dep: Any) -> bool:
    """It reads one element after the other, or the same again, as far as its first ones say."""
    from torch._inductor.dependencies import MemoryDep

    if not isinstance(dep, MemoryDep):
        return False
    *outer, last = dep.var_names or (sympy.Dummy(),)
    row = sympy.sympify(dep.index).subs(dict.fromkeys(outer, 0))
    places = [row.subs(last, place) for place in range(_LOOKED_AT)]
    return all(after - before in (0, 1) for before, after in itertools.pairwise(places))


class _Place:
    """Where the bits of an element lie, in Inductor's operations on its place in memory."""

    def __init__(self, outer: Sequence[Any], part: int, lanes: int, pieces: int) -> None:
        """``outer``: sizes before a group's, the number of groups in a run last."""
        *self._outer, groups = outer
        self._run = groups * part * lanes * pieces
        self._block, self._lanes, self._pieces = int(part * lanes), int(lanes), pieces

    def pointwise(
        self,
        planes: Sequence[Any],
        shared: Sequence[Any],
        element: Callable[[Sequence[Any], Any], Any],
        dtype: torch.dtype,
    ) -> Any:
        """Inductor's value [*outer, run] of ``element(words, piece)``.

        Args:
            planes: a word for every ``pieces`` elements. shared: one for every group and lane.
            element: of an element's words of both and which field of the planes' is its own.
        """
        from torch._inductor.ir import Pointwise
        from torch._inductor.virtualized import V

        setattr(V.graph, _RESTORED, True)
        sizes = [*self._outer, self._run]
        small = V.graph.sizevars.statically_known_leq(math.prod(sizes), 2**31 - 1)
        whole_type = torch.int32 if small else torch.int64
        reads = [_flat_loader(plane, whole_type) for plane in planes]
        reads_shared = [_flat_loader(plane, whole_type) for plane in shared]

        def inner(index: Sequence[Any]) -> Any:
            linear = 0
            for at, size in zip(index, sizes, strict=True):
                linear = linear * size + at
            found = self._by_index if self._rows(linear) else self._by_operations
            with uncounted():
                group, word, piece = found(linear, whole_type)
            words = [read(word) for read in reads] + [read(group) for read in reads_shared]
            with uncounted():
                return element(words, piece)

        device = planes[0].get_device()
        return Pointwise.create(device=device, dtype=dtype, inner_fn=inner, ranges=sizes)

    def _rows(self, linear: Any) -> bool:
        """``linear`` goes along rows no longer than a group, as a norm over a head's channels does,
        or as long as several, as a softmax does.

        Triton finds vectors in an index made of those, and Inductor sees which elements it reads:
        only so does it sum over a row and over all rows in one kernel, and keep a row at hand
        that it reads for a sum and once more. Not of images, whose lanes are as many as they have
        channels, seldom a power of two.
        """
        if self._lanes > 1:
            return False
        found = sympy.expand(linear).as_coefficients_dict().items()
        steps = [step for term, step in found if term != 1 and step > 1]
        group = self._block * self._pieces
        if any(group % step == 0 for step in steps):
            return True
        # of sizes known when it runs, an index has 64 bits; what is made of it must have 32
        known = all(isinstance(size, int | sympy.Integer) for size in (*self._outer, self._run))
        return known and bool(steps) and all(step % group == 0 for step in steps)

    def _by_index(self, linear: Any, dtype: torch.dtype) -> tuple[Any, Any, Any]:
        """(group, word, field of the word) of element ``linear``, the first two as an index."""
        from torch._inductor.virtualized import ops
        from torch.utils._sympy.functions import FloorDiv, ModularIndexing

        group: Any = FloorDiv(linear, self._block * self._pieces)
        word = group * self._block + ModularIndexing(linear, 1, self._block)
        piece = ops.index_expr(ModularIndexing(linear, self._block, self._pieces), dtype)
        return group, word, ops.to_dtype(piece, torch.int32)

    def _by_operations(self, linear: Any, dtype: torch.dtype) -> tuple[Any, Any, Any]:
        """The same, of groups with lanes too, by operations on one number, its place."""
        from torch._inductor.virtualized import ops

        place = ops.index_expr(linear, dtype)
        block, lanes, pieces = (
            ops.constant(n, dtype) for n in (self._block, self._lanes, self._pieces)
        )
        piece = ops.to_dtype(ops.mod(ops.truncdiv(place, block), pieces), torch.int32)
        all_pieces = ops.constant(self._block * self._pieces, dtype)
        group = ops.truncdiv(place, all_pieces)
        word = ops.add(ops.mul(group, block), ops.mod(place, block))
        if self._lanes > 1:
            group = ops.add(ops.mul(group, lanes), ops.mod(place, lanes))
        return group, word, piece


def _flat_loader(plane: Any, dtype: torch.dtype) -> Callable[[Any], Any]:
    """Reads a contiguous tensor of Inductor's at a place: an index, or a value of ``dtype``.

    The place may be negative where the outcome is masked, as each half of a ``cat`` is in the
    other's. Torch then holds a value's bounds against whole numbers, and before 2.14 it fails at a
    quotient's, which it takes for real ones. Of a cast, to whatever dtype, it knows no bounds.
    """
    from torch._inductor.lowering import lowerings
    from torch._inductor.virtualized import ops

    plane.realize()
    count = math.prod(plane.get_size())
    load = lowerings[torch.ops.aten.reshape.default](plane, [count]).make_loader()

    def read(place: Any) -> Any:
        if not isinstance(place, sympy.Expr):
            place = ops.to_dtype(place, dtype)
            place = ops.indirect_indexing(place, count, check=False, wrap_neg=False)
        return load([place])

    return read
