"""LoRA: the frozen base gets g_x only and saves nothing, the low-rank factors stay exact."""

import pytest
import torch
from torch import nn

from hot_compile.testing import cosine, hot_step

ALWAYS = {"min_gain": 0, "keep_head": False}


class Lora(nn.Module):
    """A frozen Linear and two factors beside it, as anybody would write it."""

    def __init__(self, inputs, outputs, rank=8, names=("lora_A", "lora_B")):
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.names = names
        setattr(self, names[0], nn.Linear(inputs, rank, bias=False))
        setattr(self, names[1], nn.Linear(rank, outputs, bias=False))

    def forward(self, x):
        down, up = (getattr(self, name) for name in self.names)
        return self.base(x) + up(down(x))


def gradients(model, x, options):
    model.zero_grad()
    _, (graph,) = hot_step(lambda x: model(x).square().mean(), x, options={**ALWAYS, **options})
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}, graph


@pytest.fixture
def model_and_x():
    torch.manual_seed(0)
    model = nn.Sequential(Lora(128, 192), nn.GELU(), Lora(192, 128), nn.GELU(), nn.Linear(128, 96))
    return model, torch.randn(256, 128)


@pytest.mark.parametrize("names", [("lora_A", "lora_B"), ("down", "up")])
@pytest.mark.parametrize("recipe", ["hot", "fast", "paper"])
def test_handwritten(recipe, names):
    """Recognised by name, or by shape: min(O, I) small next to the other."""
    torch.manual_seed(0)
    model = nn.Sequential(Lora(128, 192, names=names), nn.GELU(), Lora(192, 128, names=names))
    x = torch.randn(256, 128)
    exact, _ = gradients(model, x, {"recipe": "exact"})
    got, graph = gradients(model, x, {"recipe": recipe})
    plan = {d.site: d for d in graph.plan}
    assert plan["2.base"].strategy == "gx-only"
    assert plan["2.base"].bytes_before == 0
    for factor in names:
        for layer in ("0", "2"):
            assert plan[f"{layer}.{factor}"].strategy == "exact"
            assert "low-rank factor" in plan[f"{layer}.{factor}"].reason
    if recipe != "paper":
        assert all(cosine(got[name], exact[name]) > 0.99 for name in exact)


def test_the_frozen_base_saves_nothing_of_its_input(model_and_x):
    """Only what the factors and GELU need crosses: the base adds no tensor of its own."""
    model, x = model_and_x
    _, frozen = gradients(model, x, {"recipe": "hot"})
    assert not [c for c in frozen.crossing if c.packed and c.module.endswith("base")]
    _, exact = gradients(model, x, {"recipe": "exact"})
    assert frozen.held_bytes <= exact.held_bytes


def test_an_adapter_s_own_copy_of_a_gate_s_result_is_made_again():
    """peft keeps adapters in fp32 over a base in bf16: x is cast behind the frozen product."""

    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up, self.down = (Cast(*s) for s in ((96, 256), (96, 256), (256, 96)))

        def forward(self, x):
            return self.down(nn.functional.silu(self.gate(x)) * self.up(x))

    class Cast(Lora):
        def forward(self, x):
            down, up = (getattr(self, name) for name in self.names)
            return self.base(x) + up(down(x.float())).to(x.dtype)

    torch.manual_seed(0)
    model = Gated()
    for layer in (model.gate, model.up, model.down):
        layer.base.bfloat16()
    x = torch.randn(2, 128, 96).bfloat16()
    exact, _ = gradients(model, x, {"recipe": "exact"})
    got, graph = gradients(model, x, {"memory_min_bytes": 0})
    assert all(cosine(got[name], exact[name]) > 0.99 for name in exact)
    wide = [crossing.module for crossing in graph.crossing if crossing.shape[-1] == "256"]
    assert sorted(wide) == ["gate", "up"]  # not down's x


def test_override_quantises_the_factors_all_the_same(model_and_x):
    """Needed to reproduce the paper's table 3, where doing so collapses accuracy."""
    model, x = model_and_x
    exact, _ = gradients(model, x, {"recipe": "exact"})
    options = {"recipe": "paper", "override": {"*lora_*": "hla8"}}
    got, graph = gradients(model, x, options)
    plan = {d.site: str(d.strategy) for d in graph.plan}
    assert {plan[f"{layer}.lora_{f}"] for layer in (0, 2) for f in "AB"} == {"hla8"}
    assert cosine(got["0.lora_A.weight"], exact["0.lora_A.weight"]) < 0.9


def test_peft():
    peft = pytest.importorskip("peft")

    class Mlp(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(128, 192), nn.Linear(192, 128)

        def forward(self, x):
            return self.fc2(torch.nn.functional.gelu(self.fc1(x)))

    torch.manual_seed(0)
    config = peft.LoraConfig(r=8, target_modules=["fc1", "fc2"], lora_dropout=0.0)
    model = peft.get_peft_model(Mlp(), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # zero at first, so that nothing reaches lora_A
                parameter.normal_(std=0.1)
    x = torch.randn(256, 128)
    exact, _ = gradients(model, x, {"recipe": "exact"})
    got, graph = gradients(model, x, {"recipe": "hot"})
    plan = {d.site: str(d.strategy) for d in graph.plan}
    stem = "base_model.model.fc2"
    assert plan[f"{stem}.base_layer"] == "gx-only"
    assert plan[f"{stem}.lora_A.default"] == plan[f"{stem}.lora_B.default"] == "exact"
    assert len(exact) == 4
    assert all(cosine(got[name], exact[name]) > 0.99 for name in exact)
