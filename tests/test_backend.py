"""``torch.compile(model, backend="hot")`` end to end: options, hooks, caches, dumps, safety."""

import copy
import functools
import io
import json
import logging
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from forked import in_a_process
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import fresh_cache

from hot_compile.backend import hot
from hot_compile.errors import OptionError, PassDisabledError
from hot_compile.inspect import Reports, explain
from hot_compile.testing import cosine, hot_step

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

ALWAYS = {"min_gain": 0, "keep_head": False}


def mlp():
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))


def gradients(model, x, **compile_options):
    model = copy.deepcopy(model)
    loss = torch.compile(model, **compile_options)(x).square().mean()
    loss.backward()
    return [p.grad for p in model.parameters()]


def rewritten(model, x, **keywords):
    """Number of layers rewritten when compiled with these keywords."""
    reports = Reports()
    backend = functools.partial(hot, recorder=reports, **keywords)
    torch.compile(copy.deepcopy(model), backend=backend)(x).sum().backward()
    return sum(len(graph.plan.rewritten) for graph in reports.graphs)


def test_the_backend_is_found_by_name_without_importing_us():
    code = (
        "import sys, torch; m = torch.nn.Linear(8, 8);"
        "f = torch.compile(m, backend='hot'); print('hot' in torch._dynamo.list_backends())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


def test_gradients_agree_and_forward_is_exact():
    model, x = mlp(), torch.randn(40, 64)
    exact = gradients(model, x, backend="inductor")
    ours = gradients(model, x, backend="hot", options={**ALWAYS, "recipe": "int8"})
    assert all(cosine(a, b) > 0.98 for a, b in zip(ours, exact, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(ours, exact, strict=True))
    y = torch.compile(model, backend="hot", options=ALWAYS)(x)
    torch.testing.assert_close(y, model(x))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune-no-cudagraphs"])
def test_modes(mode):
    assert rewritten(mlp(), torch.randn(40, 64), mode=mode, options=None) == 0  # too small to pay
    loss = torch.compile(mlp(), backend="hot", mode=mode)(torch.randn(40, 64)).sum()
    loss.backward()


@pytest.mark.parametrize("options", [{"use_joint_graph_passes": False}])
def test_settings_that_would_switch_us_off_raise(options):
    with pytest.raises(PassDisabledError, match="Remove that option"):
        hot(torch.fx.symbolic_trace(mlp()), [], options=options)


def test_mode_lite_raises():
    try:
        torch._inductor.list_mode_options("lite")
    except RuntimeError:
        pytest.skip("this torch has no mode 'lite'")
    with pytest.raises(PassDisabledError):
        hot(torch.fx.symbolic_trace(mlp()), [], mode="lite")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"recipe": "nope"}, OptionError),
        ({"hot.nope": 1}, OptionError),
        ({"nonsense_of_inductor": 1}, OptionError),
    ],
)
def test_bad_options_are_named(options, error):
    with pytest.raises(error) as caught:
        hot(torch.fx.symbolic_trace(mlp()), [], options=options)
    assert next(iter(options)).removeprefix("hot.").split("_")[0] in str(caught.value)


def test_inductor_options_mix_with_ours():
    options = {**ALWAYS, "max_autotune": False, "epilogue_fusion": True}
    assert rewritten(mlp(), torch.randn(40, 64), options=options) == 2


class Marker(CustomGraphPass):
    """A user's own joint pass: counts its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, graph):
        self.calls += 1

    def uuid(self):
        return "marker"


@pytest.mark.parametrize("through_options", [True, False])
def test_a_users_own_pass_still_runs(through_options):
    marker = Marker()
    model, x = mlp(), torch.randn(40, 64)
    if through_options:
        options = {**ALWAYS, "joint_custom_pre_pass": marker}
        assert rewritten(model, x, options=options) == 2
    else:
        with torch._inductor.config.patch(joint_custom_pre_pass=marker):
            assert rewritten(model, x, options=ALWAYS) == 2
    assert marker.calls == 1


def test_fullgraph_and_dynamic():
    model = mlp()
    compiled = torch.compile(model, backend="hot", fullgraph=True, dynamic=True, options=ALWAYS)
    for batch in (200, 300):
        compiled(torch.randn(batch, 64)).sum().backward()


class Alike(nn.Module):
    """Blocks that are graphs of their own, as DistributedDataParallel makes of a model."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = mlp(), mlp(), mlp()

    def forward(self, x):
        x = self.one(x)
        torch._dynamo.graph_break()
        x = self.two(x)
        torch._dynamo.graph_break()
        return self.three(x)


def test_graphs_that_are_alike_are_lowered_once():
    counters["inductor"].clear()
    x = torch.randn(40, 64, requires_grad=True)
    with fresh_cache():
        gradients(Alike(), x, backend="hot", options=ALWAYS)
    # a forward and a backward; neither names of modules nor our passes make them others
    assert counters["inductor"]["fxgraph_cache_miss"] == 2
    assert counters["inductor"]["fxgraph_cache_hit"] == 4


