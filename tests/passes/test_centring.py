"""Data whose rows have much in common, and something behind that takes it away: exact between."""

import pytest
import torch
from samples_storage import ALL
from torch import nn
from torch.nn import functional as F

from hot_compile.passes.storage.centring import CENTRED, _reshaped
from hot_compile.testing import cosine, hot_step

ROWS, WIDTH = 256, 32
OPTIONS = {**ALL, "memory_min_bytes": 0}


class Call(nn.Module):
    """A function as a layer."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def deviations(mean):
    """Columns whose mean is so many deviations, of either sign."""
    torch.manual_seed(0)
    return torch.randn(ROWS, WIDTH) + mean * torch.ones(WIDTH).copysign(torch.randn(WIDTH))


def years():
    """Normalised columns, but one."""
    x = deviations(0.0)
    x[:, 0] = 2000 + 10 * torch.randn(ROWS)
    return x


DATA = {"thirty": lambda: deviations(30.0), "hundred": lambda: deviations(100.0), "years": years}


def tabular(act=None, norm=None):
    """Two layers on data, a norm behind them, two more."""
    torch.manual_seed(1)
    return nn.Sequential(
        *(nn.Linear(WIDTH, 64), act or nn.ReLU(), nn.Linear(64, 48), norm or nn.BatchNorm1d(48)),
        *(nn.ReLU(), nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 10)),
    )


def compared(model, x, function=None, **kwargs):
    """(cosine of each weight's gradient with exact's, decisions by name, what crosses)."""
    torch.manual_seed(2)
    function = function or (lambda x: F.cross_entropy(model(x).flatten(1)[:, :10], y))
    y = torch.randint(10, (len(x),))
    function(x).backward()
    exact = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    _, reports = hot_step(function, x, **{"options": OPTIONS, **kwargs})
    assert reports
    weights = {n: g for n, g in exact.items() if g.dim() > 1}
    found = {n: cosine(model.get_parameter(n).grad, g) for n, g in weights.items()}
    decisions = {d.site: d for report in reports for d in report.plan}
    return found, decisions, [c for report in reports for c in report.crossing]


def kept(decisions):
    """Names of the layers that stay exact for this reason."""
    return {name for name, d in decisions.items() if d.reason == CENTRED}


@pytest.mark.parametrize(
    ("data", "act"),
    [
        *((data, act) for data in DATA for act in (nn.ReLU(), nn.GELU())),
        *(("hundred", act) for act in (nn.SiLU(), nn.Mish(), nn.ELU(), nn.Identity())),
    ],
)
def test_layers_between_data_and_a_batch_norm(data, act):
    found, decisions, crossing = compared(tabular(act), DATA[data]())
    assert min(found[name] for name in ("0.weight", "2.weight")) > 0.999, found
    assert min(found.values()) > 0.99, found
    assert kept(decisions) == {"0", "2"}
    assert decisions["5"].strategy != "exact"
    assert {c.scheme for c in crossing} - {"exact", "bits"}  # behind the norm all is as usual


@pytest.mark.slow
@pytest.mark.parametrize("data", ["hundred", "thirty", "years"])
def test_as_it_is_lowered(data):
    found, decisions, _ = compared(tabular(nn.GELU())[:6], DATA[data](), lower=True)
    assert min(found.values()) > 0.999, found
    assert kept(decisions) == {"0", "2"}


def test_raw_columns_beside_normalised_ones():
    first, second = nn.BatchNorm1d(WIDTH // 2), tabular()
    model = nn.Sequential(
        Call(lambda x: torch.cat([first(x[:, : WIDTH // 2]), x[:, WIDTH // 2 :]], 1)), second
    )
    found, decisions, _ = compared(model, deviations(100.0))
    assert min(found.values()) > 0.999, found
    assert len(kept(decisions)) == 2


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.InstanceNorm1d])
def test_convolutions(norm):
    torch.manual_seed(1)
    layers = (nn.Conv1d(4, 32, 3, padding=1), nn.ReLU(), nn.Conv1d(32, 48, 3, padding=1))
    model = nn.Sequential(*layers, norm(48), nn.ReLU(), nn.Conv1d(48, 10, 1), nn.Flatten())
    x = torch.randn(32, 4, 24) + 100
    found, decisions, _ = compared(model, x)
    assert min(found.values()) > 0.999, found
    assert "2" in kept(decisions)


TAKEN = {
    "a mean": lambda y: y - y.mean(0),
    "a sum over rows": lambda y: y - y.sum(0, keepdim=True) / len(y),
    "standardised": lambda y: (y - y.mean(0)) / y.std(0),
    "a softmax over rows": lambda y: y.softmax(0),
    "a log softmax over rows": lambda y: y.log_softmax(0),
    "distances": lambda y: (y.unsqueeze(0) - y.unsqueeze(1)).square().sum(-1),
    "neighbouring rows": lambda y: (v := y.unflatten(0, (16, -1)))[:, 1:] - v[:, :-1],
    "a deviation": lambda y: (1 - y.std(0)).relu(),
    "rows of one sample": lambda y: (v := y.unflatten(0, (16, -1))) - v.mean(1, keepdim=True),
    "transposed": lambda y: F.batch_norm(y.unflatten(0, (16, -1)).mT, None, None, training=True),
    "logits": lambda y: (y @ y.t() / 64).softmax(-1),
}
LEFT = {
    "nothing": lambda y: y,
    "a layer norm": lambda y: F.layer_norm(y, (64,)),
    "a softmax over outputs": lambda y: y.softmax(-1),
    "a mean over outputs": lambda y: y - y.mean(-1, keepdim=True),
    "parts of the outputs": lambda y: y[:, :32] - y[:, 32:],
    "a statistic of all": lambda y: y - y.mean(),
    "a mean of rows": lambda y: y.mean(0),
    "running statistics": lambda y: F.batch_norm(y, torch.zeros(64), torch.ones(64)),
    "a group norm": lambda y: F.group_norm(y, 4),
    "a way beside the norm": lambda y: y + F.batch_norm(y, None, None, training=True),
    "hand-written attention": lambda y: (y @ y.t() / 64).softmax(-1) @ y,
}


def pointed(model, function, x):
    """What the rule says, and gradients, with ``function`` behind a layer and a ReLU of it."""
    torch.manual_seed(3)
    weight = torch.randn_like(function(model(x)))
    return compared(model, x, lambda x: (function(model(x)) * weight).sum())


@pytest.mark.parametrize("name", TAKEN)
def test_what_takes_away_what_rows_have_in_common(name):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.LeakyReLU(), nn.Linear(64, 64))
    found, decisions, _ = pointed(model, TAKEN[name], deviations(30.0) / 30)
    assert min(found.values()) > 0.99, found
    assert kept(decisions) == {"0", "2"}


@pytest.mark.parametrize("name", LEFT)
def test_what_leaves_it(name):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.LeakyReLU(), nn.Linear(64, 64))
    found, decisions, _ = pointed(model, LEFT[name], deviations(3.0))
    assert min(found.values()) > 0.98, found
    assert not kept(decisions)


BEFORE = {
    "a batch norm": nn.BatchNorm1d(WIDTH),
    "a layer norm": nn.LayerNorm(WIDTH),
    "a tanh": nn.Tanh(),
    "a group norm": nn.GroupNorm(4, WIDTH),
}


@pytest.mark.parametrize("name", BEFORE)
def test_behind_a_bound_nothing_stays_exact(name):
    model = nn.Sequential(BEFORE[name], tabular())
    _, decisions, _ = compared(model, deviations(1.0))
    assert not kept(decisions)


class Attention(nn.Module):
    """One head on what ``norm`` makes of x; q, k and v each of a layer, or of one."""

    def __init__(self, norm, fused):
        super().__init__()
        self.norm, self.out = norm, nn.Linear(WIDTH, 10)
        if fused:
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        else:
            self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.fused = fused

    def forward(self, x):
        x = self.norm(x).unflatten(0, (8, 1, -1))
        parts = self.qkv(x).chunk(3, -1) if self.fused else (self.q(x), self.k(x), self.v(x))
        return self.out(F.scaled_dot_product_attention(*parts)).square().mean()


@pytest.mark.parametrize("dynamic", [False, True])
def test_sizes_that_are_not_known(dynamic):
    """A part of the rows whose end is a symbol, in front of a batch norm."""
    model = nn.Sequential(Call(lambda x: x[: x.shape[0] - 8]), tabular())
    x = deviations(100.0)
    found, decisions, _ = compared(model, x, lambda x: model(x).square().mean(), dynamic=dynamic)
    assert min(found.values()) > 0.99, found
    assert kept(decisions) == {"1.0", "1.2"}


@pytest.mark.parametrize("fused", [False, True])
def test_attention_on_data_and_behind_a_norm(fused):
    torch.manual_seed(1)
    model = Attention(nn.Identity(), fused)
    found, decisions, _ = compared(model, deviations(3.0), model)
    assert min(found.values()) > 0.99, found
    assert kept(decisions) == {"qkv" if fused else "k"}
    model = Attention(nn.LayerNorm(WIDTH), fused)
    assert not kept(compared(model, deviations(3.0), model)[1])


class Tokens(nn.Module):
    """A block on tokens and a class token, a head that ``norm`` begins."""

    def __init__(self, first, norm, token):
        super().__init__()
        self.first = first
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH) / 3) if token else None
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Sequential(nn.Linear(WIDTH, 64), norm, nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x):
        x = 0.1 * self.first(x.flatten(0, 1)).view(x.shape)
        if self.token is not None:
            x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        x = x + x[:, 1:].mean(1, keepdim=True)
        x = x + self.fc2(F.gelu(self.fc1(self.norm1(x))))
        return self.head(self.norm2(x)[:, 0])


BEHIND = {
    "a class token": (nn.Identity(), nn.BatchNorm1d(64), True, "rows8"),
    "a class token behind a batch norm": (nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(64), True, "rows8"),
    "data": (nn.Identity(), nn.BatchNorm1d(64), False, "rows8"),
    "a batch norm": (nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(64), False, "groups6"),
    "nothing takes it": (nn.Identity(), nn.LayerNorm(64), True, "groups6"),
}


@pytest.mark.parametrize("name", BEHIND)
def test_what_samples_have_in_common_behind_a_layer_norm(name):
    """Six bits of a GELU's input were a cosine of 0.93."""
    torch.manual_seed(1)
    *parts, scheme = BEHIND[name]
    options = {**OPTIONS, "recipe": "exact", "memory": "all"}
    found, decisions, crossing = compared(
        Tokens(*parts), torch.randn(64, 8, WIDTH), options=options
    )
    assert not kept(decisions)
    assert {c.scheme for c in crossing if c.module == "fc1"} == {scheme}
    assert min(found.values()) > 0.99, found


def test_an_override_is_followed():
    model, x = tabular(), deviations(0.0)
    options = {**OPTIONS, "override": {"0": "int8"}}
    _, (report,) = hot_step(lambda x: model(x).square().mean(), x, options=options)
    assert report.plan["0"].strategy == "int8"
    assert report.plan["2"].reason == CENTRED


@pytest.mark.parametrize(
    ("before", "after", "features", "found"),
    [
        ((12, 5), (3, 4, 5), {1}, {2}),
        ((3, 4, 5), (12, 5), {2}, {1}),
        ((4, 16, 9), (1, 64, 9), {1}, {1}),
        ((12, 6), (3, 4, 2, 3), {1}, {2, 3}),
        ((12, 6), (12, 6, 1, 1), {1}, {1}),
        ((4, 6, 1), (4, 6), {1}, {1}),
        ((0, 6), (0, 2, 3), {1}, set()),
    ],
)
def test_where_outputs_lie_in_a_view(before, after, features, found):
    assert _reshaped(before, after, frozenset(features)) == found
