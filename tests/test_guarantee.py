"""What goes wrong in our part costs that part and one warning, never the training."""

import copy
import functools
import itertools
import runpy

import pytest
import torch
import torch.nn.functional as F
from forked import in_two_processes
from own_cache import own_cache
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner

from hot_compile import guarantee
from hot_compile.backend import _NEW_GRAPH, hot
from hot_compile.config import HotConfig
from hot_compile.errors import OptionError
from hot_compile.inductor import Ran
from hot_compile.passes import hooks, pipeline
from hot_compile.passes.base.steps import Step
from hot_compile.record import run_uncompiled

OPTIONS = {
    "min_gain": 0,
    "memory_min_bytes": 0,
    "head_min_bytes": 0,
    "forward": "int8",
    "forward_budget": None,
    "strict": False,
}
WITHOUT = {
    "storage": {"memory": "off"},
    "heads in chunks": {"head": "off"},
    "an INT8 forward": {"forward": "exact"},
}


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    from hot_compile import reproduction

    monkeypatch.setattr(reproduction, "cache_dir", lambda: tmp_path)


class Net(nn.Module):
    """With all that may have to be done again: random draws, statistics, a head with its loss."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(64, 96), nn.BatchNorm1d(96), nn.Linear(96, 64)
        self.head = nn.Linear(64, 128, bias=False)

    def forward(self, x, y):
        x = F.dropout(F.gelu(self.norm(self.up(x))), 0.1)
        return F.cross_entropy(self.head(self.down(x)), y)


def trained(backend, steps=2, **compile_options):
    """(gradients, buffers) after some steps from one seed."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x, y = Net(), torch.randn(64, 64), torch.randint(128, (64,))
    step = torch.compile(model, backend=backend, **compile_options)
    for _ in range(steps):
        step(x, y).backward()
    return [p.grad for p in model.parameters()], list(model.buffers())


def ours(inner_compile=run_uncompiled, **options):
    return functools.partial(hot, inner_compile=inner_compile, options={**OPTIONS, **options})


def stock(gm, example_inputs, **_):
    return compile_fx(gm, example_inputs, run_uncompiled, config_patches={**_NEW_GRAPH})


@functools.cache
def trained_by_stock():
    return trained(stock)


@functools.cache
def trained_without(part):
    """With a part of ours left out by the options, of ``WITHOUT``."""
    return trained(ours(strict=True, **WITHOUT[part]))


def told(caplog):
    """The one warning."""
    (text,) = [r.getMessage() for r in caplog.records if "goes on" in r.getMessage()]
    return text


def equal(got, want):
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def plant(monkeypatch, pipe, name, when=lambda state: True):
    """Let a step of a pipeline fail, after it half changed the graphs."""

    def failing(step, state):
        count = step.run(state)
        if when(state):
            raise RuntimeError("planted")
        return count

    steps = [
        Step(s.name, functools.partial(failing, s), s.changes, s.needed) if s.name == name else s
        for s in getattr(hooks, pipe)
    ]
    monkeypatch.setattr(hooks, pipe, tuple(steps))


PIPES = ("HEADS", "JOINT", "PARTITIONED")
QUICK = {"heads", "match", "rewrite", "copies", "layouts", "store", "kernels"}
"""Of each pipeline the first step, one that changes much, and the last; the others: ``-m slow``."""


@pytest.mark.parametrize(
    ("pipe", "name"),
    [
        pytest.param(pipe, step.name, marks=() if step.name in QUICK else pytest.mark.slow)
        for pipe in PIPES
        for step in getattr(pipeline, pipe)
    ],
)
def test_a_step_that_always_fails_leaves_the_graph_as_stock(pipe, name, monkeypatch, caplog):
    plant(monkeypatch, pipe, name)
    got, want = trained(ours()), trained_by_stock()
    for mine, theirs in zip(got, want, strict=True):
        equal(mine, theirs)
    assert "compiling failed (RuntimeError: planted)" in told(caplog)
    assert "as stock Inductor compiles it" in told(caplog)


