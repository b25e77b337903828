"""Experts: rows in groups, each multiplied by a matrix of its own, as Transformers trains them."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hot_compile.testing import cosine, hot_step

ROWS, WIDTH, INNER, EXPERTS = 200, 96, 80, 4
ENDS = [30, 80, 140, ROWS]
STORED = {"memory": "all", "memory_min_bytes": 1024}
LEAST = 0.99
"""Of cosines: bfloat16 itself leaves 0.9997."""


class Experts(nn.Module):
    """A gated layer for each group of rows; gate and value lie side by side, or take turns.

    ``more`` rows follow that belong to no group, as where experts are on other devices: nobody
    writes what products make of them.
    """

    def __init__(self, in_turns=False, more=0):
        super().__init__()
        self.in_turns, self.more = in_turns, more
        self.first = nn.Linear(WIDTH, WIDTH)
        self.into = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * INNER) / WIDTH**0.5)
        self.out = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) / INNER**0.5)
        self.bias = nn.Parameter(torch.randn(EXPERTS, 2 * INNER))
        self.last = nn.Linear(WIDTH, 8)
        self.register_buffer("ends", torch.tensor(ENDS, dtype=torch.int32))
        counts = torch.tensor([end - start for start, end in zip([0, *ENDS], ENDS, strict=False)])
        self.register_buffer("expert", torch.arange(EXPERTS).repeat_interleave(counts))

    def forward(self, x):
        x = F.pad(self.first(x), (0, 0, 0, self.more), value=float("nan"))
        y = torch._grouped_mm(x, self.into, offs=self.ends)
        if self.in_turns:
            y = y + self.bias[self.expert]
            gate, value = y[:, ::2].clamp(max=7), y[:, 1::2].clamp(-7, 7)
            gated = (value + 1) * gate * torch.sigmoid(1.7 * gate)
        else:
            gate, value = y.chunk(2, -1)
            gated = F.silu(gate) * value
        return self.last(torch._grouped_mm(gated, self.out, offs=self.ends)[:ROWS])


class Batched(Experts):
    """The same where each expert has as many rows, as Llama 4's: products of batches."""

    def forward(self, x):
        x = self.first(x).view(EXPERTS, -1, WIDTH)
        gate, value = torch.bmm(x, self.into).chunk(2, -1)
        return self.last(torch.bmm(F.silu(gate) * value, self.out).view(ROWS, -1))


FORMS = {
    "side by side": (Experts, {}),
    "in turns": (Experts, {"in_turns": True}),
    "no expert's rows": (Experts, {"more": 8}),
    "as many rows each": (Batched, {}),
}


def made(form, device="cpu"):
    torch.manual_seed(0)
    kind, facts = FORMS[form]
    model = kind(**facts).to(device, torch.bfloat16)
    return model, torch.randn(ROWS, WIDTH).to(device, torch.bfloat16)


def loss_of(model):
    return lambda x: model(x).float().square().mean()


def gradients(model):
    return {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None}


def exact_gradients(model, x):
    model = copy.deepcopy(model).float()
    loss_of(model)(x.float()).backward()
    return gradients(model)


@pytest.mark.parametrize("form", FORMS)
def test_what_experts_keep_is_stored(form):
    model, x = made(form)
    _, (graph,) = hot_step(loss_of(model), x, options=STORED)
    kept = [c for c in graph.crossing if c.bytes_before > STORED["memory_min_bytes"]]
    assert {c.module for c in kept if c.scheme == "exact"} == {"last"}, "what the loss reads"
    assert sum(c.bytes for c in kept) < 0.6 * sum(c.bytes_before for c in kept)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "form", [pytest.param(f, marks=() if f == "side by side" else pytest.mark.slow) for f in FORMS]
)
def test_lowered_gradients_of_experts_are_right(form, device):
    gradients_are_right(form, device, lower=True)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_experts_are_right(form):
    gradients_are_right(form, "cpu", lower=False)


def gradients_are_right(form, device, lower):
    model, x = made(form, device)
    want = exact_gradients(model, x)
    hot_step(loss_of(model), x, options=STORED, lower=lower)
    for name, got in gradients(model).items():
        assert cosine(got, want[name]) > LEAST, name


@pytest.mark.parametrize("learned", ["distances", "queries"])
def test_attention_by_hand_is_no_layer(learned):
    """Nor are scores against what is made of parameters: DeBERTa's of distances, a Perceiver's of
    queries, which are the same for all samples."""
    torch.manual_seed(0)
    layer, last = nn.Linear(64, 64), nn.Linear(64, 8)
    table, queries = nn.Parameter(torch.randn(4, 32, 64)), nn.Parameter(torch.randn(1, 32, 64))
    x, distances = torch.randn(4, 32, 64), nn.Linear(64, 64)

    def loss(x):
        other = distances(table) if learned == "distances" else queries.expand(4, -1, -1)
        scores = torch.bmm(layer(x), other.transpose(1, 2))
        return last(torch.bmm(scores.softmax(-1), x)).square().mean()

    _, (graph,) = hot_step(loss, x, options=STORED)
    made = [c for c in graph.crossing if sorted(c.shape) == ["32", "4", "64"]]
    (read,) = (c for c in made if c.reason != "made of parameters only")
    assert "meets a softmax" in read.reason


def mixtral():
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, num_local_experts=4,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config), torch.randint(128, (2, 32))


def test_transformers_experts_in_fp32_are_known():
    """By an operator of that library's own, which PyTorch knows nothing of."""
    torch.manual_seed(0)
    model, ids = mixtral()
    model(input_ids=ids, labels=ids).loss.backward()
    want = gradients(model)
    model.zero_grad()
    _, graphs = hot_step(lambda x: model(input_ids=x, labels=x).loss, ids, options=STORED)
    kept = [c for graph in graphs for c in graph.crossing if c.module.endswith("experts")]
    large = [c for c in kept if c.dtype == "float32" and c.bytes_before > 1024]
    assert len(large) == 2, "both products: what lies between is made again, rows gathered"
    assert all(c.scheme != "exact" for c in large), large
    for name, got in gradients(model).items():
        assert cosine(got, want[name]) > LEAST, name
