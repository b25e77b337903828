"""Timing a device: what the jobs' times make of rates, and that nothing around disturbs it."""

import dataclasses
import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hot_compile.passes.cost import devices, timing, tuned
from hot_compile.passes.cost.devices import RATES
from hot_compile.runtime.native.build import load

CPU = torch.device("cpu")


def times(jobs, rates, device):
    """What each job would take where ``rates`` are what the device sustains."""
    call = rates.start if rates.asynchronous else rates.launch
    element = (8 * rates.int32_result + timing._wide(device).itemsize) / rates.transform

    def of(job):
        name, _, dtype = job.rate.rpartition(" ")
        table = rates.convolution if name else rates.exact
        rate = table.get(dtype) or getattr(rates, job.rate)
        return job.amount / rate + job.results * element + job.calls * call

    return list(map(of, jobs))


@pytest.mark.parametrize("kind", ["cpu", "cpu-vnni", "sm80", "sm86", "sm90"])
def test_rates_are_what_makes_the_cost_models_predictions_right(kind):
    """Times as the model predicts them give back the rates that it predicted them by."""
    entry = RATES[kind]
    device = CPU if kind.startswith("cpu") else torch.device("cuda", 0)
    scale = {"integer": 0.7, "int4": 0.7, "transform": 1.3, "copy": 2.0, "packing": 0.5}
    scale["host_copy"] = 0.8
    true = dataclasses.replace(
        entry,
        exact={name: rate * 1.5 for name, rate in entry.exact.items()},
        **{name: getattr(entry, name) * by for name, by in scale.items()},
    )
    jobs = timing._jobs(device, entry)  # makes no operands
    found = timing._rates(jobs, times(jobs, true, device), entry, device)
    for name in scale:
        assert getattr(found, name) == pytest.approx(getattr(true, name)), name
    assert found.exact == pytest.approx(true.exact)
    assert found.convolution == pytest.approx(true.convolution)
    assert found.unfold / entry.unfold == pytest.approx(1.3)
    for fact in ("asynchronous", "int32_result", "one_read"):
        assert getattr(found, fact) == getattr(entry, fact)


@pytest.mark.parametrize(("faster", "packed"), [(2.0, True), (1.05, False), (0.5, False)])
def test_int4_products_are_wanted_only_where_they_are_much_faster(faster, packed):
    """The planner packs operands wherever INT4's rate is above INT8's: noise must not decide it."""
    entry, device = RATES["sm80"], torch.device("cuda", 0)
    true = dataclasses.replace(entry, int4=entry.integer * faster)
    jobs = timing._jobs(device, entry)
    found = timing._rates(jobs, times(jobs, true, device), entry, device)
    assert (found.int4 > found.integer) is packed


def test_a_busy_moment_spoils_no_rate(monkeypatch):
    """Of all rounds the best counts, and a job that takes long gets fewer of them."""
    jobs = [timing.Job("copy", 1.0, lambda: None), timing.Job("packing", 1.0, lambda: None)]
    spent = iter([9.0, 1.0, 0.1, 9.0, 9.0, 1.0, 0.2, 2.0])
    monkeypatch.setattr(timing, "_round", lambda call, device: next(spent))
    assert timing._best(jobs, CPU) == [0.1, 1.0]
    monkeypatch.setattr(timing, "_LIMIT", 0.0)
    monkeypatch.setattr(timing, "_round", lambda call, device: 5.0)
    assert timing._best(jobs, CPU) == [5.0, 5.0]


@pytest.fixture
def small(monkeypatch):
    """Sizes at which a CPU is timed in well under a second."""
    monkeypatch.setitem(timing._PRODUCTS, "cpu", ((64, 64, 64),))
    monkeypatch.setitem(timing._TENSORS, "cpu", ((128, 64),))
    monkeypatch.setitem(timing._COPIED, "cpu", 2**16)
    monkeypatch.setattr(timing, "_IMAGE", (1, 64, 4, 4))
    load("cpu")


def numbers(rates):
    fields = (getattr(rates, field.name) for field in dataclasses.fields(rates))
    for value in (value for value in fields if not isinstance(value, str)):
        yield from value.values() if isinstance(value, dict) else [value]


def test_a_cpu_is_timed(small):
    entry = devices.table_entry(CPU)
    found = timing.measure(CPU, entry)
    assert all(math.isfinite(n) and n >= 0 for n in numbers(found))
    assert found.exact.keys() == entry.exact.keys()
    assert found.launch > 0
    assert found.start == 0


def test_nothing_around_reaches_the_operators_and_nothing_is_left_behind(small):
    """It may run inside a compilation: fake tensors, autocast, the user's random state."""
    state, default = torch.get_rng_state(), torch.get_default_dtype()
    seen = []
    mm = timing.aten.mm.default

    class Seen:
        default = staticmethod(lambda a, b: seen.append((type(a), a.dtype)) or mm(a, b))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "aten", type("aten", (), {
            "mm": Seen, "convolution_backward": timing.aten.convolution_backward
        }))  # fmt: skip
        with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16):
            timing.measure(CPU, devices.table_entry(CPU))
            assert torch.is_autocast_enabled("cpu")
    assert {kind for kind, _ in seen} == {torch.Tensor}
    assert {dtype for _, dtype in seen} == {torch.float32, torch.bfloat16, torch.float16}
    assert torch.equal(state, torch.get_rng_state())
    assert torch.get_default_dtype() is default


@pytest.mark.gpu
def test_a_gpu_is_timed_in_seconds_and_plausibly(rates_folder):
    """Rates of this GPU are within a factor of 10 of the table's for its kind."""
    device = torch.device("cuda", 0)
    entry = devices.table_entry(device)
    precision = torch.backends.cuda.matmul.fp32_precision
    found = devices.tune(device)
    assert tuned.load(device) is not None
    assert torch.backends.cuda.matmul.fp32_precision == precision
    assert all(math.isfinite(n) and n >= 0 for n in numbers(found))
    for name in ("integer", "int4", "transform", "copy", "packing", "launch", "start", "host_copy"):
        assert 0.1 < getattr(found, name) / getattr(entry, name) < 10, name
    for dtype in ("bfloat16", "float16", "tfloat32"):
        assert 0.1 < found.exact[dtype] / entry.exact[dtype] < 10, dtype
    assert found.exact["tfloat32"] >= 0.9 * found.exact["float32"]
