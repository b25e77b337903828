"""How a tensor's memory is cut into what shares a scale.

Rows and groups lie along memory, so that values, packed bytes and scales are read and written
together. In a channels-last tensor groups lie along positions: what a convolution leaves differs in
scale from channel to channel, so a group must not mix them.

Where Inductor finds that convolutions gain by it, it gives their outputs, and what is made of them,
a channels-last layout whatever their fake strides say. Packing has to follow (``in_memory``): else
it would touch memory in steps of a whole position's channels.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor import config as inductor_config
from torch._inductor.graph import GraphLowering

from hot_compile.passes.base.graph import (
    CHANNEL_DIM,
    IMAGE_DIMS,
    aten,
    is_tangent,
    returned,
    strip,
    value_of,
)
from hot_compile.passes.base.operators import CASTS, RESHAPES, VIEWS, is_pointwise
from hot_compile.passes.base.schemes import Scheme, Unit
from hot_compile.passes.base.site import bytes_of, hint, positions_of
from hot_compile.passes.cost.images import CHOSEN, RatesOf, channels_last_wins
from hot_compile.passes.storage.around import Sample, mean_bytes

log = logging.getLogger("hot_compile")

CHANNELS_LAST = "hot_lays_images_channels_last"
"""What ``GraphModule.meta`` holds of a forward that Inductor is to lay so, against its rules."""
_MARK = "hot_channels_last"
GROUP = 128
"""Elements that share a scale, at most."""
_SMALLEST_GROUP = 32
_MOST_STEPS = 4
"""From an element to its neighbour, of what may be stored: by more, most of what is read is not."""


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
    run, outer, step = 1, len(order), step_of(value)
    for dim in reversed(order):
        if not isinstance(sizes[dim], int) or (sizes[dim] > 1 and strides[dim] != run * step):
            break
        run, outer = run * sizes[dim], outer - 1
    innermost = sizes[order[-1]] if outer < len(order) else run
    image = _channels_last(value, order, run)
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


def step_of(value: Tensor) -> int:
    """From an element of ``value`` (fake) to the next in memory: 2 for every other one of a row, as
    where a gate and what it is for take turns. Whoever reads it reads what lies between, too."""
    steps = [stride for size, stride in zip(value.shape, value.stride(), strict=True) if size != 1]
    step = min(map(hint, steps), default=1)
    return step if 1 < step <= _MOST_STEPS else 1


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


def _channels_last(value: Tensor, order: list[int], run: int) -> bool:
    """Images and the like whose channels lie innermost, more than one of them."""
    channels = value.shape[CHANNEL_DIM] if value.dim() >= IMAGE_DIMS else 1
    return order[-1] == 1 and isinstance(channels, int) and channels > 1 and run % channels == 0


def _group(lengths: tuple[int, ...], scheme: Scheme) -> int | None:
    """Elements that share a scale: of the first of these lengths that divides well."""
    if scheme.spec.unit is Unit.ROW:
        return lengths[0] if lengths[0] >= _SMALLEST_GROUP else None
    pieces = max(2, scheme.spec.pieces)
    for length in lengths:
        for group in range(min(GROUP, length), _SMALLEST_GROUP - 1, -1):
            if length % group == 0 and group % pieces == 0:
                return group
    whole = lengths[-1]
    return whole if scheme is Scheme.BITS and whole > 0 and whole % pieces == 0 else None


def lay_images(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    num_fwd_outputs: int,
    rates: RatesOf,
    may_force: bool,
) -> int:
    """Note which images will lie channels last; 1 if Inductor is made to lay them so.

    It decides by rules of its own. Where those say no and it ``may_force`` it, convolutions are
    timed, if the joint graph's were not, and ``forward`` is marked for ``hot_compile.inductor`` if
    they are faster so.
    """
    try:
        changes = GraphLowering.decide_layout_opt(forward, is_inference=False)
    except Exception:  # not a stable interface; strides are then taken as they are
        log.debug("hot: Inductor did not say which layout it will choose", exc_info=True)
        return 0
    asked = may_force and inductor_config.layout_optimization and not changes
    forced = asked and (
        any(CHOSEN in node.meta for node in forward.graph.nodes)
        or _timed_faster(forward.graph, backward.graph, num_fwd_outputs, rates)
    )
    if forced:
        forward.meta[CHANNELS_LAST] = True
    _mark_images(forward, all_of_them=changes or forced)
    return int(forced)


def _timed_faster(
    forward: fx.Graph, backward: fx.Graph, num_fwd_outputs: int, rates: RatesOf
) -> bool:
    turned = _turned(forward, backward, num_fwd_outputs)
    return channels_last_wins(itertools.chain(forward.nodes, backward.nodes), turned, rates)


def _turned(forward: fx.Graph, backward: fx.Graph, num_fwd_outputs: int) -> int:
    """Bytes of images channels first that the graphs are given, and of those they give, but for
    convolutions' weights and their gradients."""
    convolutions = forward.find_nodes(op="call_function", target=aten.convolution.default)
    weights = {strip(node.args[1], CASTS) for node in convolutions}
    inputs = forward.find_nodes(op="placeholder")
    gradients = zip(inputs, returned(backward), strict=False)
    given = backward.find_nodes(op="placeholder")
    crossing = [
        *(node for node in inputs if node not in weights),
        *filter(is_tangent, given),
        *returned(forward)[:num_fwd_outputs],
        *(gradient for node, gradient in gradients if node not in weights),
    ]
    images = [n.meta["val"] for n in crossing if isinstance(n, fx.Node) and _is_image(n)]
    return sum(bytes_of(x) for x in images if hint(x.stride(CHANNEL_DIM)) != 1)


