"""Rates measured on this machine: the file, who uses it, and what the planner makes of it."""

import dataclasses
import json
import math
import types

import pytest
import torch
from torch import distributed, nn
from torch._dynamo.utils import counters
from typer.testing import CliRunner

from hot_compile import backend
from hot_compile.backend import hot
from hot_compile.cli import app
from hot_compile.inspect import rates_note
from hot_compile.passes.cost import devices, tuned
from hot_compile.passes.cost.devices import RATES, pricing
from hot_compile.testing import hot_step

CPU = torch.device("cpu")
OURS = dataclasses.replace(RATES["cpu"], integer=3e12, launch=1e-6)
"""Rates that no table has."""


def forget():
    """As another process, which has asked for nothing yet."""
    devices._kept.cache_clear()
    devices._of_job.cache_clear()


def invoke(*words):
    return CliRunner().invoke(app, ["tune", *words], env={"COLUMNS": "200"})


def change(path, **fields):
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_without_a_file_the_tables_rates_count(rates_folder):
    assert pricing(CPU) == devices.table_entry(CPU)


def test_a_file_counts_unless_the_table_is_asked_for(rates_folder):
    assert tuned.save(CPU, OURS).parent == rates_folder
    assert pricing(CPU) == OURS
    assert pricing(CPU, "table") == devices.table_entry(CPU)


def test_predictions_say_where_nothing_was_measured(rates_folder):
    assert "nothing was measured on this machine's cpu yet" in rates_note([CPU])
    tuned.save(CPU, OURS)
    assert not rates_note([CPU])


def damaged(path):
    return {
        "empty": lambda: path.write_text(""),
        "half": lambda: path.write_text(path.read_text()[:100]),
        "no JSON object": lambda: path.write_text("[1, 2]"),
        "binary": lambda: path.write_bytes(bytes(range(256))),
        "a folder": lambda: (path.unlink(), path.mkdir()),
        "another device": lambda: change(path, device="another"),
        "another torch": lambda: change(path, torch="1.0"),
        "other operators": lambda: change(path, operators="x"),
        "another format": lambda: change(path, format=0),
        "no rates": lambda: change(path, rates={}),
        "unknown rates": lambda: change(path, rates={**dataclasses.asdict(OURS), "int2": 1.0}),
        "a rate is missing": lambda: change(path, rates={"exact": dict(OURS.exact)}),
        "a dtype is missing": lambda: change(path, rates=rates(exact={"float32": 1e9})),
        "not a number": lambda: change(path, rates=rates(integer=math.nan)),
        "infinite": lambda: change(path, rates=rates(copy=math.inf)),
        "negative": lambda: change(path, rates=rates(transform=-1.0)),
        "zero": lambda: change(path, rates=rates(packing=0.0)),
        "true": lambda: change(path, rates=rates(launch=True)),
        "a text": lambda: change(path, rates=rates(int4="fast")),
        "no fact": lambda: change(path, rates=rates(one_read=3)),
    }


def rates(**fields):
    return dataclasses.asdict(dataclasses.replace(OURS, **fields))


@pytest.mark.parametrize("how", [*damaged(None)])
def test_what_cannot_be_used_costs_one_warning_and_no_error(how, rates_folder, caplog):
    damaged(tuned.save(CPU, OURS))[how]()
    for _ in range(3):
        assert pricing(CPU) == devices.table_entry(CPU)
    told = [r for r in caplog.records if "are not used" in r.message]
    assert len(told) == 1
    assert str(rates_folder) in told[0].message
    assert "hot-compile tune" in told[0].message


def test_every_rate_and_fact_comes_back(rates_folder):
    for entry in RATES.values():
        tuned.save(CPU, entry)
        assert tuned.load(CPU) == entry


