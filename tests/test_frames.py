"""Room behind the frames of long generated functions (hot_compile/frames.py)."""

import resource
import threading
from types import ModuleType

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.codecache import PyCodeCache
from torch._inductor.utils import fresh_cache

from hot_compile import frames
from hot_compile.backend import hot
from hot_compile.generated import lightened
from hot_compile.testing import step

CALLS = 1000
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def generated(locals_):
    """A module as Inductor makes it: its ``call`` has so many locals, and makes CALLS calls."""
    module = ModuleType("generated")
    lines = [f"v{i} = None" for i in range(locals_)] + [f"for _ in range({CALLS}):", "    f(0)"]
    text = "\n".join(["class Runner:", " def call(self, f):", *(f"  {line}" for line in lines)])
    exec(text + "\ncall = Runner().call", vars(module))
    return module


def faults(module):
    """Page faults while a thread of its own runs ``call``."""
    thread = threading.Thread(target=module.call, args=(lambda x: x,))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    thread.start()
    thread.join()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.fixture
def loaded(monkeypatch):
    """What Inductor has loaded, from now on; none of it is its own."""
    modules = []
    monkeypatch.setattr(PyCodeCache, "modules", modules)
    return modules


def test_no_function_meets_the_end_of_its_pages(loaded):
    with lightened():
        loaded += [generated(count) for count in range(1880, 2050, 8)]
    assert max(map(faults, loaded)) < CALLS / 2


def test_a_function_that_meets_it_pays_for_each_call():
    """Nothing in between is measured: newer Pythons keep a page, and none of these faults."""
    worst = max(faults(generated(count)) for count in range(1880, 2050, 8))
    if worst < CALLS / 2:
        pytest.skip("this Python keeps pages: python/cpython#142183")
    assert worst > CALLS * 0.9


def test_a_function_computes_what_it_did(loaded):
    lines = "".join(f" v{i} = x + {i}\n" for i in range(600))
    module = ModuleType("generated")
    exec(f"def call(x):\n{lines} return v599", vars(module))
    small = module.call.__code__.co_stacksize
    with lightened():
        loaded.append(module)
    assert module.call.__code__.co_stacksize > small
    assert module.call(1) == 600


def test_short_functions_and_others_modules_stay_as_they_are(loaded):
    stock, short = generated(1000), generated(10)
    stock.borrowed = generated(1000).call  # another module's
    loaded.append(stock)
    before = stock.call.__code__, short.call.__code__
    with lightened():
        loaded.append(short)
    assert (stock.call.__code__, short.call.__code__) == before
    with lightened():
        loaded.append(stock)
    assert stock.call.__code__ is not before[0]
    assert stock.borrowed.__code__.co_stacksize < frames._ROOM


def test_it_is_given_once(loaded):
    module = generated(1000)
    with lightened(), lightened():
        loaded.append(module)
    assert frames._ROOM < module.call.__code__.co_stacksize < 2 * frames._ROOM


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))


def has_room(modules):
    calls = [m.call for m in modules if hasattr(m, "call")]
    return len(calls) > 1 and all(c.__code__.co_stacksize > frames._ROOM for c in calls)


@pytest.mark.parametrize("dynamic", [False, True])
def test_what_hot_compiles_has_it(monkeypatch, dynamic):
    """Its backward too, which of dynamic shapes is compiled in the first backward."""
    monkeypatch.setattr(frames, "_LONG", 8)
    before = len(PyCodeCache.modules)
    model = mlp()
    step(lambda x: model(x).sum(), torch.randn(32, 64), backend=hot, dynamic=dynamic)
    assert has_room(PyCodeCache.modules[before:])


def test_what_comes_from_torchs_caches_has_it(monkeypatch):
    monkeypatch.setattr(frames, "_LONG", 8)
    model, x = mlp(), torch.randn(32, 64)

    def loss(x):
        return model(x).sum()

    with fresh_cache():
        step(loss, x, backend=hot)
        PyCodeCache.cache_clear()
        counters.clear()
        step(loss, x, backend=hot)
        assert counters["aot_autograd"]["autograd_cache_hit"] == 1
        assert has_room(PyCodeCache.modules)
