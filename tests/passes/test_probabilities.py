"""Of a softmax in fp32 the 16 bits are kept that the forward's product reads."""

import pytest
import torch
from samples_graphs import given
from samples_storage import crossing
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from hot_compile.passes.base.emit import Emitter
from hot_compile.passes.storage.bounds import sums_to_one
from hot_compile.passes.storage.probabilities import _divided_by_sums
from hot_compile.testing import cosine

HEADS, TOKENS, WIDTH = 4, 48, 64


def masked(scores, bias):
    keep = torch.ones(TOKENS, TOKENS, dtype=torch.bool, device=scores.device).tril()
    return scores.float() * 0.25 + torch.where(keep, 0.0, -3e38)


def masked_behind(p):
    """Rows that do not sum to 1."""
    return p.masked_fill(torch.arange(TOKENS, device=p.device) % 3 > 0, 0.0)


def capped(scores, bias):
    return torch.tanh(scores / 50) * 50


class Attention(nn.Module):
    """Written by hand, with a softmax in fp32."""

    def __init__(self, scores, read=lambda p: p):
        super().__init__()
        self.scores, self.read = scores, read
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.randn(HEADS, TOKENS, TOKENS))

    def forward(self, x):
        parts = self.qkv(self.norm(x)).view(-1, TOKENS, 3, HEADS, WIDTH // HEADS)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        p = torch.softmax(self.scores(q @ k.mT, self.bias), -1, dtype=torch.float32)
        mixed = self.read(p).to(v.dtype) @ v
        return x + self.out(mixed.transpose(1, 2).reshape(x.shape))


def squares(model):
    def loss(x):
        with torch.autocast(x.device.type, torch.bfloat16):
            return model(x).float().square().mean()

    return loss


def what_crosses(model, device="cpu", **options):
    """What is as large as probabilities and crosses; gradients are right."""
    x = torch.randn(2, TOKENS, WIDTH).to(device)
    loss = squares(model.to(device))
    loss(x).backward()
    exact = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    found = crossing(loss, x, **options)
    for name, p in model.named_parameters():
        got, want = p.grad, exact.get(name)
        if name.endswith("qkv.bias"):  # that of keys is rounding: a softmax ignores what rows share
            got, want = (t.view(3, -1)[[0, 2]] for t in (got, want))
        if want is not None and want.norm() > 0:
            assert cosine(got, want) > 0.99, name
    square = (HEADS * TOKENS * TOKENS * 2, HEADS * TOKENS * TOKENS * 4)
    return [c for c in found if c.bytes_before // 2 in square]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("recompute", [True, False])  # or the copy is saved beside the scores
def test_the_forwards_copy_crosses_in_the_place_of_scores(device, recompute):
    torch.manual_seed(0)
    for scores in (masked, lambda s, bias: s / 8 + bias):
        model = nn.Sequential(Attention(scores), Attention(scores))
        found = what_crosses(model, device, recompute=recompute)
        assert [(c.dtype, c.scheme) for c in found] == [("bfloat16", "exact")] * 2
        assert all(c.name.startswith("convert_element_type") for c in found), found


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(lambda: Attention(capped), id="scores are read again"),
        pytest.param(lambda: Attention(masked, lambda p: p * p.detach()), id="not what is read"),
        pytest.param(lambda: Attention(masked, masked_behind), id="masked behind it"),
    ],
)
def test_it_does_not_where_that_frees_nothing(model):
    torch.manual_seed(0)
    assert not any("convert" in c.name and c.dtype == "bfloat16" for c in what_crosses(model()))


def test_a_budget_is_met_by_fewer_bits():
    torch.manual_seed(0)
    model = nn.Sequential(Attention(masked), Attention(masked))
    found = what_crosses(model, memory_budget=0.95)
    assert not any(c.name.startswith("convert_element_type") for c in found), found


def softmax_gradient(p, g):
    return p * (g - (g * p).sum(-1, keepdim=True))


def test_rows_sum_to_one_again_so_that_what_gradients_share_does_not_come_through():
    graph = fx.Graph()
    [rounded] = given(graph, {"p": ((8, 64), torch.bfloat16)})
    end = graph.output(rounded)
    end.replace_input_with(rounded, _divided_by_sums(Emitter(graph, end, rounded), rounded))
    torch.manual_seed(0)
    exact = torch.softmax(torch.randn(8, 64) * 3, -1)
    p = exact.bfloat16()
    again = fx.GraphModule({}, graph)(p)
    g = 100 + torch.randn(8, 64)
    want = softmax_gradient(exact.double(), g.double())
    off = [float((softmax_gradient(t, g) - want).norm() / want.norm()) for t in (p.float(), again)]
    assert off[1] < 0.01 < 10 * off[1] < off[0]


def test_nothing_but_a_softmax_over_the_last_dimension_sums_to_one():
    def step(x, keep):
        powers, ones = x.exp(), torch.ones(())
        total = powers.sum(-1, True)
        over = powers / total
        others = (
            *(powers / powers.sum(0, True), powers / x.sum(-1, True), powers, over + over),
            *(torch.where(keep, over, 0.0), x / x.sum(-1, True), powers / powers.sum(-1)),
            *(powers / powers.sum((0, 1), True), powers / (total * ones)),
        )
        return over, *others

    inputs = torch.randn(64, 64), torch.rand(64, 64) > 0.5
    graph = make_fx(step, tracing_mode="fake")(*inputs).graph
    found = [sums_to_one(node) for node in graph.output_node().args[0]]
    assert found == [True] + [False] * 9
