"""What storing a crossing tensor costs a step, in seconds more than leaving it as it is.

Where a kernel of Inductor's makes or reads the tensor, packing or restoring is part of it: what is
packed is written besides, what is restored is read in fewer bytes, and either takes arithmetic.
Elsewhere either is a kernel of its own, which reads and writes both. That the forward need not
write the whole tensor is not counted: it is mostly written for the forward's own readers as well.

Of a Qwen3 (H100, two layers) 756 MiB took 0.25 ms of its kernels' 8, of a ConvMixer 1860 MiB 2.26
of 32: 0.30 and 2.3 by these prices, 0.10 and 1.8 by bytes alone.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator

from torch import Tensor, fx

from hot_compile.passes.base.graph import CHANNEL_DIM, aten, strip
from hot_compile.passes.base.operators import CASTS, REDUCTIONS, VIEWS, is_pointwise
from hot_compile.passes.base.schemes import Scheme, Unit
from hot_compile.passes.base.site import bytes_of, elements_of, hint
from hot_compile.passes.cost.linear import Rates
from hot_compile.passes.storage.crossers import Crosser
from hot_compile.passes.storage.layout import step_of

StoragePrice = Callable[[Crosser, Scheme], float | None]
"""Seconds that a scheme costs a step; None: the device has no rates."""

_SAME = VIEWS | CASTS
_FUSED = REDUCTIONS | {aten.clone.default, aten.cat.default, aten.embedding.default}
_MASK_BITS = 8
LAUNCH = 1.5
"""Calls of an operator, as ``hot-compile tune`` times them, that a kernel's launch takes the host
in Inductor's code, its result's allocation included: 1.1 to 2.1 on five machines."""
_BY_CHANNEL = 3
"""Small kernels that make scales of channels in the forward, and vectors of them in the backward: a
ResNet-50's 53 images took 170 launches besides those that work out its ReLUs again."""
_FEW_CHANNELS = 50
"""By so many over their channels those take longer: Inductor makes about as many partial results
for few as for many, and one block adds up a channel's. On an H200, of 45 images, that took 0.17 ms
for 3 channels (17640 partial results each) and 0.009 for 64."""


_SIXTEEN_BITS_ON_A_CPU = 6
"""Times their bytes that tensors of 16 bits count there. Two cores packed and restored a million
elements by rows in 0.7 ms of fp32 and 1.2 of bf16, by groups of 6 bits in 1.5 and 1.8."""


def storing_seconds(crosser: Crosser, scheme: Scheme, rates: Rates) -> float:
    """Predicted time of packing and restoring ``crosser``, less what exact storage takes."""
    if scheme is Scheme.EXACT:
        return 0.0
    (whole, held), value = held_bytes(crosser, scheme), crosser.saved.meta["val"]
    elements = elements_of(value)
    worked = _worked(value, whole, rates)
    alone = (worked + held) / rates.packing
    alone += rates.start if rates.asynchronous else rates.launch
    packed, restored = alone, alone
    if _packed_by_another(crosser, scheme, rates):
        packed = held / rates.copy + _arithmetic(worked + held, elements, rates)
    if restored_by_readers(crosser, scheme, rates):
        restored = _read_less(worked, held, elements, rates)
    step = step_of(value)
    if step > 1:  # whole rows are written, and read for each part
        packed += step * whole / rates.copy
    if scheme.spec.around:  # its mean is found by a kernel that reads all of it
        packed += whole / rates.copy + rates.start
    if scheme.spec.unit is Unit.CHANNEL:
        channels = hint(value.shape[CHANNEL_DIM])
        packed += _BY_CHANNEL * rates.start * (1 + _FEW_CHANNELS / channels)
    return packed + restored


