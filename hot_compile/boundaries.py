"""Checkpoints around what is compiled: what ``torch.utils.checkpoint`` keeps, stored rounded.

In a compiled graph that is one more tensor that crosses (``passes/storage/readers.py``). Where each
block is compiled by itself, as under Transformers' ``gradient_checkpointing_enable``, PyTorch keeps
the blocks' inputs, and only who asks for it has them rounded: nobody looked into the blocks.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.utils import checkpoint as torchs
from torch.utils._pytree import tree_leaves

from .errors import OptionError
from .passes.base.emit import Emitter
from .passes.base.operators import FLOATS
from .passes.base.schemes import Scheme
from .passes.storage.pack import pack, unpack
from .runtime.host_copies import LANES

log = logging.getLogger("hot_compile")

_GROUP = 128
_SMALLEST = 65536
"""Bytes below which a boundary is not worth two kernels: ``memory_min_bytes``."""
_SCHEMES = {6: Scheme.GROUPS6, 8: Scheme.GROUPS8, 12: Scheme.GROUPS12}
_BOUNDARIES = "_hot_boundaries"
"""Attribute of a region's results: what is kept in host memory of its arguments."""
_HOLDERS = ("_gradient_checkpointing_func", "checkpoint_fn")
"""Where Transformers' and torch's own wrappers (torchtitan's) keep the function they call."""


def checkpoint(
    function: Callable[..., Any], *args: Any, bits: int = 6, host: bool = False, **keywords: Any
) -> Any:
    """``torch.utils.checkpoint.checkpoint``, but what it keeps of ``args`` is stored rounded.

    The forward is exact. In the backward the region is computed again from what was stored, so its
    gradients are those of a point next to the exact one. In a graph that is compiled as a whole
    this is ``torch.utils.checkpoint``'s, and the backend decides.

    Args:
        function, args, keywords: as for ``torch.utils.checkpoint.checkpoint``.
        bits: 6, 8 or 12 of each number, in groups of 128; at least 8 of what an embedding made,
            which the first block's gradients want. Only floating-point arguments that want a
            gradient, are contiguous, have a multiple of 128 elements and at least 64 KiB are
            stored so; all else is kept as it is.
        host: keep them in pinned host memory, copied while the forward goes on, and back while the
            backward is at the region that got this one's result.

    Raises:
        OptionError: other bits.
    """
    if bits not in _SCHEMES:
        raise OptionError(f"got bits={bits!r}; expected one of {sorted(_SCHEMES)}")
    if torch.compiler.is_compiling():
        return torchs.checkpoint(function, *args, **keywords)
    mine = {_place(a): _bits(a, bits) for a in args if isinstance(a, Tensor) and _fits(a)}
    before = next((getattr(a, _BOUNDARIES) for a in args if hasattr(a, _BOUNDARIES)), ())
    own: list[_Packed] = []

    def keep(saved: Tensor) -> Tensor | _Packed:
        wanted = mine.get(_place(saved))
        if wanted is None:
            return saved
        own.append(_Packed.of(saved, wanted, host, before))
        return own[-1]

    with saved_tensors_hooks(keep, _restored):  # the region's own hooks, or none, stand inside
        result = torchs.checkpoint(function, *args, **keywords)
    for made in tree_leaves(result) if host else ():
        if isinstance(made, Tensor):
            setattr(made, _BOUNDARIES, own)
    return result


def compress_boundaries(model: nn.Module, bits: int = 6, host: bool = False) -> int:
    """Have what ``model``'s checkpointed blocks keep stored rounded, as :func:`checkpoint` does.

    For models whose library calls ``torch.utils.checkpoint``: Transformers' behind
    ``model.gradient_checkpointing_enable()``, and blocks in torch's ``checkpoint_wrapper``.
    Returns how many there are.

    Raises:
        OptionError: nothing in it is checkpointed, or other bits.
    """
    changed = 0
    for module in model.modules():
        for name in _HOLDERS:
            used = module.__dict__.get(name)
            inner = used.func if isinstance(used, functools.partial) else used
            if inner in (torchs.checkpoint, checkpoint):
                given = used.keywords if isinstance(used, functools.partial) else {}
                more = {**given, "bits": bits, "host": host}
                setattr(module, name, functools.partial(checkpoint, **more))
                changed += 1
    if not changed:
        raise OptionError(
            f"got a {type(model).__name__} in which nothing is checkpointed by a function that can "
            "be replaced; call model.gradient_checkpointing_enable() first, or call "
            "hot_compile.checkpoint in the place of torch.utils.checkpoint.checkpoint"
        )
    return changed