@pytest.mark.parametrize(
    ("part", "pipe", "name", "when"),
    [
        ("storage", "PARTITIONED", "store", lambda cut: cut.stored),
        ("heads in chunks", "HEADS", "heads", lambda joint: any(h.chunked for h in joint.heads)),
        ("an INT8 forward", "JOINT", "forwards", lambda joint: joint.plan.forwards),
    ],
)
def test_only_the_part_at_fault_is_left_out(part, pipe, name, when, monkeypatch, caplog):
    want = trained_without(part)
    plant(monkeypatch, pipe, name, when)
    got = trained(ours())
    for mine, theirs in zip(got, want, strict=True):
        equal(mine, theirs)
    assert f"without {part}" in told(caplog)
    with pytest.raises(Exception, match="planted"):
        trained(ours(strict=True))


def test_on_a_gpu_two_of_torchs_optimisations_are_left_out_before_anything_of_ours():
    def first(on_gpu):
        ways = guarantee._ways(HotConfig(), on_gpu)
        return [(way.without, dict(way.patches)) for way in itertools.islice(ways, 1, 2)]

    torchs = "Inductor's mixed-order reductions and tile analysis"
    assert first(True) == [(torchs, guarantee._TORCHS)]
    assert first(False) == [("storage", {})]


@pytest.mark.gpu
def test_torchs_mixed_reductions_alone_are_left_out(caplog):
    def loss(x, w):
        return F.rms_norm(x, x.shape[-1:], w).square().sum()

    def grads(run):
        x = torch.linspace(-1, 1, 1000 * 197, device="cuda").view(197, 1000).requires_grad_()
        w = torch.ones(1000, device="cuda", requires_grad=True)
        return torch.autograd.grad(run(x, w), (x, w))

    ours = functools.partial(hot, inner_compile=mixed_fails, options={"strict": False})
    got = grads(torch.compile(loss, backend=ours))
    assert "without Inductor's mixed-order reductions and tile analysis" in told(caplog)
    torch._dynamo.reset()
    for mine, theirs in zip(got, grads(torch.compile(loss)), strict=True):
        torch.testing.assert_close(mine, theirs)


def mixed_fails(gm, *args, **kwargs):
    if inductor_config.triton.mix_order_reduction:
        raise AssertionError("256 v.s. 128")
    return compile_fx_inner(gm, *args, **kwargs)


def failing(place, when, error=None, compile_graph=run_uncompiled):
    """An ``inner_compile`` that fails in one of the places, for graphs of which ``when`` is so."""

    error = error or RuntimeError("planted")

    def compiled(gm, *args, is_backward=False, **kwargs):
        code = gm.print_readable(print_output=False)
        bad = ("backward" in place) == is_backward and when(code)
        if bad and place.startswith("compiling"):
            raise error
        run = compile_graph(gm, *args, is_backward=is_backward, **kwargs)

        def fails(inputs):
            run(list(inputs))  # all is changed that it changes
            raise error

        fails._boxed_call = True
        return fails if bad else run

    return compiled


PLACES = ("compiling a forward", "compiling a backward", "running a forward", "running a backward")


def rewritten(code):
    """The graph went through our passes."""
    return isinstance(inductor_config.joint_custom_pre_pass, Ran)


@pytest.mark.parametrize("place", PLACES)
def test_wherever_our_code_fails_training_goes_on_as_stock(place, caplog):
    got = trained(ours(failing(place, rewritten), forward="exact", head="off"))
    want = trained_by_stock()
    if place == "running a backward":  # whose forward, by our graph, was as exact
        for mine, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(mine, theirs)
    else:
        for mine, theirs in zip(got, want, strict=True):
            equal(mine, theirs)
    assert "RuntimeError: planted" in told(caplog)
    assert "as stock Inductor compiles it" in told(caplog)