def host_storing_seconds(crosser: Crosser, scheme: Scheme, rates: Rates) -> float:
    """The same of a step whose device waits for its host: the launches of the kernels, about, that
    it has more for ``crosser``."""
    if scheme is Scheme.EXACT:
        return 0.0
    more = _BY_CHANNEL if scheme.spec.unit is Unit.CHANNEL else 0
    more += not _packed_by_another(crosser, scheme, rates)
    more += not restored_by_readers(crosser, scheme, rates)
    return more * LAUNCH * rates.launch


def host_seconds(crosser: Crosser, scheme: Scheme, rates: Rates) -> float | None:
    """Predicted time of the way to the host and back, as if nothing of the step ran meanwhile.

    None where there is no other memory than the device's.
    """
    if not rates.host_copy:
        return None
    _, held = held_bytes(crosser, scheme)
    return 2 * (held / rates.host_copy + rates.launch)


def _worked(value: Tensor, whole: int, rates: Rates) -> int:
    """Bytes that count where ``whole`` bytes of ``value`` are worked out."""
    slow = value.dtype.itemsize == 2 and not rates.asynchronous
    return whole * _SIXTEEN_BITS_ON_A_CPU if slow else whole


def _arithmetic(moved: int, elements: int, rates: Rates) -> float:
    """What packing takes longer than moving as many bytes."""
    if rates.coding:
        return elements / rates.coding
    return moved * max(0.0, 1 / rates.packing - 1 / rates.copy)


def _read_less(whole: int, held: int, elements: int, rates: Rates) -> float:
    """A reader that restores on its way. A GPU's was never seen to get faster by reading less."""
    less = 0.0 if rates.coding else (held - whole) / rates.copy
    return max(0.0, less + _arithmetic(whole + held, elements, rates))


def held_bytes(crosser: Crosser, scheme: Scheme) -> tuple[int, int]:
    """(whole, as ``scheme`` holds it)."""
    value = crosser.saved.meta["val"]
    whole = bytes_of(value)
    if scheme is Scheme.EXACT:
        return whole, whole
    if set(crosser.restored.users) <= {part for mask in crosser.masks for part in mask.parts}:
        return whole, len(crosser.masks) * whole // value.dtype.itemsize // _MASK_BITS
    return whole, crosser.held(scheme)


def _packed_by_another(crosser: Crosser, scheme: Scheme, rates: Rates) -> bool:
    """Inductor packs in a kernel that has the tensor at hand: its maker's, or another reader's.

    That goes along rows. Groups are packed in pieces, another order of loops: a kernel of its own,
    into which a GPU's activation of the same tensor goes (``storage/pieces.py``). A channel's
    largest value is found where a batch norm's sums are.
    """
    unit = scheme.spec.unit
    found = list(readers(crosser.saved))
    if unit is Unit.CHANNEL:
        return any(reader.target in REDUCTIONS for reader in found)
    if unit is Unit.GROUP:
        in_pieces = rates.asynchronous and not fuses(_maker(crosser.saved))
        return in_pieces and any(map(fuses, found))
    return fuses(_maker(crosser.saved)) or any(map(fuses, found))


def restored_by_readers(crosser: Crosser, scheme: Scheme, rates: Rates) -> bool:
    """Every reader is a kernel of Inductor's. A CPU's puts a group's pieces together on its own."""
    if scheme.spec.unit is Unit.GROUP and scheme.spec.bits != 8 and not rates.asynchronous:
        return False
    return all(map(fuses, readers(crosser.restored)))


def _maker(node: fx.Node) -> fx.Node:
    """What computes ``node``'s values."""
    node = strip(node, _SAME)
    return node.args[0] if node.target is operator.getitem else node  # type: ignore[return-value]


def readers(node: fx.Node) -> Iterator[fx.Node]:
    """What computes with ``node``'s values in its graph."""
    for user in node.users:
        if user.target in _SAME:
            yield from readers(user)
        elif user.op != "output":
            yield user


def fuses(node: fx.Node) -> bool:
    """Inductor writes the kernel itself, so that more can go into it."""
    return node.op == "call_function" and (is_pointwise(node) or node.target in _FUSED)