def test_dump_writes_every_stage_even_when_the_cache_would_hit(tmp_path):
    options = {**ALWAYS, "dump": str(tmp_path)}
    for _ in range(2):
        torch._dynamo.reset()
        torch.manual_seed(0)
        torch.compile(mlp(), backend="hot", options=options)(torch.randn(40, 64)).sum().backward()
    folders = sorted(tmp_path.iterdir())
    assert [f.name for f in folders] == ["graph_000", "graph_001"]
    for folder in folders:
        names = {f.name for f in folder.iterdir()}
        assert {"plan.json", "crossing.json"} < names
        assert "hot.quantize_columns" in (folder / "01.joint.after.py").read_text()
        assert "hot.quantize_columns" not in (folder / "00.joint.before.py").read_text()
        crossing = json.loads((folder / "crossing.json").read_text())
        assert any(c["bytes"] for c in crossing)


class Constants(nn.Module):
    """Its graphs read a constant, which is an attribute of the graph's owner, and subgraphs."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x):
        x = self.first(x) * torch.tensor([0.5, 1.0, 2.0]).repeat_interleave(32)
        x = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
        return self.last(x)


def test_graphs_with_attributes_are_written_and_train(tmp_path):
    """Attributes are the owner's; writing a graph needs none of them, and leaves it its owner."""
    dump, trace = tmp_path / "dump", tmp_path / "trace"
    script = f"""
import functools, torch
from hot_compile.inspect import run_uncompiled
from test_backend import ALWAYS, Constants, hot
torch.manual_seed(0)
model, x = Constants(), torch.randn(40, 64)
options = {{**ALWAYS, "recipe": "int8", "dump": {str(dump)!r}}}
model(x).square().mean().backward()
exact = [p.grad.clone() for p in model.parameters()]
model.zero_grad()
backend = functools.partial(hot, options=options, inner_compile=run_uncompiled)
torch.compile(model, backend=backend)(x).square().mean().backward()
for parameter, want in zip(model.parameters(), exact):
    assert torch.nn.functional.cosine_similarity(parameter.grad.flatten(), want.flatten(), 0) > 0.99
"""
    env = {**os.environ, "PYTHONPATH": os.path.dirname(__file__), "TORCH_TRACE": str(trace)}
    subprocess.run([sys.executable, "-c", script], env=env, check=True)
    for (file,) in (dump.rglob("*joint.after.py"), trace.glob("*.log")):
        assert "_tensor_constant0" in file.read_text()
        assert "hot.scaled_int_mm" in file.read_text()


def test_dump_by_environment_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("HOT_DUMP", str(tmp_path))
    torch.compile(mlp(), backend="hot", options=ALWAYS)(torch.randn(40, 64)).sum().backward()
    assert (tmp_path / "graph_000" / "plan.json").exists()


def test_explain_has_one_row_for_layers_alike_but_for_a_number():
    torch.manual_seed(0)
    alike = [nn.Linear(64, 64) for _ in range(3)]
    said = str(explain(nn.Sequential(*alike, nn.Linear(64, 32)), torch.randn(40, 64)))
    rows = [line.split()[0] for line in said.splitlines() if "40 x" in line]
    assert len(rows) < 4
    assert any("*" in row for row in rows)
    assert f"of {len(alike) + 1} products rewritten" in said


def test_explain_prints_a_table_and_changes_nothing(capsys):
    model = nn.Sequential(nn.BatchNorm1d(64), nn.Linear(64, 96), nn.Dropout(0.5), nn.Linear(96, 64))
    x = torch.randn(40, 64)
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    explanation = explain(model, x, options={"min_gain": 0})
    printed = capsys.readouterr().out
    assert "INT8 products" in printed
    assert "classifier head" in printed
    assert "held between forward and backward" in printed
    assert explanation.plan["1"].strategy == "int8"
    assert json.dumps(explanation.to_json())
    assert torch.equal(state, torch.get_rng_state())
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("recipe", ["hot", "int8", "paper"])
def test_non_finite_activations_reach_the_gradients(value, recipe):
    """GradScaler must see them: where exact training has non-finite gradients, so have we."""
    model, x = mlp(), torch.randn(40, 64)
    x[3, 5] = value
    options = {**ALWAYS, "recipe": recipe}
    exact = gradients(model, x, backend="inductor")
    ours = gradients(model, x, backend="hot", options=options)
    for got, want in zip(ours, exact, strict=True):
        assert not got.isfinite().all() or want.isfinite().all()


def test_zero_gradients_give_zero_gradients():
    model, x = mlp(), torch.randn(40, 64)
    hot_step(lambda x: (model(x) * 0).sum(), x, options=ALWAYS)
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in model.parameters())


