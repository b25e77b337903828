"""The backend beside the rest of PyTorch: what trains under Inductor trains under "hot"."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from hot_compile.backend import hot
from hot_compile.inspect import Reports, run_uncompiled
from hot_compile.testing import cosine, hot_step

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

ALWAYS = {"recipe": "int8", "min_gain": 0, "keep_head": False}
UNCOMPILED = functools.partial(hot, options=ALWAYS, inner_compile=run_uncompiled)
"""For what ends before Inductor's lowering: graphs run node by node."""


class Net(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.a = nn.Linear(128, width)
        self.b = nn.Linear(width, width)
        self.c = nn.Linear(width, 128)

    def forward(self, x):
        return self.c(F.gelu(self.b(F.gelu(self.a(x)))))


class Broken(Net):
    def forward(self, x):
        x = F.gelu(self.a(x))
        torch._dynamo.graph_break()
        return self.c(F.gelu(self.b(x)))


def check(model, wrap=lambda model: model, context=None, lower=False):
    """Gradients agree with eager's; returns how many layers each graph had rewritten."""
    x = torch.randn(64, 128)
    exact = copy.deepcopy(model)
    exact(x).square().mean().backward()
    reports = Reports()
    keywords = {} if lower else {"inner_compile": run_uncompiled}
    backend = functools.partial(hot, options=ALWAYS, recorder=reports, **keywords)
    compiled = torch.compile(wrap(model), backend=backend)
    with context or torch.enable_grad():
        compiled(x).square().mean().backward()
    for got, want in zip(model.parameters(), exact.parameters(), strict=True):
        assert cosine(got.grad, want.grad) > 0.98
    return [len(graph.plan.rewritten) for graph in reports.graphs]


LOWERED = pytest.mark.parametrize("lower", [False, pytest.param(True, marks=pytest.mark.slow)])
"""Run node by node, and behind ``slow`` as Inductor's code, too."""


@LOWERED
def test_graph_breaks_give_two_graphs(lower):
    assert check(Broken(), lower=lower) == [1, 2]


@LOWERED
@pytest.mark.parametrize("split", [True, False])
def test_ddp_split_by_buckets_or_whole(tmp_path, split, lower):
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        wrap = functools.partial(nn.parallel.DistributedDataParallel, bucket_cap_mb=1)
        with torch._dynamo.config.patch(optimize_ddp=split):
            rewritten = check(Net(width=640), wrap, lower=lower)
    finally:
        torch.distributed.destroy_process_group()
    assert sum(rewritten) == 3
    assert len(rewritten) > 1 if split else rewritten == [3]


@LOWERED
def test_compiled_autograd(lower):
    context = torch._dynamo.config.patch(compiled_autograd=True)
    assert check(Net(), context=context, lower=lower) == [3]


@LOWERED
def test_activation_memory_budget(lower):
    with torch._functorch.config.patch(activation_memory_budget=0.3):
        assert check(Net(), lower=lower) == [3]


def test_gradient_accumulation_over_steps():
    model, x = Net(), torch.randn(64, 128)
    compiled = torch.compile(model, backend="hot", options=ALWAYS)
    compiled(x).square().mean().backward()
    once = model.a.weight.grad.clone()
    compiled(x).square().mean().backward()
    torch.testing.assert_close(model.a.weight.grad, 2 * once)  # same inputs, same bits


@LOWERED
def test_weight_norm_and_spectral_norm(lower):
    model = Net()
    torch.nn.utils.parametrizations.weight_norm(model.a)
    torch.nn.utils.parametrizations.spectral_norm(model.b)
    assert check(model, lower=lower) == [3]


@LOWERED
def test_transformer_encoder_layer(lower):
    model = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True, norm_first=True)
    reports = Reports()
    keywords = {} if lower else {"inner_compile": run_uncompiled}
    backend = functools.partial(hot, options=ALWAYS, recorder=reports, **keywords)
    torch.compile(model, backend=backend)(torch.randn(4, 9, 128)).square().mean().backward()
    names = {d.site for d in reports.graphs[0].plan.rewritten}
    assert {"linear1", "linear2", "self_attn"} <= names


