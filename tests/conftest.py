"""For all tests: plans are made by the table's rates, and pytest's log capture does not switch
torch's structured trace on.

What imports torch does so where it is used: with xdist, the process that deals tests out runs none.
"""

import functools
import gc
import importlib
import logging
import os
import sys
from pathlib import Path

import pytest
from quick import quick_compiling, strict_by_default

ROOT = Path(__file__).parents[1]

# Inductor need not compile programs to find out what this CPU can do; subprocesses inherit it
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What is imported stays: no garbage is looked for meanwhile."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish():
    """Torch's structured trace stays off, and what it imported is not looked through for garbage.

    Torch writes every graph of every stage as text as soon as that logger has a handler, and pytest
    >= 9.2 gives its own to each logger that does not propagate. Tracing makes so many small objects
    that by default a quarter of the tests' time is garbage collection.
    """
    gc.collect()
    gc.freeze()
    frozen = gc.get_freeze_count()  # counted one by one, which every compile asks for
    gc.get_freeze_count = lambda: frozen
    gc.set_threshold(20_000, 20, 20)
    trace = logging.getLogger("torch.__trace")  # made by importing torch, which tests did
    trace.handlers.clear()
    trace.propagate = True


def pytest_sessionfinish():
    """Pytest looks for garbage five times at its end, which takes seconds each."""
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _compiling_is_quick_and_strict():
    with quick_compiling(), strict_by_default():
        yield


@pytest.fixture
def rates_folder(monkeypatch, tmp_path):
    """An empty folder for measured rates, which count in the test that asks for it."""
    from hot_compile.passes.cost import tuned

    folder = tmp_path / "rates"
    monkeypatch.setattr(tuned, "rates_folder", lambda: folder)
    return folder


@pytest.fixture
def program(monkeypatch):
    """Import a benchmark as if started with ``python benchmarks/<name>.py``."""
    import torch

    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    torch._dynamo.reset()
    yield importlib.import_module
    for folder in ("benchmarks", "examples"):
        for path in (ROOT / folder).glob("*.py"):
            sys.modules.pop(path.stem, None)


@pytest.fixture(autouse=True)
def _rates_of_the_table(request, monkeypatch):
    """What was measured on the machine that runs the tests changes no plan in them."""
    from hot_compile.passes.cost import devices

    if "rates_folder" not in request.fixturenames:
        monkeypatch.setattr(devices, "_measured", lambda device: None)


@pytest.fixture
def fresh_dynamo():
    """Nothing is compiled yet, and what is random is so from the same seed."""
    import torch

    torch._dynamo.reset()
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def calibrated_node_by_node():
    """``calibrate`` runs its graphs node by node: compiling them takes ten times as long."""
    from hot_compile import calibration
    from hot_compile.backend import hot
    from hot_compile.inspect import run_uncompiled

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "hot", functools.partial(hot, inner_compile=run_uncompiled))
        yield


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Each device whose operators are there, by name."""
    import torch

    from hot_compile.runtime.native import build

    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    build.load(request.param)
    return request.param