def test_a_name_says_all_that_rates_depend_on(rates_folder, monkeypatch):
    names = {tuned.path_of(CPU).name}
    monkeypatch.setattr(torch, "get_num_threads", lambda: 17)
    names.add(tuned.path_of(CPU).name)
    assert any("17-threads" in name for name in names)
    monkeypatch.setattr(torch, "__version__", "9.9")
    names.add(tuned.path_of(CPU).name)
    monkeypatch.setattr(tuned, "runtime_version", lambda: "other")
    names.add(tuned.path_of(CPU).name)
    assert len(names) == 4


@pytest.fixture
def gpu(monkeypatch, rates_folder):
    """A GPU of which only the name, the capability and the clocks are asked."""
    capability = [(9, 0)]
    monkeypatch.setattr(devices, "_missing", lambda kind: None)
    monkeypatch.setattr(devices, "measure", lambda *_: pytest.fail("measured"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability[0])
    monkeypatch.setattr(devices.Chip, "of", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: f"GPU {rates_folder}")
    return capability


def test_nothing_is_measured_unasked(gpu, rates_folder):
    """What else runs on the machine at the first compile would be in the plan."""
    assert pricing(torch.device("cuda", 0)) == devices.cuda_rates((9, 0), tf32=False)
    assert pricing(CPU) == devices.table_entry(CPU)
    assert not rates_folder.exists()


H100 = {
    "memory_clock_rate": 2_619_000, "memory_bus_width": 5120, "clock_rate": 1_980_000,
    "multi_processor_count": 132,
}  # fmt: skip


@pytest.mark.parametrize(
    ("properties", "memory"), [(H100, 0.68), ({}, 1), (H100 | {"clock_rate": 0}, 1)]
)
def test_rates_are_scaled_to_a_devices_own_memory(properties, memory, gpu, monkeypatch):
    """What a driver does not say, or says is nothing, changes nothing."""
    monkeypatch.undo()
    monkeypatch.setattr(devices, "_missing", lambda kind: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    given = types.SimpleNamespace(**properties)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: given)
    rates, table = pricing(torch.device("cuda", 0), "table"), devices.RATES["sm90"]
    for name in ("copy", "packing", "transform"):
        assert getattr(rates, name) == pytest.approx(memory * getattr(table, name), rel=0.01)
    assert rates.exact == pytest.approx(table.exact)
    assert ("0.68 for memory" in rates.source) == (memory != 1)


def test_rates_say_where_they_come_from(gpu):
    device = torch.device("cuda", 0)
    assert pricing(device).source == "the table's of an NVIDIA H200"
    gpu[0] = (8, 9)
    assert "RTX 3090" in pricing(device).source
    assert "nearest to compute capability 8.9" in pricing(device).source
    assert pricing(device).override({"copy": 1e9}).source.endswith(", copy by option")
    tuned.save(device, OURS)
    forget()
    assert pricing(device).source == "measured by `hot-compile tune`"


def test_measured_rates_know_of_tf32(gpu, monkeypatch):
    both = dataclasses.replace(OURS, exact={**OURS.exact, "tfloat32": 7e12})
    tuned.save(torch.device("cuda", 0), both)
    monkeypatch.setattr(devices, "_tf32", lambda: True)
    assert pricing(torch.device("cuda", 0)).exact["float32"] == 7e12
    assert pricing(CPU).exact["float32"] != 7e12


@pytest.fixture
def job():
    """This process as one of two that train together; the store is the job's."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  (registers "fake")

    store = distributed.HashStore()
    distributed.init_process_group("fake", store=store, rank=0, world_size=2)
    yield store
    distributed.destroy_process_group()


def test_processes_of_a_job_agree(job, gpu):
    device = torch.device("cuda", 0)
    assert pricing(device) == devices.cuda_rates((9, 0), tf32=False)
    tuned.save(device, OURS)  # after the first process has asked: too late for all
    forget()
    assert pricing(device) == devices.cuda_rates((9, 0), tf32=False)


def test_a_job_takes_what_its_first_process_found(job, rates_folder):
    tuned.save(CPU, OURS)
    assert pricing(CPU) == OURS
    tuned.path_of(CPU).unlink()
    forget()  # a process on a host without the file
    assert pricing(CPU) == OURS


def test_a_job_heeds_what_is_said_first(job):
    assert tuned.first_said("layout", [2.0, 1.0]) == [2.0, 1.0]
    assert tuned.first_said("layout", [1.0, 2.0]) == [2.0, 1.0]
    assert tuned.first_said("unknown", None) is None
    assert tuned.first_said("unknown", [1.0, 2.0]) is None


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256))


class Mean(nn.Module):
    def forward(self, x):
        return x.mean()


def test_other_rates_make_another_key(rates_folder, monkeypatch):
    """Of the digest that stands for our passes in Inductor's cache."""
    seen, key = [], backend.code_key
    monkeypatch.setattr(backend, "code_key", lambda *args: seen.append(key(*args)) or "")
    options = [{}, {}, {"prices": "table"}, {}, {"prices": "table"}]
    kept = [OURS, OURS, OURS, dataclasses.replace(OURS, packing=1.0), RATES["sm90"]]
    for rates, option in zip(kept, options, strict=True):
        tuned.save(CPU, rates)
        forget()
        net = model().append(Mean())
        hot_step(net, torch.randn(8, 256), options=option)
    assert seen[0] == seen[1]
    assert seen[2] == seen[4], "what was measured is nothing to who does not ask for it"
    assert len(set(seen)) == 3


@pytest.mark.slow
def test_rates_are_part_of_the_cache_key(rates_folder, monkeypatch, tmp_path):
    """Graphs that other rates planned are never found again, those of the same rates are."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))

    def misses():
        torch._dynamo.reset()
        counters.clear()
        forget()
        torch.compile(model(), backend=hot)(torch.randn(64, 256)).sum().backward()
        return counters["aot_autograd"]["autograd_cache_miss"]

    tuned.save(CPU, RATES["cpu"])
    assert misses() == 1
    assert misses() == 0
    tuned.save(CPU, OURS)
    assert misses() == 1


class TestCommand:
    def test_measures_shows_and_keeps(self, rates_folder, monkeypatch):
        monkeypatch.setattr(devices, "measure", lambda *_: OURS)
        said = invoke("--device", "cpu")
        assert said.exit_code == 0, said.output
        assert "3 Top/s" in said.output
        assert tuned.load(CPU) == OURS
        shown = invoke("--show").output
        assert "3 Top/s" in shown
        assert str(rates_folder) in shown

    def test_shows_without_measuring(self, rates_folder, monkeypatch):
        monkeypatch.setattr(devices, "measure", lambda *_: pytest.fail("measured"))
        said = invoke("--show")
        assert said.exit_code == 0
        assert "never measured" in said.output

    def test_forgets(self, rates_folder):
        path, layout = tuned.save(CPU, OURS), tuned.path_of(CPU, "-images-0")
        layout.write_text("[2, 1]")
        assert invoke("--reset").output.count("removed") == 2
        assert not path.exists()
        assert not layout.exists()
        assert "nothing was kept" in invoke("--reset").output

    @pytest.mark.parametrize(
        ("words", "says"),
        [(["--device", "tpu"], "expected one that is here"), (["--show", "--reset"], "one of")],
    )
    def test_mistakes_are_explained(self, words, says, rates_folder):
        said = invoke(*words)
        assert said.exit_code == 2
        assert says in said.output

    def test_a_failure_keeps_nothing(self, rates_folder, monkeypatch):
        def fail(*_):
            raise RuntimeError("out of memory")

        monkeypatch.setattr(devices, "measure", fail)
        said = invoke("--device", "cpu")
        assert (said.exit_code, "out of memory" in said.output) == (1, True)
        assert not tuned.path_of(CPU).exists()