def _place(tensor: Tensor) -> tuple[int, torch.Size]:
    return tensor.data_ptr(), tensor.shape


def _bits(tensor: Tensor, bits: int) -> int:
    """No fewer than 8 for what an embedding made; a frozen one leaves no name."""
    maker = "Embedding" if tensor.grad_fn is None else tensor.grad_fn.name()
    return max(bits, 8) if "Embedding" in maker else bits


def _fits(tensor: Tensor) -> bool:
    """It is worth it, and numbers side by side share a scale."""
    if not tensor.requires_grad or tensor.dtype not in FLOATS or type(tensor) is not Tensor:
        return False
    large = tensor.numel() * tensor.element_size() >= _SMALLEST
    return large and tensor.is_contiguous() and tensor.numel() % _GROUP == 0


@dataclasses.dataclass(eq=False)
class _Packed:
    """A boundary as it is kept."""

    parts: tuple[Tensor, ...]
    bits: int
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    lane: int | None = None
    """Of the copies to the host; None: ``parts`` lie where they were made."""
    before: Sequence[_Packed] = ()
    """What the backward wants next."""
    coming: Tensor | None = None
    """Of copies back that are under way."""

    @classmethod
    def of(cls, saved: Tensor, bits: int, host: bool, before: Sequence[_Packed] = ()) -> _Packed:
        """``saved`` as codes and scales."""
        lane = None
        write, _ = _coder(_SCHEMES[bits], saved.dtype, saved.device.type)
        with torch.no_grad():
            parts = tuple(write(_rows(saved.detach().view(-1, _GROUP))))
            if host:
                lane = ((before[0].lane or 0) + 1) % LANES if before else 0
                parts = tuple(torch.ops.hot.to_host(list(parts), lane))
        return cls(parts, bits, saved.shape, saved.dtype, saved.device, lane, before)

    def start(self) -> None:
        """Start the copies back, if it lies in host memory and none are under way."""
        if self.lane is not None and self.coming is None:
            self.coming = torch.ops.hot.fetch(list(self.parts), self.device, [])

    def restored(self) -> Tensor:
        """The boundary, rounded, on its device."""
        parts = self.parts
        with torch.no_grad():
            self.start()
            if self.coming is not None:
                arrived = torch.ops.hot.arrive(self.coming, list(parts), self.device, [])
                parts, self.coming = tuple(arrived), None
                for boundary in self.before:
                    boundary.start()
            _, read = _coder(_SCHEMES[self.bits], self.dtype, self.device.type)
            (value,) = read(*map(_rows, parts))
        return value.view(self.shape)


def _restored(kept: Tensor | _Packed) -> Tensor:
    return kept.restored() if isinstance(kept, _Packed) else kept


def _rows(part: Tensor) -> Tensor:
    """``part``, whose first dimension is compiled for every length."""
    torch._dynamo.maybe_mark_dynamic(part, 0)
    return part


def _compiled(graph: fx.GraphModule) -> Callable[..., Sequence[Tensor]]:
    made: Callable[..., Sequence[Tensor]] = torch.compile(graph)
    return made


@functools.cache
def _coder(
    scheme: Scheme, dtype: torch.dtype, device: str
) -> tuple[Callable[..., Sequence[Tensor]], Callable[..., Sequence[Tensor]]]:
    """(what packs rows of 128 numbers, what restores them), each one kernel for any count."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    sizes: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    rows = torch.empty(6, _GROUP, dtype=dtype, device=device)
    like = mode.from_tensor(rows, symbolic_context=sizes)
    writing, reading = fx.Graph(), fx.Graph()
    emit, x = _begun(writing, [("x", like)])
    parts = pack(emit, x[0], scheme)
    writing.output_node().args = (parts,)
    emit, given = _begun(reading, [(part.name, part.meta["val"]) for part in parts])
    reading.output_node().args = ((unpack(emit, tuple(given), like, scheme),),)
    made = [_compiled(fx.GraphModule({}, graph)) for graph in (writing, reading)]
    return made[0], made[1]


def _begun(graph: fx.Graph, inputs: Sequence[tuple[str, Tensor]]) -> tuple[Emitter, list[fx.Node]]:
    """An emitter at the end of ``graph``, and its ``inputs`` by name and fake value."""
    nodes = [graph.placeholder(name) for name, _ in inputs]
    for node, (_, value) in zip(nodes, inputs, strict=True):
        node.meta["val"] = value
    return Emitter(graph, graph.output(()), nodes[0]), nodes