def test_double_backward_says_no_like_inductor():
    model, x = mlp(), torch.randn(40, 64, requires_grad=True)
    messages = []
    for backend in ("inductor", "hot"):
        torch._dynamo.reset()
        y = torch.compile(model, backend=backend)(x).square().sum()
        (grad,) = torch.autograd.grad(y, x, create_graph=True)
        with pytest.raises(RuntimeError) as error:
            grad.sum().backward()
        messages.append(str(error.value).splitlines()[0])
    assert messages[0] == messages[1]


def test_functorch_transforms_do_what_inductor_does():
    model, x = mlp(), torch.randn(8, 64)
    params = dict(model.named_parameters())

    def loss(p, row):
        return torch.func.functional_call(model, p, (row,)).square().sum()

    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
    want = per_sample(params, x)
    got = torch.compile(per_sample, backend="hot", options=ALWAYS)(params, x)
    for name in params:
        torch.testing.assert_close(got[name], want[name], rtol=1e-4, atol=1e-4)


def test_integer_inputs_and_buffers():
    model = nn.Sequential(nn.Embedding(50, 64), mlp())
    ids = torch.randint(0, 50, (8, 20))
    _, (graph,) = hot_step(lambda ids: model(ids).square().mean(), ids, options=ALWAYS)
    assert len(graph.plan.rewritten) == 2
    assert graph.plan.rewritten[0].gx


def test_training_converges_like_exact():
    """A task learnt to the same loss: 60 AdamW steps on a fixed regression problem."""
    x = torch.randn(256, 64)
    y = torch.tanh(x @ torch.randn(64, 64) / 8)
    losses = {}
    for name in ("eager", "hot"):
        torch.manual_seed(1)
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
        ours = functools.partial(torch.compile, backend="hot", options=ALWAYS)
        compiled = ours(model) if name == "hot" else model
        for _ in range(60):
            loss = F.mse_loss(compiled(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses[name] = loss.item()
    assert losses["hot"] == pytest.approx(losses["eager"], rel=0.02)


def explained_without_a_compiler():
    """(whether something is rewritten, the first layer's reason, what was said)."""
    os.environ["CXX"] = "/nowhere/compiler"
    heard = io.StringIO()
    logging.getLogger("hot_compile").addHandler(logging.StreamHandler(heard))
    plan = explain(mlp(), torch.randn(40, 64), options={"min_gain": 0}).plan
    return bool(plan.rewritten), plan["0"].reason, heard.getvalue()


def test_without_a_compiler_training_stays_exact_and_says_so():
    rewritten, reason, said = in_a_process(explained_without_a_compiler)
    assert not rewritten
    assert "no runtime for cpu" in reason
    assert "stays exact" in said


def test_a_partitioner_without_uuid_is_never_cached(monkeypatch):
    from torch._functorch.partitioners import default_partition
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    import hot_compile.backend as backend

    class Mine(CustomPartitionerFn):
        calls = 0

        def __call__(self, gm, joint_inputs, **kwargs):
            Mine.calls += 1
            kwargs.pop("compiler", None)
            return default_partition(gm, joint_inputs, **kwargs)

        def uuid(self):
            return None

    seen, compile_fx = [], backend.compile_fx

    def spy(gm, inputs, inner_compile, config_patches, *others):
        seen.append(config_patches)
        return compile_fx(gm, inputs, inner_compile, config_patches, *others)

    monkeypatch.setattr(backend, "compile_fx", spy)
    layer = nn.Linear(64, 64)
    options = {"custom_partitioner_fn": Mine(), "min_gain": 0}
    torch.compile(layer, backend="hot", options=options)(torch.randn(32, 64)).sum().backward()
    assert Mine.calls == 1
    assert seen[0]["fx_graph_cache"] is False
    assert layer.weight.grad is not None


def test_what_dynamo_is_to_skip_outlives_a_setting_of_the_users(monkeypatch):
    """Their functions stay in it, and Transformers' warnings still break no graph that follows."""
    theirs, once = logging.Logger.info, logging.Logger.debug
    monkeypatch.setitem(sys.modules, "transformers", logging)
    monkeypatch.setattr(logging.Logger, "warning_once", once, raising=False)
    # not by monkeypatch, which deletes what is no attribute of a module's own when it is over
    with torch._dynamo.config.patch(ignore_logging_functions={theirs}):
        torch.compile(nn.Linear(8, 8), backend="hot")(torch.randn(8, 8))
        skipped = torch._dynamo.config.ignore_logging_functions
    assert theirs in skipped
    assert once in skipped


@pytest.mark.slow
def test_inductors_cpp_wrapper():
    """Its calls in C++ instead of Python; ours among them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    x = torch.randn(128, 64)
    gradients = []
    for wrapped in (False, True):
        model.zero_grad()
        options = {**ALWAYS, "memory_min_bytes": 0, "cpp_wrapper": wrapped}
        _, (graph,) = hot_step(lambda x: model(x).square().sum(), x, options=options, lower=True)
        assert graph.plan.rewritten
        gradients.append([p.grad.clone() for p in model.parameters()])
    for python, cpp in zip(*gradients, strict=True):
        assert cosine(python, cpp) > 0.9999
