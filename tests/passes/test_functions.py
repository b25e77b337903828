"""Short forms of functions on a GPU: where they stand, and how far they are from the truth."""

import re

import absent_gpu
import pytest
import torch
from forked import in_a_process
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hot_compile.passes.base.emit import Emitter
from hot_compile.passes.base.graph import aten
from hot_compile.passes.exact import functions
from hot_compile.runtime.pointwise import FORMS, lowered

ERF, TANH, EXP, SIGMOID = (getattr(aten, n).default for n in ("erf", "tanh", "exp", "sigmoid"))


def graph_of(build, device="cuda", dtype=torch.bfloat16):
    """The graph whose output is ``build(emit, x in fp32)``, ``x`` given as ``dtype``."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    with FakeTensorMode():
        x.meta["val"] = torch.empty(64, device=device, dtype=dtype)
    end = graph.output(())
    emit = Emitter(graph, end, x)
    end.args = (build(emit, emit.cast(x, torch.float32)),)
    return graph


def gelu(emit, x):
    share = emit(aten.add.Tensor, emit(ERF, emit(aten.mul.Tensor, x, 0.5**0.5)), 1)
    return emit(aten.mul.Tensor, x, share)


def density(emit, x):
    return emit(EXP, emit(aten.mul.Tensor, emit(aten.mul.Tensor, x, x), -0.5))


def slope_of_tanh(emit, x):
    """As autograd writes it under autocast: the 16-bit tanh squared in fp32."""
    tanh = emit(TANH, emit.cast(x, torch.bfloat16))
    wide = emit.cast(tanh, torch.float32)
    return emit(aten.sub.Tensor, 1, emit(aten.mul.Tensor, wide, wide))


SHORT = {
    "gelu": gelu,
    "density": density,
    "slope": slope_of_tanh,
    "sigmoid": lambda emit, x: emit(SIGMOID, x),
}
LEFT = {
    "erf alone": lambda emit, x: emit(ERF, x),
    "tanh alone": lambda emit, x: emit(aten.mul.Tensor, emit(TANH, x), 2.0),
    "tanh cubed": lambda emit, x: emit(aten.pow.Tensor_Scalar, emit(TANH, x), 3),
    "erf and a little": lambda emit, x: emit(aten.add.Tensor, emit(ERF, x), 1e-3),
    "exp of anything": lambda emit, x: emit(EXP, x),
    "exp of a growing square": lambda emit, x: emit(EXP, emit(aten.mul.Tensor, x, x)),
    "behind a sum": lambda emit, x: emit(SIGMOID, emit(aten.sum.dim_IntList, x, [0], True)),
}


@pytest.mark.parametrize("name", SHORT)
def test_stand_where_sixteen_bits_go_in_and_the_error_is_seen_beside_one(name):
    graph = graph_of(SHORT[name])
    assert functions.shorten_functions(graph) == 1
    assert not any(node.target in (ERF, TANH, SIGMOID, EXP) for node in graph.nodes)
    graph.lint()


@pytest.mark.parametrize("name", LEFT)
def test_others_stay(name):
    assert functions.shorten_functions(graph_of(LEFT[name])) == 0


@pytest.mark.parametrize("facts", [{"device": "cpu"}, {"dtype": torch.float32}])
def test_cpus_and_fp32_keep_the_library(facts):
    assert functions.shorten_functions(graph_of(gelu, **facts)) == 0


@pytest.mark.parametrize(
    ("target", "bound", "relative"),
    [(ERF, 1e-6, False), (TANH, 1e-6, False), (EXP, 1e-6, False), (SIGMOID, 1e-5, True)],
)
def test_err_by_less_than_they_promise(target, bound, relative):
    x = torch.linspace(-60, 60, 200_001)
    if target is EXP:
        x = -(x**2)
    name, _ = functions._FORMS[target]

    def short(x):
        return torch.ops.hot.short_function(x, name)

    want = target(x.double())
    error = (short(x).double() - want).abs()
    assert (error / want if relative else error).max() < bound
    edges = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, 200.0, -200.0])
    torch.testing.assert_close(short(edges), target(edges), equal_nan=True, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", FORMS)
def test_inductor_writes_the_same(name):
    assert lowered()
    x = torch.linspace(-9, 0 if name == "exp" else 9, 1001)

    @torch.compile
    def compiled(x):
        return torch.ops.hot.short_function(x * 0.5, name) + 1

    want = torch.ops.hot.short_function(x * 0.5, name) + 1
    torch.testing.assert_close(compiled(x), want, rtol=0, atol=1e-6)


def test_is_defined_as_torch_wants_operators_to_be():
    torch.library.opcheck(torch.ops.hot.short_function.default, (torch.randn(3, 4), "erf"))


@pytest.mark.parametrize("deeper", [0, 1])
def test_a_deep_argument_is_read_once_a_level_and_only_so_deep(deeper):
    """Each level reads the one before twice: path by path there are millions of them."""

    def deep(emit, x):
        for _ in range(functions._DEEPEST - 1 + deeper):  # the cast is one of them
            x = emit(aten.mul.Tensor, x, x)
        return emit(SIGMOID, x)

    assert functions.shorten_functions(graph_of(deep)) == 1 - deeper


def inverted():
    """An inverted residual's way out and back: images that are restored for a SiLU's gradient."""
    model = nn.Sequential(
        nn.Conv2d(32, 96, 1), nn.BatchNorm2d(96), nn.SiLU(),
        nn.Conv2d(96, 96, 3, padding=1, groups=96), nn.BatchNorm2d(96), nn.SiLU(),
        nn.Conv2d(96, 32, 1), nn.BatchNorm2d(32),
    ).to(memory_format=torch.channels_last)  # fmt: skip
    pixels = torch.randn(16, 32, 28, 28)
    return model, lambda forward: forward(pixels).square().mean()


def wide_images(folder):
    """fp32 images that a step's backward, written for a GPU, has in memory.

    ``folder``: what Inductor writes is there.
    """
    codes = absent_gpu.codes_of(inverted, {"min_gain": 100, "memory": "all"}, folder)
    return re.findall(r"empty_strided_cuda\(\(16, \d+, 28, 28\).*float32\)", codes[-1])


@pytest.mark.slow
def test_restoring_is_no_reason_to_write_an_image_in_fp32(tmp_path):
    assert not in_a_process(wide_images, str(tmp_path))
