"""For all tests: plans are made by the table's rates, and pytest's log capture does not switch
torch's structured trace on.

Torch writes every graph of every stage as text as soon as that logger has a handler, and pytest >=
9.2 gives its own to each logger that does not propagate.
"""

import functools
import logging

import pytest
import torch  # importing it sets its loggers up

from hot_compile import calibration
from hot_compile.backend import hot
from hot_compile.inspect import run_uncompiled
from hot_compile.passes.cost import devices, tuned
from hot_compile.runtime.native import build

trace = logging.getLogger(f"{torch.__name__}.__trace")
trace.handlers.clear()
trace.propagate = True


@pytest.fixture
def rates_folder(monkeypatch, tmp_path):
    """An empty folder for measured rates, which count in the test that asks for it."""
    folder = tmp_path / "rates"
    monkeypatch.setattr(tuned, "rates_folder", lambda: folder)
    return folder


@pytest.fixture(autouse=True)
def _rates_of_the_table(request, monkeypatch):
    """What was measured on the machine that runs the tests changes no plan in them."""
    if "rates_folder" not in request.fixturenames:
        monkeypatch.setattr(devices, "_measured", lambda device: None)


@pytest.fixture
def fresh_dynamo():
    """Nothing is compiled yet, and what is random is so from the same seed."""
    torch._dynamo.reset()
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def calibrated_node_by_node():
    """``calibrate`` runs its graphs node by node: compiling them takes ten times as long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "hot", functools.partial(hot, inner_compile=run_uncompiled))
        yield


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Each device whose operators are there, by name."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    build.load(request.param)
    return request.param
