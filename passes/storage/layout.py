"""How a tensor's memory is cut into what shares a scale.

Rows and groups lie along memory, so that values, packed bytes and scales are read and written
together. In a channels-last tensor groups lie along positions: what a convolution leaves differs in
scale from channel to channel, so a group must not mix them.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from hot_compile.passes.base.graph import CHANNEL_DIM, IMAGE_DIMS
from hot_compile.passes.base.schemes import Scheme, Unit
from hot_compile.passes.base.site import bytes_of, hint
from hot_compile.passes.storage.around import Sample, mean_bytes
from hot_compile.runtime.planes import MASK_BITS

GROUP = 128
"""Elements that share a scale, at most."""
_SMALLEST_GROUP = 32
_NARROWEST = 8
MEAN_BYTES = 4


@dataclasses.dataclass(frozen=True)
class Layout:
    """The view of a tensor in which scales are found."""

    order: tuple[int, ...]
    """Its dimensions by stride, outermost first."""
    outer: int
    """How many of them, from the outside, stay dimensions of the view."""
    cut: tuple[int, ...]
    """What the rest is viewed as: (groups, group, lanes); as it is if empty. So many lanes lie
    between neighbours of a group, each of another group."""
    over: tuple[int, ...]
    """Dimensions of the view that share a scale."""

    @property
    def inverse(self) -> tuple[int, ...]:
        """Undoes ``order``."""
        return tuple(self.order.index(dim) for dim in range(len(self.order)))


def layout_of(value: Tensor, scheme: Scheme) -> Layout | str:
    """How ``scheme`` would cut ``value`` (fake), or why it cannot."""
    sizes, strides, unit = value.shape, value.stride(), scheme.spec.unit
    if value.dim() == 0:
        return "a single number"
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
    if unit is Unit.CENTRED_ROW:
        return _centred_rows(value, order)
    if unit is Unit.CHANNEL:
        positions = (1, run // innermost, innermost) if image else ()
        return _by_channel(value, order, outer, positions)
    lanes, group = 1, None
    if unit is Unit.GROUP and image:
        lanes, group = innermost, _group((run // innermost,), scheme)
    across = unit is Unit.ROW and order[-1] != value.dim() - 1 and not image
    if group is None and not across:
        lanes, group = 1, _group((innermost, run), scheme)
    if group is None:
        return f"its innermost {run} contiguous elements do not divide into groups"
    return Layout(tuple(order), outer, (run // lanes // group, group, lanes), (-2,))


def packed_bytes(value: Tensor, scheme: Scheme, sample: Sample = ()) -> int:
    """Bytes of ``value`` (fake) stored by ``scheme``, its scales included; sizes by hint."""
    if scheme is Scheme.EXACT:
        return bytes_of(value)
    if scheme.spec.around:
        return packed_bytes(value, scheme.spec.around) + mean_bytes(value, sample)
    layout, spec = layout_of(value, scheme), scheme.spec
    assert isinstance(layout, Layout), layout
    elements = bytes_of(value) // value.dtype.itemsize
    if spec.unit is Unit.CHANNEL:
        sharing = hint(value.shape[CHANNEL_DIM])
    elif spec.unit is Unit.CENTRED_ROW:
        columns = hint(value.shape[-1])
        return elements + elements // columns * spec.parameter_bytes + columns * MEAN_BYTES
    else:
        sharing = elements // layout.cut[1]
    return elements * spec.bits // 8 + sharing * spec.parameter_bytes


def _by_channel(
    value: Tensor, order: list[int], outer: int, positions: tuple[int, ...]
) -> Layout | str:
    """``positions``: the cut of a channels-last image, whose channels are its last part."""
    if value.dim() <= CHANNEL_DIM:
        return "it has no channels"
    if positions:
        return Layout(tuple(order), outer, positions, (*range(outer), -3, -2))
    place = order.index(CHANNEL_DIM)
    over = tuple(dim for dim in range(len(order)) if dim != place)
    return Layout(tuple(order), len(order), (), over)


def _centred_rows(value: Tensor, order: list[int]) -> Layout | str:
    """Rows share a scale, whichever dimension lies innermost in memory."""
    columns = value.shape[-1]
    if value.dim() == 1 or not isinstance(columns, int) or columns < _NARROWEST:
        return f"no norm bounds it, and its rows of {columns} are too narrow to share a scale"
    return Layout(tuple(order), len(order), (), (order.index(value.dim() - 1),))


def _channels_last(value: Tensor, order: list[int], run: int) -> bool:
    """Images and the like whose channels lie innermost, more than one of them."""
    channels = value.shape[CHANNEL_DIM] if value.dim() >= IMAGE_DIMS else 1
    return order[-1] == 1 and isinstance(channels, int) and channels > 1 and run % channels == 0


def _group(lengths: tuple[int, ...], scheme: Scheme) -> int | None:
    """Elements that share a scale: of the first of these lengths that divides well."""
    if scheme is Scheme.BITS:
        run = lengths[-1]
        return run if run > 0 and run % MASK_BITS == 0 else None
    if scheme.spec.unit is Unit.ROW:
        return lengths[0] if lengths[0] >= _SMALLEST_GROUP else None
    pieces = max(2, scheme.spec.pieces)
    for length in lengths:
        for group in range(min(GROUP, length), _SMALLEST_GROUP - 1, -1):
            if length % group == 0 and group % pieces == 0:
                return group
    return None