@pytest.mark.parametrize("place", PLACES)
def test_stored_bits_at_fault_are_dropped_alone(place, caplog):
    packs = failing(place, lambda code: "bitwise" in code)
    got, want = trained(ours(packs)), trained_without("storage")
    for mine, theirs in zip(got, want, strict=True):
        equal(mine, theirs)
    assert "without storage" in told(caplog)


@pytest.mark.parametrize("place", PLACES)
def test_strict_raises_wherever_it_fails(place):
    with pytest.raises(Exception, match="planted"):
        trained(ours(failing(place, rewritten), strict=True))


@pytest.mark.parametrize("place", PLACES)
def test_where_stock_fails_too_its_error_is_seen(place, caplog):
    def fails(gm, *args, is_backward=False, **kwargs):
        error = ValueError(
            "ours" if rewritten(gm.print_readable(print_output=False)) else "stock's"
        )
        bad = failing(place, lambda code: True, error)
        return bad(gm, *args, is_backward=is_backward, **kwargs)

    with pytest.raises(Exception, match="stock's"):
        trained(ours(fails))
    assert not [r for r in caplog.records if "goes on" in r.getMessage()]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("full"), OptionError("wrong"), KeyboardInterrupt()]
)
def test_what_is_not_ours_to_mend_is_passed_on(place, error, caplog):
    with pytest.raises(BaseException) as caught:  # noqa: PT011  (the interpreter's own among them)
        trained(ours(failing(place, rewritten, error)))
    assert str(error) in str(caught.value)
    assert not [r for r in caplog.records if "goes on" in r.getMessage()]


@pytest.mark.parametrize("place", ["running a forward", "running a backward"])
def test_other_sizes_go_on_as_well(place, caplog):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
    exact = copy.deepcopy(model)
    step = torch.compile(model, backend=ours(failing(place, rewritten)), dynamic=True)
    for rows in (32, 48, 80, 48):
        x = torch.randn(rows, 64)
        step(x).square().sum().backward()
        exact(x).square().sum().backward()
    for mine, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    assert "as stock Inductor compiles it" in told(caplog)


def test_a_backward_is_done_again_under_the_forwards_autocast(caplog):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
    exact, x = copy.deepcopy(model), torch.randn(32, 64)
    step = torch.compile(model, backend=ours(failing("running a backward", rewritten)))
    for call in (step, torch.compile(exact, backend=stock)):
        with torch.autocast("cpu", torch.bfloat16):
            loss = call(x).float().square().sum()
        loss.backward()
    for mine, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        equal([mine.grad], [theirs.grad])
    assert "first backward" in told(caplog)


def test_a_step_whose_input_changed_cannot_be_done_again_but_later_ones_can(caplog):
    torch._dynamo.reset()
    model, x = nn.Sequential(nn.Linear(64, 64)), torch.randn(32, 64)
    step = torch.compile(model, backend=ours(failing("running a backward", rewritten)))
    loss = step(x).square().sum()
    with torch.no_grad():
        model[0].bias.add_(1)
    with pytest.raises(RuntimeError, match="planted"):
        loss.backward()
    assert "cannot be done again: an input has changed" in caplog.text
    step(x).square().sum().backward()
    assert torch.isfinite(model[0].weight.grad).all()


class WithLogits(nn.Module):
    """Returns its logits besides the loss, as models of Hugging Face do."""

    def __init__(self):
        super().__init__()
        self.up, self.head = nn.Linear(64, 96), nn.Linear(96, 128)

    def forward(self, x, y):
        logits = self.head(F.gelu(self.up(x)))
        return F.cross_entropy(logits, y), logits


@pytest.mark.parametrize("place", PLACES)
def test_logits_outside_of_the_graph_get_their_gradient(place, caplog):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x, y = WithLogits(), torch.randn(64, 64), torch.randint(128, (64,))
    exact = copy.deepcopy(model)
    bad = ours(failing(place, rewritten), forward="exact")
    for step in (torch.compile(model, backend=bad), exact):
        loss, logits = step(x, y)
        (loss + logits.square().mean()).backward(retain_graph=True)
    for mine, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    assert "goes on as stock" in told(caplog)


