"""Adapters as peft makes them, on frozen and on quantised bases: gradients and what is held."""

import functools

import pytest
import torch
from samples_looks import compiled
from samples_storage import ALL
from torch import nn
from torch.nn import functional as F

import hot_compile
from hot_compile.backend import hot
from hot_compile.record import Reports, run_uncompiled
from hot_compile.testing import cosine

peft = pytest.importorskip("peft")


class Words(nn.Module):
    """An embedding, attention whose q, k and v read one x, an MLP and a head."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(128, 128), nn.RMSNorm(128)
        self.q, self.k, self.v = (nn.Linear(128, 128, bias=False) for _ in range(3))
        self.up, self.down = nn.Linear(128, 256), nn.Linear(256, 128)
        self.head = nn.Linear(128, 128)

    def forward(self, ids):
        x = self.embed(ids)
        y = self.norm(x)
        q, k, v = (layer(y).unflatten(-1, (4, -1)).mT for layer in (self.q, self.k, self.v))
        x = x + F.scaled_dot_product_attention(q, k, v).mT.flatten(-2)
        return self.head(x + self.down(F.silu(self.up(x))))


def adapted(base=None, **config):
    """``base``, else ``Words``, with adapters of which none is zero."""
    torch.manual_seed(0)
    model = peft.get_peft_model(base or Words(), peft.LoraConfig(r=8, lora_dropout=0.0, **config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "embedding_A" in name:
                parameter.normal_(std=0.05)
    return model


def step(model, backend, length=48):
    """Gradients by name, of one step."""
    torch._dynamo.reset()
    model.zero_grad()
    ids = torch.randint(0, 128, (4, length), generator=torch.Generator().manual_seed(1))
    call = torch.compile(model, backend=backend) if backend else model
    F.cross_entropy(call(ids).flatten(0, 1), ids.flatten()).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def by_hot(model, lower=False):
    """(gradients, reports of the graphs); ``lower``: as Inductor's code."""
    reports = Reports()
    given = {} if lower else {"inner_compile": run_uncompiled}
    backend = functools.partial(hot, options=ALL, recorder=reports, **given)
    return step(model, backend), reports.graphs


PROJECTIONS = ["q", "k", "v", "up", "down"]


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": PROJECTIONS, "use_rslora": True},
        pytest.param(
            {"target_modules": PROJECTIONS, "use_dora": True},
            marks=pytest.mark.slow,  # its identity matrix is Inductor's alone
        ),
        {"target_modules": ["q", "embed", "head"]},
    ],
    ids=["rank-stabilised", "weight-decomposed", "embedding and head"],
)
def test_gradients_of_adapters(config):
    model = adapted(**config)
    want = step(model, None)
    got, graphs = by_hot(model, lower=config.get("use_dora", False))
    assert got.keys() == want.keys()
    assert all("lora" in name for name in got), "nothing frozen has a gradient"
    assert min(cosine(got[name], want[name]) for name in want) > 0.98
    if "use_dora" in config:
        return  # peft's own code breaks the graph at each layer, whose name is lost
    assert len(graphs) == 1, "no graph break"
    frozen = [d for d in graphs[0].plan if d.site.endswith("base_layer") and d.strategy != "exact"]
    assert {str(d.strategy) for d in frozen} == {"gx-only"}


def test_adapters_that_read_one_x_share_what_is_stored_of_it():
    for modules in (["q"], ["q", "k", "v"]):
        _, (graph,) = by_hot(adapted(target_modules=modules))
        given = [c for c in graph.crossing if c.shape == ("192", "128")]
        assert [(c.scheme, c.module) for c in given] == [
            ("groups6", "base_model.model.q.base_layer")
        ]


def four_bits(model):
    """bitsandbytes' NF4."""
    bnb = pytest.importorskip("bitsandbytes")
    for name in PROJECTIONS:
        layer = getattr(model, name)
        sizes = layer.in_features, layer.out_features, layer.bias is not None
        quantised = bnb.nn.Linear4bit(*sizes, torch.float32, quant_type="nf4")
        quantised.load_state_dict(layer.state_dict())
        setattr(model, name, quantised.to("cpu"))


def eight_bits(model):
    """torchao's INT8 weights, a scale a row."""
    quantization = pytest.importorskip("torchao.quantization")
    config = quantization.Int8WeightOnlyConfig()
    quantization.quantize_(model, config, lambda module, name: name in PROJECTIONS)


def adapted_on(quantise):
    """Adapters on a base that ``quantise`` changed."""
    torch.manual_seed(0)
    model = Words()
    quantise(model)
    return adapted(model, target_modules=PROJECTIONS)


@pytest.mark.parametrize("quantise", [four_bits, eight_bits])
def test_a_quantised_base_trains_its_adapters(quantise):
    """Its forward products are the library's, its gradients' are on INT8; the rest is stored."""
    model = adapted_on(quantise)
    want = step(model, None)
    got, graphs = by_hot(model)
    assert got.keys() == want.keys()
    assert min(cosine(got[name], want[name]) for name in want) > 0.98
    assert len(graphs) == 1, "no graph break"
    base = {d.site: d.way for d in graphs[0].plan if d.site.endswith(".base_layer")}
    assert base == {f"base_model.model.{name}.base_layer": "INT8 g_x" for name in ("up", "down")}
    crossing = [c for c in graphs[0].crossing if not c.packed]
    assert sum(c.bytes for c in crossing) < 0.7 * sum(c.bytes_before for c in crossing)


@pytest.mark.parametrize("quantise", [four_bits, eight_bits])
def test_gradients_of_adapters_on_a_quantised_base_are_looked_at(quantise):
    """torchao's weights are tensors of a class of their own."""
    model = adapted_on(quantise)
    call, ids = compiled(model), torch.randint(0, 128, (4, 48))
    F.cross_entropy(call(ids).flatten(0, 1), ids.flatten()).backward()
    found = hot_compile.certificate(call)
    assert (len(found.looks), found.unseen) == (1, {})
    assert 0 < found.errors.worst < 0.2
