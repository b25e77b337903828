"""Random numbers as compiled code draws them, drawn operator by operator.

Inductor draws one seed for every operator of a graph that draws, all of them with the first; what
follows are functions of a seed and of the places of elements. So the same numbers can be had again
in any order, by the same kernels, where operators are taken apart as Inductor does.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._inductor import config as inductor_config
from torch._inductor import inductor_prims
from torch._inductor.decomposition import select_decomp_table
from torch.utils._python_dispatch import TorchDispatchMode

from hot_compile.passes.base.graph import graphs_of

aten = torch.ops.aten

_SEEDS = 4096
"""So many are drawn at once; the first ones are the same, however many they are."""
_MODES = {aten.rand.default: "rand", aten.randn.default: "randn"}

Mark = tuple[dict[torch.device, Tensor], dict[torch.device, int]]
"""Seeds of each device, as far as they were drawn, and how many of them were used."""
_RANDOM = ("dropout", "rand", "rrelu", "fractional_max_pool", "gumbel_softmax")
"""What draws random numbers and is none of ATen's operators has one of these in its name."""


def draws(gm: fx.GraphModule) -> bool:
    """Some operator of the graph draws random numbers."""
    return any(draws_numbers(node) for graph in graphs_of(gm) for node in graph.nodes)


def drawn_alike(gm: fx.GraphModule) -> bool:
    """:class:`Draws` has all numbers that code of Inductor's draws in the graph.

    Regions of it that are recomputed would draw others, without being asked.
    """
    if inductor_config.fallback_random or getattr(inductor_config, "align_random_eager", False):
        return False
    inner = (graph for graph in graphs_of(gm) if graph is not gm.graph)
    return not any(draws_numbers(node) for graph in inner for node in graph.nodes)


def draws_numbers(node: fx.Node) -> bool:
    """A node of one of Dynamo's graphs draws random numbers."""
    if node.op not in ("call_function", "call_method"):
        return False
    name = str(getattr(node.target, "__name__", node.target))
    if "scaled_dot_product" in name:
        return bool(node.kwargs.get("dropout_p", node.args[4] if len(node.args) > 4 else 0.0))
    if name == "multi_head_attention_forward":
        given = node.kwargs | ({"dropout_p": node.args[10]} if len(node.args) > 10 else {})
        return bool(given.get("dropout_p", 0.0)) and bool(given.get("training", True))
    if name == "dropout":
        given = dict(zip(("input", "p", "training"), node.args, strict=False)) | node.kwargs
        return bool(given.get("training", True)) and bool(given.get("p", 0.5))
    return any(word in name for word in _RANDOM) or _draws_as_aten(name.partition(".")[0])


@functools.cache
def _draws_as_aten(name: str) -> bool:
    """ATen's operator of that name draws random numbers, as it says itself."""
    packet = getattr(aten, name, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):  # a name of any object's, `__eq__`
        return False
    overloads = (getattr(packet, o) for o in packet.overloads())
    return any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads)


class Draws:
    """What one forward of a graph draws, from the generators' state when it begins."""

    def __init__(self) -> None:
        self._seeds: dict[torch.device, Tensor] = {}
        self._used: dict[torch.device, int] = {}

    @property
    def mark(self) -> Mark:
        """How far it is."""
        return dict(self._seeds), dict(self._used)

    @contextlib.contextmanager
    def since(self, mark: Mark, before: Callable[..., None] = lambda *_: None) -> Iterator[None]:
        """Inside, operators draw what they drew after ``mark`` was taken.

        ``before`` is told of each of ATen's, with its operands.

        What draws from the generators themselves, as fused attentions do, finds them as they were
        then only if somebody sees to that.
        """
        self._seeds, self._used = dict(mark[0]), dict(mark[1])
        with enable_python_dispatcher(), _Drawing(self, before):
            yield

    def numbers(self, mode: str, size: list[int], device: torch.device) -> Tensor:
        """fp32 numbers of the next seed. Raises RuntimeError if there are no more."""
        used = self._used[device] = self._used.get(device, 0) + 1
        if device not in self._seeds:
            seeds = torch.empty(_SEEDS, dtype=torch.int64, device=device)
            limits = torch.iinfo(torch.int64)
            self._seeds[device] = seeds.random_(limits.min, limits.max)
        if used > _SEEDS:
            raise RuntimeError(f"a graph that draws more than {_SEEDS} times")
        seed = self._seeds[device][used - 1].clone()
        return _of_seed(mode)(seed, math.prod(size)).view(size)


class _Drawing(TorchDispatchMode):
    """Takes what draws apart as Inductor does; its numbers come from ``draws``."""

    def __init__(self, draws: Draws, before: Callable[..., None]) -> None:
        super().__init__()
        self._draws, self._before = draws, before
        self._apart: Mapping[Any, Callable[..., Any]] = select_decomp_table()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self._before(func, args, kwargs)
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if func in _MODES:
            device = torch.empty(0, device=kwargs.get("device")).device
            numbers = self._draws.numbers(_MODES[func], list(args[0]), device)
            return numbers.to(kwargs.get("dtype") or torch.get_default_dtype())
        if func is aten.native_dropout.default and args[2] and 0 < args[1] < 1:
            return self._dropout(*args[:2])
        with self:
            result = self._apart.get(func, _whole)(*args, **kwargs)
        return func(*args, **kwargs) if result is NotImplemented else result

    def _dropout(self, x: Tensor, p: float) -> tuple[Tensor, Tensor]:
        """In a kernel its numbers are not rounded to halves; on a CPU p is."""
        least = float(torch.tensor(p, dtype=x.dtype, device="cpu")) if x.device.type == "cpu" else p
        with self:
            mask = torch.rand_like(x, dtype=torch.float32) > least
        return mask * x * (1 / (1 - p)), mask


def _whole(*_: Any, **__: Any) -> Any:
    return NotImplemented


@functools.cache
def _of_seed(mode: str) -> Callable[[Tensor, int], Tensor]:
    """Inductor's own code for so many numbers of a seed."""

    def numbers(seed: Tensor, count: int) -> Tensor:
        return inductor_prims.random([count], seed, mode)

    return torch.compile(numbers, backend="inductor", dynamic=True, fullgraph=True)
