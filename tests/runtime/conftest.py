"""Providers of the operators, one at a time: the CPU's ISAs and, with a device, CUDA's."""

from __future__ import annotations

import ctypes
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hot_compile.runtime import ops, reference
from hot_compile.runtime.native import build

CPU = ("scalar", "avx512")
CUDA = tuple(pytest.param(arch, marks=pytest.mark.gpu) for arch in ("sm80", "sm90"))
on_cuda = pytest.mark.parametrize("provider", CUDA, indirect=True)
"""For operators that have kernels on CUDA only."""
on_cpu = pytest.mark.parametrize("provider", CPU, indirect=True)


class Provider:
    """``provider(name, *args)``: that operator of tensors on the CPU; results come back there.

    ``fused``: float epilogues may use fused multiply-adds, so round differently.
    """

    def __init__(self, space: str, device: str) -> None:
        self.space, self.device, self.fused = getattr(torch.ops, space), device, device == "cuda"

    def __call__(self, name: str, *args: Any) -> Any:
        got = getattr(self.space, name)(*(self.move(a, self.device) for a in args))
        return self.move(got, "cpu")

    def move(self, value: Any, device: str) -> Any:
        """``value`` on the device; tensors that lie elsewhere are copied."""
        if isinstance(value, (tuple, list)) and value and isinstance(value[0], Tensor):
            return tuple(self.move(v, device) for v in value)
        return value.to(device) if isinstance(value, Tensor) else value


@pytest.fixture(scope="session", autouse=True)
def isa_libraries() -> list[torch.library.Library]:
    """``hot_<isa>``: every operator of ``hot`` by one ISA's kernels."""
    build.load("cpu")
    libraries = [torch.library.Library(f"hot_{isa}", "DEF") for isa in CPU]
    for library in libraries:
        for name, schema in ops.SCHEMAS.items():
            library.define(name + schema)
    return libraries


M_PERTURB, POISON = -6, 0x5A


@pytest.fixture(scope="module", autouse=True)
def poisoned_memory() -> Iterator[None]:
    """A byte that no kernel writes shows: glibc fills fresh memory, as by MALLOC_PERTURB_."""
    libc = ctypes.CDLL(None)
    mallopt = getattr(libc, "mallopt", None) or (lambda *_: None)
    mallopt(M_PERTURB, POISON ^ 0xFF)
    yield
    mallopt(M_PERTURB, 0)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def _cpu_provider(isa: str) -> Provider:
    provider = Provider(f"hot_{isa}", "cpu")
    try:
        provider("quantize_rows", torch.ones(1, 1), 8, True, False)
    except RuntimeError as error:
        if "this machine runs" not in str(error):
            raise
        pytest.skip(f"this machine or build has no {isa}")
    return provider


@pytest.fixture(params=[*CPU, *CUDA])
def provider(request, monkeypatch) -> Iterator[Provider]:
    """Each of them; on CUDA all allocations start as NaN or the largest integer."""
    if request.param in CPU:
        yield _cpu_provider(request.param)
        return
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if request.param == "sm90" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a device of compute capability 9.0")
    build.load("cuda")
    monkeypatch.setenv("HOT_CUDA_ARCH", request.param)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield Provider("hot", "cuda")
    torch.use_deterministic_algorithms(False)


def _key(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return tuple(value) if isinstance(value, list) else value
    raw = value.contiguous().flatten().view(torch.uint8).numpy()
    return tuple(value.shape), value.dtype, hashlib.sha1(raw).digest()


@pytest.fixture(scope="session")
def definition() -> Callable[..., Any]:
    """``definition(name, *args)`` by the reference, remembered for the next provider."""
    known: OrderedDict[tuple[Any, ...], Any] = OrderedDict()

    def compute(name: str, *args: Any) -> Any:
        key = (name, *map(_key, args))
        if key not in known:
            known[key] = getattr(reference, name)(*args)
        known.move_to_end(key)
        if len(known) > 2000:
            known.popitem(last=False)
        return known[key]

    return compute


@pytest.fixture(scope="session")
def assert_same() -> Callable[..., None]:
    """Asserts that results are equal bit for bit (any NaN equals any NaN) and contiguous."""

    def check(got, want) -> None:
        if isinstance(want, Tensor):
            got, want = (got,), (want,)
        assert len(got) == len(want)
        for index, (g, w) in enumerate(zip(got, want, strict=True)):
            assert (g.shape, g.dtype) == (w.shape, w.dtype), f"output {index}"
            assert g.is_contiguous(), f"output {index}"
            same = (g == w) | ((g != g) & (w != w))
            if not bool(same.all()):
                at = tuple((~same).nonzero()[0].tolist())
                pytest.fail(
                    f"output {index}: {int((~same).sum())} of {same.numel()} differ: "
                    f"at {at} got {g[at].item()}, expected {w[at].item()}"
                )

    return check


@pytest.fixture
def check(provider, definition, assert_same) -> Callable[..., Any]:
    """``check(name, *args)``: the provider's results equal the definition's, which are returned."""

    def run(name: str, *args: Any) -> Any:
        want = definition(name, *args)
        assert_same(provider(name, *args), want)
        return want

    return run
