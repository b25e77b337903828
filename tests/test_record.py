"""What was done to a graph, kept beside the caches that may hold its code."""

import dataclasses

import pytest
import torch
from torch import nn

import hot_compile
from hot_compile import record
from hot_compile.passes.plan import Plan
from hot_compile.record import Dump, GraphReport, Held

REPORT = GraphReport(Plan("hot", ()), ())


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "cache_dir", lambda: str(tmp_path))
    return tmp_path / "hot_compile"


def held(key, told):
    return Held(Dump(), told.append, [], key)


def test_of_code_from_a_cache_is_told_what_was_kept(folder):
    told = []
    first = held("k" * 64, told)
    first.finished(REPORT.plan, (), None)
    first.tell()
    held("k" * 64, told).tell()
    held("another", told).tell()
    held(None, told).tell()
    assert told == [REPORT, REPORT]
    assert [report.cached for report in told] == [False, True]


def test_a_graphs_stages_are_not_kept(folder):
    staged = dataclasses.replace(REPORT, stages={"traced": object()})
    staged.save("k" * 64)
    assert not GraphReport.load("k" * 64).stages


@pytest.mark.parametrize("data", [b"", b"{}", b"\x80\x04N.", b"cno_such\nthing\n."])
def test_what_cannot_be_read_is_nothing(folder, data):
    REPORT.save("k" * 64)
    (file,) = folder.rglob("*.pickle")
    file.write_bytes(data)
    assert GraphReport.load("k" * 64) is None


def test_where_nothing_can_be_kept_nothing_is(folder):
    dataclasses.replace(REPORT, crossing=(lambda: 1,)).save("k" * 64)
    assert not folder.exists()
    folder.touch()  # no folder can be made there
    REPORT.save("k" * 64)
    assert GraphReport.load("k" * 64) is None


def test_a_certificate_of_code_from_a_cache_counts_layers(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    found = torch._dynamo.utils.counters["aot_autograd"]
    for hits in (0, 1):
        torch._dynamo.reset()
        found.clear()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
        options = {"accept": "auto", "min_gain": 0}
        step = torch.compile(model, backend="hot", options=options)
        step(torch.randn(128, 64)).square().mean().backward()
        assert found["autograd_cache_hit"] == hits
        certificate = hot_compile.certificate(step)
        assert (certificate.on_integers, certificate.layers) == (1, 2)