@LOWERED
def test_compiling_twice_with_different_recipes_does_not_mix(lower):
    x = torch.randn(64, 128)
    exact, packed = Net(), Net()
    seen = {}
    for name, model in (("exact", exact), ("hot", packed)):
        reports = Reports()
        options = {**ALWAYS, "recipe": name}
        keywords = {} if lower else {"inner_compile": run_uncompiled}
        backend = functools.partial(hot, options=options, recorder=reports, **keywords)
        torch.compile(model, backend=backend)(x).sum().backward()
        seen[name] = len(reports.graphs[0].plan.rewritten)
    assert seen == {"exact": 0, "hot": 3}


class Checkpointed(Net):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x):
        x = checkpoint(self.hidden, x, use_reentrant=self.reentrant)
        return self.c(x)

    def hidden(self, x):
        return F.gelu(self.b(F.gelu(self.a(x))))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(64, 128)
        self.lstm = nn.LSTM(128, 128, batch_first=True)
        self.out = nn.Linear(128, 64)

    def forward(self, x):
        state, states = x.new_zeros(x.shape[0], 128), []
        for step in range(x.shape[1]):
            state = self.cell(x[:, step], state)
            states.append(state)
        return self.out(self.lstm(torch.stack(states, 1))[0])


class Routed(nn.Module):
    """A mixture of experts: each token to its best one; expert sizes are data-dependent."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(128, 3)
        self.experts = nn.ModuleList(Net() for _ in range(3))

    def forward(self, x):
        weight = self.gate(x).softmax(-1)
        best, out = weight.argmax(-1), torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mine = (best == i).nonzero().squeeze(1)
            out = out.index_add(0, mine, expert(x[mine]) * weight[mine, i, None])
        return out


class Grouped(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(128, 128)
        self.experts = nn.Parameter(0.05 * torch.randn(4, 128, 64, dtype=torch.bfloat16))
        self.register_buffer("ends", torch.tensor([16, 32, 50, 64], dtype=torch.int32))

    def forward(self, x):
        return torch._grouped_mm(self.a(x).bfloat16(), self.experts, offs=self.ends).float()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(500, 128)
        self.body = Net()
        self.head = nn.Linear(128, 500, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.body(self.embed(ids)))


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(64, 128, dtype=torch.complex64)
        self.b = nn.Linear(256, 64)

    def forward(self, x):
        return self.b(torch.view_as_real(self.a(x)).flatten(-2))


class Masked(Net):
    def forward(self, x, keep):
        h = self.b(torch.where(keep, F.gelu(self.a(x)), 0.0))
        return self.c(F.gelu(h)).masked_fill(~keep[:, :1], 1.0)


class Selected(Net):
    def forward(self, x, keep):
        return self.c(F.gelu(self.b(F.gelu(self.a(x))[keep])))


class InPlace(Net):
    def forward(self, x):
        h = self.a(x)
        h.mul_(2).relu_()
        h = h.view(-1, 2, 128).transpose(0, 1).reshape(-1, 256)
        h[:, :8] = 0
        return self.c(self.b(h))


class Branching(Net):
    def forward(self, x):
        yes, no = (lambda t: F.gelu(self.b(t))), (lambda t: self.b(t) * 2)
        return self.c(torch.cond(x.sum() > 0, yes, no, (F.gelu(self.a(x)),)))


def convolutions(kind, norm, channels):
    return nn.Sequential(
        kind(channels, 32, 3, padding=1), norm(32), nn.ReLU(), kind(32, 32, 3, stride=2), nn.ReLU()
    )


ODD = {
    "checkpoint": lambda: (Checkpointed(False), torch.randn(64, 128)),
    "checkpoint, reentrant": lambda: (
        Checkpointed(True),
        torch.randn(64, 128, requires_grad=True),
    ),
    "recurrent": lambda: (Recurrent(), torch.randn(16, 5, 64)),
    "routed experts": lambda: (Routed(), torch.randn(64, 128)),
    "grouped products": lambda: (Grouped(), torch.randn(64, 128)),
    "tied embedding": lambda: (Tied(), torch.randint(500, (4, 32))),
    "complex": lambda: (Complex(), torch.randn(64, 64, dtype=torch.complex64)),
    "float64": lambda: (Net().double(), torch.randn(64, 128, dtype=torch.float64)),
    "float16": lambda: (Net().half(), torch.randn(64, 128, dtype=torch.float16)),
    "masked": lambda: (Masked(), torch.randn(64, 128), torch.rand(64, 256) > 0.5),
    "selected rows": lambda: (Selected(), torch.randn(64, 128), torch.rand(64) > 0.5),
    "in place": lambda: (InPlace(), torch.randn(64, 128)),
    "branching": lambda: (Branching(), torch.randn(64, 128)),
    "batch of one": lambda: (Net(), torch.randn(1, 128)),
    "no batch": lambda: (Net(), torch.randn(128)),
    "nothing": lambda: (Net(), torch.randn(0, 128)),
    "conv1d": lambda: (convolutions(nn.Conv1d, nn.BatchNorm1d, 16), torch.randn(8, 16, 60)),
    "conv3d": lambda: (convolutions(nn.Conv3d, nn.BatchNorm3d, 4), torch.randn(2, 4, 9, 9, 9)),
}


WEIGHTS = torch.randn(1 << 17, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", ODD)
def test_odd_models_keep_loss_and_gradients(name):
    model, *inputs = ODD[name]()
    exact = copy.deepcopy(model)
    want = weighted(exact(*inputs))
    want.backward()
    options = {"recipe": "int8", "min_gain": 0}
    got, _ = hot_step(lambda *x: weighted(model(*x)), *inputs, options=options)
    torch.testing.assert_close(got, want.detach(), rtol=2e-2, atol=1e-3)
    largest = max(p.grad.norm() for p in exact.parameters())
    for mine, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        if theirs.grad.norm() > 1e-4 * largest:  # not a bias before a norm: its gradient is noise
            assert cosine(*map(as_real, (mine.grad, theirs.grad))) > 0.98


def as_real(x):
    return torch.view_as_real(x) if x.is_complex() else x


def weighted(out):
    """A scalar that depends on every entry of ``out`` in its own way."""
    return (out * WEIGHTS[: out.numel()].view_as(out)).sum()


@LOWERED
def test_hooks_run_and_count(lower):
    model, seen = Net(), []
    model.b.register_forward_hook(lambda module, args, out: out * 1.5)
    model.b.register_full_backward_hook(lambda module, g_in, g_out: seen.append(g_in))
    model.a.weight.register_hook(lambda g: g * 2)
    model.c.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    rewritten = check(model, lower=lower)
    assert sum(rewritten) >= 2  # torch 2.11 leaves the module with a backward hook to eager
    assert len(seen) == 2  # exact's and ours


def test_functional_call_and_per_sample_gradients():
    model, x = Net(), torch.randn(16, 128)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters, x):
        return torch.func.functional_call(model, parameters, (x,)).square().mean()

    def gradients(parameters, x):
        per_sample = torch.vmap(torch.func.grad(loss), (None, 0))
        return torch.func.grad(loss)(parameters, x), per_sample(parameters, x)

    want = gradients(parameters, x)
    got = torch.compile(gradients, backend=UNCOMPILED)(parameters, x)
    for mine, theirs in zip(got, want, strict=True):
        for name in parameters:
            assert cosine(mine[name], theirs[name]) > 0.98

    leaves = {name: p.clone().requires_grad_() for name, p in parameters.items()}
    compiled = torch.compile(loss, backend=UNCOMPILED)
    for g, name in zip(
        torch.autograd.grad(compiled(leaves, x), list(leaves.values())), leaves, strict=True
    ):
        assert cosine(g, want[0][name]) > 0.98


@pytest.mark.parametrize("scale", [2.0**10, 2.0**60])
def test_gradient_scaler_steps_or_skips(scale):
    model, x = Net(), torch.randn(64, 128)
    compiled = torch.compile(model, backend=UNCOMPILED)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    before = copy.deepcopy(model.state_dict())
    with torch.autocast("cpu", torch.float16):
        loss = compiled(x).float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    overflowed = scale > 2.0**50
    assert (scaler.get_scale() < scale) is overflowed
    moved = [not torch.equal(p, before[name]) for name, p in model.named_parameters()]
    assert not any(moved) if overflowed else all(moved)


def test_batches_of_any_size_share_a_dynamic_graph():
    model, exact = Net(), Net()
    exact.load_state_dict(model.state_dict())
    reports = Reports()
    backend = functools.partial(hot, options=ALWAYS, recorder=reports, inner_compile=run_uncompiled)
    compiled = torch.compile(model, backend=backend, dynamic=True)
    for batch in (64, 7, 100, 1, 300):
        x = torch.randn(batch, 128)
        for one, forward in ((model, compiled), (exact, exact)):
            one.zero_grad()
            forward(x).square().mean().backward()
        for mine, theirs in zip(model.parameters(), exact.parameters(), strict=True):
            assert cosine(mine.grad, theirs.grad) > 0.98
    assert len(reports.graphs) <= 2  # any batch, and torch's own special case of one


def test_double_backward_is_refused_as_by_inductor():
    x = torch.randn(64, 128, requires_grad=True)
    y = torch.compile(Net(), backend="hot", options=ALWAYS)(x).square().mean()
    (g,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        g.square().sum().backward()


@pytest.mark.parametrize(
    ("optimizer", "ours"),
    [
        (torch.optim.SGD, functools.partial(hot, inner_compile=run_uncompiled)),
        pytest.param(torch.optim.SGD, hot, marks=pytest.mark.slow),
        pytest.param(torch.optim.AdamW, hot, marks=pytest.mark.slow),
    ],
)
def test_a_step_compiled_whole_with_its_optimizer(optimizer, ours):
    losses = {}
    for name, backend in (("eager", "eager"), ("hot", ours)):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, x = Net(), torch.randn(64, 128)
        update = optimizer(model.parameters(), 1e-2)

        @torch.compile(backend=backend)
        def train(x, model=model, update=update):
            loss = F.mse_loss(model(x), x)
            loss.backward()
            update.step()
            update.zero_grad()
            return loss.detach()

        losses[name] = [train(x).item() for _ in range(3)]
    assert losses["hot"] == pytest.approx(losses["eager"], rel=1e-2)
    assert losses["hot"][-1] < losses["hot"][0]


def test_checkpoints_are_the_models_own(tmp_path):
    model = Net()
    names = list(model.state_dict())
    model.compile(backend=UNCOMPILED)
    model(torch.randn(64, 128)).sum().backward()
    assert list(model.state_dict()) == names
    torch.save(model.state_dict(), tmp_path / "model.pt")
    other = Net()
    other.load_state_dict(torch.load(tmp_path / "model.pt"))
    x = torch.randn(5, 128)
    torch.testing.assert_close(other(x), model(x))


def test_accelerate_trains_a_model_compiled_in_place():
    accelerate = pytest.importorskip("accelerate")
    model, x = Net(), torch.randn(64, 128)
    model.compile(backend=UNCOMPILED)
    helper = accelerate.Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    prepared, optimizer = helper.prepare(model, optimizer)
    losses = []
    for _ in range(6):
        with helper.accumulate(prepared):
            loss = F.mse_loss(prepared(x).float(), x)
            helper.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert list(helper.unwrap_model(prepared).state_dict()) == list(Net().state_dict())
