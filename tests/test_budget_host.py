"""``peak_budget="16GiB"``, its last rung: what waits for the backward in pinned host memory."""

import copy
import dataclasses
import functools
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import NamedTuple

import pytest
import torch
from samples_budget import Block, Broken
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from hot_compile import budget
from hot_compile.accounting import Measured, MemoryReport
from hot_compile.backend import hot
from hot_compile.budget import Ledger
from hot_compile.errors import OptionError
from hot_compile.inspect import budgets
from hot_compile.memory import peak_bytes
from hot_compile.page import page_data
from hot_compile.passes import pipeline
from hot_compile.passes.base.schemes import Scheme
from hot_compile.passes.context import Context
from hot_compile.passes.storage.layout import in_memory, packed_bytes
from hot_compile.record import GraphReport, Reports, run_uncompiled
from hot_compile.testing import cosine, sqnr

MIB = 2**20
BUS = {"rates": {"host_copy": 25e9}}
"""A CPU has no other memory; with this rate it is treated as if it had."""
ALWAYS = {"min_gain": 0, "keep_head": False, "memory_min_bytes": 4096}


def blocks(count=4, width=64):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width, 0.1) for _ in range(count)))


def plain(count=3, width=64):
    """What Inductor has little to write for."""
    torch.manual_seed(0)
    pairs = ((nn.Linear(width, 4 * width), nn.Linear(4 * width, width)) for _ in range(count))
    return nn.Sequential(*(m for up, down in pairs for m in (up, nn.GELU(), down)))


def images():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, bias=False)]
    for _ in range(5):
        layers += [nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1, bias=False)]
    return nn.Sequential(*layers)


CASES = {
    "blocks": (blocks, torch.randn(8, 128, 64)),
    "images": (images, torch.randn(8, 3, 34, 34)),
}


SMALL = functools.partial(blocks, 3), CASES["blocks"][1]


