"""Real convolutional models, a few steps into training: every convolution is rewritten or refused
with a reason, and gradients are close to exact.
"""

import copy
import functools

import pytest
import torch
from samples_models import WithLoss, digit_batch, warm
from torch import nn

from hot_compile.backend import hot
from hot_compile.inspect import run_uncompiled
from hot_compile.memory import held_bytes
from hot_compile.testing import cosine, hot_step

timm = pytest.importorskip("timm")


SIZES = {
    "resnet18": 64,
    "resnet50": 64,
    "convnext_tiny": 64,
    "efficientformer_l1": 224,  # its attention has one fixed size
    "efficientnetv2_s": 64,
    "regnetx_002": 64,
    "mobilenetv3_small_100": 64,
}
MODELS = [
    pytest.param(name, marks=[] if name == "resnet18" else [pytest.mark.slow]) for name in SIZES
]


def build(name):
    size = SIZES[name]
    model = timm.create_model(name, num_classes=10, drop_path_rate=0.0)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return WithLoss(model.to(memory_format=torch.channels_last)), digit_batch(size, 4)


def norm(gradients):
    return torch.stack([g.norm() for g in gradients]).norm()


@pytest.fixture(scope="module", params=MODELS)
def trained(request):
    torch.manual_seed(0)
    model, inputs = build(request.param)
    warm(model, inputs, steps=6)
    exact = copy.deepcopy(model)
    exact(*inputs).backward()
    return model, inputs, {name: p.grad for name, p in exact.named_parameters()}


@pytest.mark.parametrize(
    ("recipe", "floor"), [pytest.param("int8", 0.98, marks=pytest.mark.slow), ("hot", 0.95)]
)
def test_every_convolution_is_rewritten_or_refused(trained, recipe, floor):
    model, inputs, exact = trained
    model = copy.deepcopy(model)
    options = {"recipe": recipe, "min_gain": 0}
    _, (graph,) = hot_step(model, *inputs, options=options)
    decisions = {d.site.split("#")[0]: d for d in graph.plan}
    convolutions = {n: m for n, m in model.named_modules() if isinstance(m, nn.Conv2d)}
    first = next(iter(convolutions))
    for name, module in convolutions.items():
        d = decisions[name]
        if module.groups > 1:
            assert "left alone, as in the paper" in d.reason, name
        elif name == first:
            assert "first convolution" in d.reason
        else:
            assert d.strategy == "int8", (name, d.reason)
    whole = norm(exact.values())
    for name, parameter in model.named_parameters():
        if exact[name].norm() > 1e-4 * whole:  # e.g. a bias before a norm: its gradient is zero
            assert cosine(parameter.grad, exact[name]) >= floor, name


@pytest.mark.parametrize(("strategy", "exact"), [("gw-only", "input"), ("gx-only", "weight")])
@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(8, 8, 3, padding=1),
        nn.Conv2d(8, 16, 3, stride=2),
        nn.Conv2d(8, 8, 2, stride=3, dilation=2),
        nn.ConvTranspose2d(8, 16, 3, stride=2, padding=1),
    ],
    ids=lambda layer: type(layer).__name__ + str(layer.stride[0]),
)
def test_of_one_integer_product_the_other_gradient_is_exact(layer, strategy, exact):
    """As a repair leaves it: of as many inputs as outputs, too, where shapes tell no mistake."""
    torch.manual_seed(0)
    layer, x = copy.deepcopy(layer), torch.randn(4, 8, 12, 9, requires_grad=True)
    weight = torch.randn_like(layer(x))
    (layer(x) * weight).sum().backward()
    want = {"input": x.grad.clone(), "weight": layer.weight.grad.clone()}
    x.grad = layer.weight.grad = None
    options = {"override": {"*": strategy}, "min_gain": 0, "memory": "off"}
    net = nn.Sequential(layer)
    _, (report,) = hot_step(lambda x: (net(x) * weight).sum(), x, options=options)
    assert [str(d.strategy) for d in report.plan.rewritten] == [strategy]
    got = {"input": x.grad, "weight": layer.weight.grad}
    torch.testing.assert_close(got[exact], want[exact], rtol=1e-4, atol=1e-4)
    assert min(cosine(got[name], want[name]) for name in want) > 0.99


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lcnet_050", "cpubone_nano", "efficientvit_b0"])
def test_light_models_hold_less_than_two_fifths(name):
    """Depthwise convolutions and Hardswishes: rules once kept nearly all of it exact."""
    model, x, held = timm.create_model(name, num_classes=10), torch.randn(16, 3, 96, 96), []
    for exact in ({"recipe": "exact"}, {}):
        torch._dynamo.reset()
        options = {"accept": "off", **exact}
        backend = functools.partial(hot, options=options, inner_compile=run_uncompiled)
        loss = torch.compile(model, backend=backend)(x).square().mean()
        held.append(held_bytes(loss, model, x))
    assert held[1] < 0.4 * held[0]
