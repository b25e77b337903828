"""Whether a graph's convolutions are faster with images channels last, timed on its device.

Inductor says no to a whole graph in which one convolution has groups of several channels, or half
as many outputs as inputs, by fixed rules. cuDNN's half-precision kernels want channels last:
what lies otherwise they turn round, before and behind each call (9 of the 44 ms of a RegNet's step
on an H200, 7 of the 24 of a VoVNet's).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from hot_compile.passes.base.files import write_whole
from hot_compile.passes.base.graph import IMAGE_DIMS
from hot_compile.passes.cost import tuned
from hot_compile.passes.cost.conv import products_of
from hot_compile.passes.cost.linear import Rates
from hot_compile.passes.cost.timing import between_events, random_numbers, undisturbed

log = logging.getLogger("hot_compile")
aten = torch.ops.aten
RatesOf = Callable[[torch.device], Rates | None]

CHOSEN = "hot_timed_channels_last"
"""In the metadata of images of which, in the joint graph, that was found."""
GAIN = 0.9
"""What channels last must take at most of the other layout's time. What is not a convolution may be
slower by it: on an H200 by 16 % of that time in a DPN, by 1 % at most in three others."""
_MOST = 12
"""Kinds of calls that are timed: those with the most products."""
_ROUNDS, _CALLS = 3, 3
_LAYOUTS = torch.contiguous_format, torch.channels_last
_OPERANDS: Mapping[Any, int] = {
    aten.convolution.default: 2,
    aten.convolution_backward.default: 3,
}
"""How many tensors lead a call's arguments, x and the weight last; a bias comes behind them."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """Calls of one operator with operands of the same shapes."""

    target: Any
    shapes: tuple[tuple[int, ...], ...]
    """Of grad_output, in a backward; of x [B, C, H, W]; of the weight."""
    dtype: torch.dtype
    rest: tuple[Any, ...]
    """Its arguments behind the bias, which takes no time."""
    products: int
    """Multiplications of a call."""


def channels_last_wins(
    nodes: Iterable[fx.Node], turned: int, rates: RatesOf, signals: bool = False
) -> bool:
    """The convolutions of images among ``nodes`` are faster so, all together, on their one GPU.

    ``turned``: bytes of images that come from elsewhere, or go there, and lie channels first there:
    each is copied. A graph of few convolutions, as where blocks are compiled by themselves, may
    lose by that what it wins. ``signals``: those of signals count too, as images of one row.

    What was found is kept in a file that every later process heeds, so that a script comes to one
    layout whenever it runs; processes of a job heed the first of them. False, too, where they
    cannot be timed: elsewhere than on a GPU, or of sizes that change.
    """
    convolutions = [node for node in nodes if node.target in _OPERANDS]
    devices = {node.args[0].meta["val"].device for node in convolutions}  # type: ignore[union-attr]
    kinds = (kind_of(node, signals) for node in convolutions)
    counts = collections.Counter(filter(None, kinds))
    here = torch.cuda.is_available() and {device.type for device in devices} == {"cuda"}
    if not here or len(devices) > 1 or not counts:
        return False
    dearest = sorted(counts, key=lambda kind: -counts[kind] * kind.products)[:_MOST]
    device = devices.pop()
    found, known = _found(tuple((kind, counts[kind]) for kind in dearest), device), rates(device)
    copies = 2 * turned / known.copy if known else 0.0
    return found is not None and found[1] + copies < GAIN * found[0]


def seconds(kind: Kind, device: torch.device) -> list[float] | None:
    """Of a call channels first, and channels last, as every process has them; None: unknown."""
    here = torch.cuda.is_available() and device.type == "cuda"
    return _found(((kind, 1),), device) if here else None


def kind_of(node: fx.Node, signals: bool = False) -> Kind | None:
    """None for what cannot be timed. ``signals``: [B, C, L] as [B, C, 1, L]."""
    values: Any = fx.map_arg(node.args, lambda operand: operand.meta["val"])
    lead = _OPERANDS[node.target]
    shapes = tuple(tuple(operand.shape) for operand in values[:lead])
    rest = tuple(tuple(arg) if isinstance(arg, list) else arg for arg in values[lead + 1 :])
    if signals and len(shapes[-1]) == IMAGE_DIMS - 1:
        shapes, rest = _of_one_row(shapes, rest)
    sizes = itertools.chain(*shapes, *(arg for arg in rest if isinstance(arg, tuple)))
    if len(shapes[-1]) != IMAGE_DIMS or not all(isinstance(size, int) for size in sizes):
        return None
    if node.target is aten.convolution_backward.default:
        *geometry, wanted = rest
        rest = (*geometry, (*wanted[:2], False))
    products = products_of(values, node.meta.get("val"))
    return Kind(node.target, shapes, values[0].dtype, rest, products)


def _of_one_row(shapes: Any, rest: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """A signal's convolution as an image's: along the row nothing is strided, padded or dilated."""
    stride, padding, dilation, transposed, output, *after = rest
    settings = (1, *stride), (0, *padding), (1, *dilation), transposed, (0, *output)
    return tuple((*shape[:2], 1, *shape[2:]) for shape in shapes), (*settings, *after)


@functools.cache
def _found(counted: tuple[tuple[Kind, int], ...], device: torch.device) -> list[float] | None:
    """Seconds of these calls, as every process has them: channels first, and channels last."""
    cudnn: Any = torch.backends.cudnn
    flags = cudnn.benchmark, cudnn.deterministic, cudnn.conv.fp32_precision
    digest = hashlib.sha256(repr((flags, counted)).encode()).hexdigest()[:16]
    path = tuned.path_of(device, f"-images-{digest}")
    mine = _kept(path)
    if mine is None and (mine := timed(counted, device)):
        with contextlib.suppress(OSError):  # the next process times them once more
            write_whole(path, json.dumps(mine))
    return tuned.first_said(path.stem, mine)


def _kept(path: Path) -> list[float] | None:
    """What an earlier process found, if that can be read."""
    try:
        plain, last = json.loads(path.read_text())
        return [float(plain), float(last)]
    except (OSError, ValueError, TypeError):
        return None


def timed(counted: Sequence[tuple[Kind, int]], device: torch.device) -> list[float] | None:
    """Seconds of these calls with images channels first and channels last; None: it failed."""
    try:
        with undisturbed(device):
            best = [[count * each for each in _best(kind, device)] for kind, count in counted]
            return [sum(times) for times in zip(*best, strict=True)]
    except RuntimeError:
        log.debug("hot: convolutions' layouts could not be timed", exc_info=True)
        return None


def _best(kind: Kind, device: torch.device) -> list[float]:
    """Seconds of a call with operands of either layout, in turns: what else the device has to do
    is the same for both."""
    made = [random_numbers(device, kind.dtype, *shape) for shape in kind.shapes]
    calls = [
        functools.partial(kind.target, *operands, None, *kind.rest)
        for operands in ([x.contiguous(memory_format=layout) for x in made] for layout in _LAYOUTS)
    ]
    # the first of a shape may look for an algorithm
    rounds = [
        [between_events(call, _CALLS, device, before=_CALLS) for call in calls]
        for _ in range(_ROUNDS)
    ]
    return [min(times) / _CALLS for times in zip(*rounds, strict=True)]
