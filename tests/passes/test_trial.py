"""What a chain computes, as a value: the same functions are tried once, different ones apart."""

import pytest
import torch
from samples_storage import crossing
from torch import fx, nn

from hot_compile.passes.base.graph import aten
from hot_compile.passes.base.schemes import Scheme
from hot_compile.passes.storage import trial


def function(target, *arguments, dtype=torch.float32, masks=False):
    """``target`` of a saved tensor, as what a backward recomputes."""
    graph = fx.Graph()
    root = graph.placeholder("x")
    root.meta["val"] = torch.empty(4, 256, dtype=dtype)
    made = graph.call_function(target, (root, *arguments))
    made.meta["val"] = target(root.meta["val"], *arguments)
    chain, ends = [root, made], [(made, False)]
    return trial.function_of(root, chain, {made} if masks else set(), ends)


def blocks(depth):
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(depth)))
    return lambda x: layers(x).square().mean()


def test_more_blocks_are_no_more_trials():
    trial.problem.cache_clear()
    misses = []
    for depth in (3, 8):
        crossing(blocks(depth), torch.randn(64, 64))
        misses.append(trial.problem.cache_info().misses)
    assert misses[0] == misses[1] > 0
    assert trial.problem.cache_info().hits > 0


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((aten.mul.Tensor, 1), (aten.mul.Tensor, 1.0)),
        ((aten.mul.Tensor, 0.0), (aten.mul.Tensor, -0.0)),
        ((aten.pow.Tensor_Scalar, 2), (aten.pow.Tensor_Scalar, 3)),
        ((aten.clamp.default, None, 1.0), (aten.clamp.default, 1.0, None)),
        ((aten.sin.default,), (aten.cos.default,)),
    ],
)
def test_functions_that_differ_are_told_apart(one, other):
    assert function(*one) == function(*one)
    assert function(*one) != function(*other)


def test_dtypes_and_masks_are_told_apart():
    plain = function(aten.tanh.default)
    assert plain != function(aten.tanh.default, dtype=torch.bfloat16)
    assert function(aten.gt.Scalar, 0) != function(aten.gt.Scalar, 0, masks=True)


def test_sizes_are_told_apart():
    graph = fx.Graph()
    size, x = graph.placeholder("s"), graph.placeholder("x")
    x.meta["val"] = torch.empty(4, 256)
    scaled = graph.call_function(aten.mul.Scalar, (x, size))
    scaled.meta["val"] = x.meta["val"]
    found = set()
    for size.meta["val"] in (3, 7):
        found.add(trial.function_of(x, [x, scaled], set(), [(scaled, False)]))
    assert len(found) == 2


def test_what_is_found_is_what_samples_say():
    assert trial.problem(function(aten.tanh.default), Scheme.GROUPS8) == ""
    assert "steep or periodic" in trial.problem(function(aten.sin.default), Scheme.GROUPS8)