@pytest.fixture(autouse=True)
def _fresh(tmp_path, monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(budget, "cache_dir", lambda: tmp_path)


class Forgiving(Ledger):
    """Predicts, and takes the least that there is for whatever is asked."""

    def allowance(self, *args, **keywords):
        return dataclasses.replace(super().allowance(*args, **keywords), strict=False)


class Step(NamedTuple):
    loss: torch.Tensor
    gradients: list
    report: GraphReport
    again: Callable
    """Runs the backward once more."""


def train(make, x, asked, lower=False, ledger=Forgiving, **options):
    """One step, by the prediction alone."""
    model, reports = make(), Reports()
    keywords = {} if lower else {"inner_compile": run_uncompiled}
    options = {**ALWAYS, "peak_budget": f"{asked / MIB} MiB", **options}
    own = ledger(int(asked), None)
    backend = functools.partial(
        hot, options=options, recorder=reports, ledger=lambda *_: own, **keywords
    )
    torch._dynamo.reset()
    torch.manual_seed(1)
    loss = torch.compile(model, backend=backend)(x).square().mean()
    again = functools.partial(loss.backward, retain_graph=True)
    again()
    (report,) = reports.graphs
    return Step(loss.detach(), [p.grad for p in model.parameters()], report, again)


@functools.cache
def explored(name, recipe):
    """(allowed, Within, held between forward and backward) of budgets from large to none."""
    found, plan = [], pipeline.plan_within

    def all_of(crossers, config, rise, _allowed, *rest):
        highest = rise({})
        for allowed in range(highest, -1, -max(1, highest // 32)):
            found.append((allowed, plan(crossers, config, rise, allowed, *rest)))
        return found[-1][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "plan_within", all_of)
        train(*CASES[name], MIB, **BUS, recipe=recipe)
    return found


@pytest.mark.parametrize("recipe", ["hot", "exact"])
@pytest.mark.parametrize("name", CASES)
def test_a_smaller_budget_never_holds_more(name, recipe):
    found = explored(name, recipe)
    rises = [within.rise for _, within in found]
    assert rises == sorted(rises, reverse=True)
    assert all(w.rise <= allowed for allowed, w in found if w.least is None)
    assert all(finer.hosted <= less.hosted for (_, finer), (_, less) in pairwise(found))
    assert not found[0][1].hosted, "what fits stays"
    assert found[-1][1].hosted
    if recipe == "exact":
        assert not found[-1][1].chosen


@pytest.mark.parametrize(("recipe", "steps"), [("hot", 1), ("exact", 5)])
def test_it_comes_behind_all_that_is_stored_cheapest_first(recipe, steps):
    found = explored("blocks", recipe)
    hosting = [within for _, within in found if within.hosted]
    assert len({len(within.hosted) for within in hosting}) >= steps, "gradual"
    last = found[-1][1].chosen
    assert all(within.chosen == last for within in hosting), "everything is stored before"
    sizes = {
        c: packed_bytes(in_memory(c.saved), last.get(c, Scheme.EXACT)) for c in hosting[-1].hosted
    }
    seen = set()
    for within in hosting:
        new = within.hosted - seen
        rest = hosting[-1].hosted - within.hosted
        assert not rest or max(map(sizes.get, rest)) <= min(map(sizes.get, new), default=1 << 60)
        seen |= within.hosted


@pytest.mark.parametrize("recipe", ["hot", pytest.param("exact", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_the_same_bit_for_bit(name, recipe):
    make, x = CASES[name]
    least = train(make, x, MIB, recipe=recipe)
    away = train(make, x, MIB, recipe=recipe, **BUS)
    assert least.report.budget.hosted == 0 < away.report.budget.hosted
    schemes = [
        {c.name: c.scheme for c in report.crossing} for report in (least.report, away.report)
    ]
    assert schemes[0] == schemes[1]
    assert torch.equal(least.loss, away.loss)
    away.again()
    for got, want in zip(away.gradients, least.gradients, strict=True):
        # an image comes back channels last, as Inductor has it: convolutions add in another order
        assert torch.equal(got, 2 * want) or (name == "images" and sqnr(got, 2 * want) > 60)


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.called = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.called.append(op.__name__.split(".")[0])
        return op(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.parametrize("lower", [False, True])
def test_inductors_code_gives_the_same_and_fetches_one_ahead(lower):
    """Ours depend on nothing but inputs: left alone, it would bring all back at once.

    ``lower``: what it is compared with is Inductor's code, too.
    """
    make, x = plain, SMALL[1]
    least = train(make, x, MIB, lower=lower)
    away = train(make, x, MIB, lower=True, **BUS)
    assert away.report.budget.hosted
    torch.testing.assert_close(least.loss, away.loss)
    assert torch.equal(least.loss, away.loss) or not lower
    for got, want in zip(away.gradients, least.gradients, strict=True):
        torch.testing.assert_close(got, want)

    with Operators() as mode:
        away.again()  # again, of what was retained
    for got, want in zip(away.gradients, least.gradients, strict=True):
        torch.testing.assert_close(got, 2 * want)
    way = [(name == "fetch") - (name == "arrive") for name in mode.called]
    assert way.count(1) == way.count(-1) == away.report.budget.hosted
    assert max(accumulate(way)) <= 3
    # once a layer
    place = [i for i, name in enumerate(mode.called) if name in ("mm", "quantize_grad")]
    last = max(i for i, name in enumerate(mode.called) if name == "fetch")
    assert sum(i > last for i in place) < len(place) / 2


def hooked(run, x):
    with torch.autograd.graph.save_on_cpu():
        return run(x)


AROUND = {
    "checkpoint": functools.partial(checkpoint, use_reentrant=False),
    "saved-tensor hooks": hooked,
    "lengths": lambda run, x: run(x),
    "graphs": lambda run, x: run(x),
}


@pytest.mark.parametrize("name", AROUND)
def test_training_goes_on_whatever_is_around(name):
    blocks_, reports = blocks(3), Reports()
    model = Broken(*blocks_) if name == "graphs" else blocks_
    for block in blocks_:
        block.dropout.p = 0.0
    exact = copy.deepcopy(model)
    options = {**ALWAYS, **BUS, "peak_budget": "1MiB", "recipe": "exact"}
    keywords = {"recorder": reports, "inner_compile": run_uncompiled}
    backend = functools.partial(
        hot, options=options, ledger=lambda _, asked: Forgiving(asked, None), **keywords
    )
    run = torch.compile(model, backend=backend, dynamic=name == "lengths")
    for length in (128, 96, 64) if name == "lengths" else (128, 128, 128):
        x = torch.randn(4, length, 64)
        AROUND[name](run, x).square().mean().backward()
        exact(x).square().mean().backward()
    assert all(graph.budget.hosted for graph in reports.graphs)
    assert (len(reports.graphs) > 1) is (name == "graphs")
    for got, want in zip(model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, rtol=1e-4, atol=1e-6)


def test_less_is_possible_and_the_error_says_so():
    make, x = SMALL
    stored, away = (train(make, x, MIB, **more).report.budget for more in ({}, BUS))
    assert away.rise < stored.rise
    assert away.held < stored.held / 4
    between = (stored.held + stored.standing) * 0.9
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="the least that it is"):
        train(make, x, between, ledger=Ledger)
    assert train(make, x, between, ledger=Ledger, **BUS).report.budget.hosted
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as error:
        train(make, x, MIB / 4, ledger=Ledger, **BUS)
    assert isinstance(error.value.inner_exception, OptionError)
    assert f"{away.rise / MIB:.1f} MiB are the least" in str(error.value)


def test_it_is_only_for_what_has_another_memory_and_is_no_cuda_graph():
    make, x = SMALL
    assert not train(make, x, MIB).report.budget.hosted
    assert not train(make, x, MIB, **BUS, **{"triton.cudagraphs": True}).report.budget.hosted


def test_copies_are_fetched_one_ahead():
    report = train(*SMALL, MIB, **BUS).report
    targets = [n.target.split(".")[1] for n in report.stages["backward"].nodes if "." in n.target]
    calls = [name for name in targets if name in ("fetch", "arrive")]
    count = report.budget.hosted
    assert calls == ["fetch", *["fetch", "arrive"] * (count - 1), "arrive"]


def test_reports_say_what_waits_on_the_host():
    make, x = SMALL
    report = train(make, x, MIB, **BUS).report
    assert f", {report.budget.hosted} in host memory" in budgets([report])[0]
    hosted = [c for c in report.crossing if c.host_bytes]
    assert len(hosted) == report.budget.hosted
    assert all(c.bytes == 0 and c.seconds > 2 * c.host_bytes / 25e9 for c in hosted)
    words = [row["as"] for row in page_data([report])["crossing"]]
    assert sum("in host memory" in text for text in words) == len(hosted)
    told = MemoryReport(report.crossing, {"exact": Measured(1, 0, 1)}, (), (report,))
    assert str(told).count("on the host") == len(hosted)
    assert told.predicted_held_bytes == report.held_bytes == sum(c.bytes for c in told.crossing)


@pytest.mark.gpu
@pytest.mark.parametrize("lower", [False, True])
@pytest.mark.parametrize("recipe", ["hot", "exact"])
def test_on_a_gpu_a_step_trains_below_the_former_least(recipe, lower, monkeypatch):
    """The peak falls, gradients are the same, and a graph that was kept runs again."""
    device = torch.device("cuda")
    x, options = torch.randn(64, 512, 256, device=device), {**ALWAYS, "recipe": recipe}
    keywords = {} if lower else {"inner_compile": run_uncompiled}

    def trained(backwards=1):
        """(gradients, tensors that waited on the host, bytes of a step's peak)."""
        torch._dynamo.reset()
        reports, model = Reports(), blocks(8, 256).to(device)
        backend = functools.partial(
            hot,
            options={**options, "peak_budget": "1MiB"},
            recorder=reports,
            ledger=lambda _, asked: Forgiving(asked, None),
            **keywords,
        )
        run = torch.compile(model, backend=backend)

        def step():
            model.zero_grad()
            torch.manual_seed(1)
            loss = run(x).square().mean()
            for left in reversed(range(backwards)):
                loss.backward(retain_graph=left > 0)

        step()
        peak = min(peak_bytes(step, device) for _ in range(3))
        return [p.grad for p in model.parameters()], reports.graphs[-1].budget.hosted, peak

    away, count, peak = trained()
    with monkeypatch.context() as patch:
        patch.setattr(Context, "host_prices", lambda *_: lambda *_: None)
        least, none, highest = trained()
    with torch._functorch.config.patch(donated_buffer=False):  # else no backward may run twice
        twice, *_ = trained(2)
    assert none == 0 < count
    for got, want, sum_of_two in zip(away, least, twice, strict=True):
        assert torch.equal(got, want) or (lower and cosine(got, want) > 0.9999)
        torch.testing.assert_close(sum_of_two, 2 * got)
    assert peak < (0.9 if lower else 1.0) * highest