def _mark_images(forward: fx.GraphModule, all_of_them: bool) -> None:
    """Note convolutions' outputs, the images made of them, and copies that convolutions read.

    A norm of groups sees an image in another shape, and what it leaves lies as the image did. If
    not ``all_of_them``, the convolutions whose fake strides say so lie channels last, as those of
    weights that do; what other convolutions read is turned round for them.
    """
    convolutions = forward.graph.find_nodes(op="call_function", target=aten.convolution.default)
    lying = {conv for conv in convolutions if all_of_them or _lies_channels_last(conv)}
    if not lying:
        return
    read = {strip(conv.args[0], CASTS) for conv in convolutions}
    turned = {n for conv in convolutions if conv not in lying for n in _between(conv)}
    images: dict[fx.Node, torch.Size] = {}
    for node in forward.graph.nodes:
        convolved = node.target is aten.convolution.default
        copied = all_of_them and node.target is aten.clone.default and node in read
        made = node.target not in VIEWS and any(
            n in images and images[n] == _shape(n) for n in node.all_input_nodes
        )
        lies = node in lying if convolved else (copied or made) and node not in turned
        if lies and _is_image(node):
            node.meta[_MARK] = True
            images[node] = _shape(node)
        elif shown := [n for n in node.all_input_nodes if n in images and _shows(node, n)]:
            images[node] = images[shown[0]]


def _between(conv: Any) -> set[Any]:
    """What ``conv`` reads, and what that is cast from."""
    return {conv.args[0], strip(conv.args[0], CASTS)}


def _shows(node: fx.Node, image: fx.Node) -> bool:
    """``node`` has the elements of ``image`` in their order, or one made of each."""
    each = is_pointwise(node) or node.target in CASTS
    return node.target in RESHAPES or (each and _shape(node) == _shape(image))


def _shape(node: fx.Node) -> torch.Size:
    value = node.meta.get("val")
    value = value[0] if isinstance(value, (tuple, list)) and value else value
    return value.shape if isinstance(value, torch.Tensor) else torch.Size()


def _lies_channels_last(conv: fx.Node) -> bool:
    """The strides of its output say so; those of a single position say nothing."""
    value = value_of(conv)
    return _is_image(conv) and positions_of(value) > 1 and hint(value.stride(CHANNEL_DIM)) == 1


def _is_image(node: fx.Node) -> bool:
    """Inductor does it for images only, not for signals or volumes."""
    return len(_shape(node)) == IMAGE_DIMS


def all_lie_channels_last(forward: fx.Graph) -> bool:
    """All outputs of convolutions of images do, and there are some."""
    found = forward.find_nodes(op="call_function", target=aten.convolution.default)
    images = [conv for conv in found if _is_image(conv)]
    return bool(images) and all(map(is_marked, images))


def is_marked(node: fx.Node) -> bool:
    """``node``, of the forward, will lie channels last whatever its fake strides say."""
    return _MARK in node.meta


def in_memory(node: fx.Node) -> torch.Tensor:
    """The fake value of ``node`` with the strides that it will have once lowered."""
    value = node.meta["val"]
    if not is_marked(node):
        return value
    with value.fake_mode:
        return value.contiguous(memory_format=torch.channels_last)