@pytest.mark.slow
def test_code_from_the_cache_is_guarded(monkeypatch, tmp_path):
    """Nothing is known of such code but what it is called with."""
    folder = own_cache(tmp_path / "inductor")["TORCHINDUCTOR_CACHE_DIR"]
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", folder)
    counters.clear()
    backend = functools.partial(hot, options={**OPTIONS, "forward": "exact"})
    results = [trained(backend, steps=1) for _ in range(2)]
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1
    for mine, theirs in zip(*results, strict=True):
        equal(mine, theirs)


def test_a_graph_may_be_kept_in_the_first_backward():
    """As stock allows: buffers are given away in a backward that nobody repeats only."""
    torch._dynamo.reset()
    model, x = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)), torch.randn(32, 64)
    loss = torch.compile(model, backend="hot", options=OPTIONS)(x).square().sum()
    loss.backward(retain_graph=True)
    once = model[0].weight.grad.clone()
    loss.backward()
    torch.testing.assert_close(model[0].weight.grad, 2 * once)


class Block(nn.Module):
    """A module of ours: torch 2.11 does not compile one of its own in place."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x):
        return F.gelu(self.inner(x))


def test_two_graphs_of_one_code_fail_together(caplog):
    """Blocks share their code: each of them that ran before the first backward is mended."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block() for _ in range(3)))
    exact, x = copy.deepcopy(blocks), torch.randn(32, 64)
    bad = ours(failing("running a backward", rewritten), forward="exact")
    for block in blocks:
        block.compile(backend=bad)
    for model in (blocks, exact):
        model(x).square().sum().backward()
    for mine, theirs in zip(blocks.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    assert "goes on as stock" in caplog.text


def test_the_reproduction_fails_in_the_same_way(tmp_path, monkeypatch, caplog):
    plant(monkeypatch, "JOINT", "rewrite")
    trained(ours())
    (folder,) = (tmp_path / "failures").iterdir()
    assert str(folder) in told(caplog)
    assert "planted" in (folder / "error.txt").read_text()
    text = (folder / "repro.py").read_text()
    assert torch.__version__ in text
    assert "tensor((64, 64), (64, 1), torch.float32, 'cpu', False)" in text
    torch._dynamo.reset()
    with pytest.raises(Exception, match="planted"):
        runpy.run_path(str(folder / "repro.py"))


def test_a_folder_that_cannot_be_written_costs_the_reproduction_only(monkeypatch, caplog, tmp_path):
    from hot_compile import reproduction

    (tmp_path / "file").write_text("")
    monkeypatch.setattr(reproduction, "cache_dir", lambda: tmp_path / "file")
    plant(monkeypatch, "JOINT", "plan")
    trained(ours(), steps=1)
    assert "No reproduction could be written" in told(caplog)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_what_inductor_lowers_is_guarded_too(place, caplog):
    bad = failing(place, rewritten, compile_graph=compile_fx_inner)
    options = {"forward": "exact", "head": "off"}
    (got, _), (want, _) = trained(ours(bad, **options)), trained("inductor")
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
    assert "as stock Inductor compiles it" in told(caplog)


def one_of_two(rank, path, place):
    """DistributedDataParallel of which one process only falls back."""
    store = torch.distributed.FileStore(str(path), 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
    inner = failing(place, rewritten) if rank else run_uncompiled
    step = torch.compile(nn.parallel.DistributedDataParallel(model), backend=ours(inner))
    torch.manual_seed(rank)
    for _ in range(2):
        step(torch.randn(32, 64)).square().sum().backward()
    for p in model.parameters():
        both = [torch.empty_like(p.grad) for _ in range(2)]
        torch.distributed.all_gather(both, p.grad)
        assert torch.equal(*both)
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    "place", ["compiling a forward", "running a forward", "running a backward"]
)
def test_one_process_of_two_falls_back_and_the_other_waits_for_nothing(place, tmp_path):
    in_two_processes(one_of_two, tmp_path / "store", place)
