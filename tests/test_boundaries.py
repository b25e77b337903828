"""``hot_compile.checkpoint``: what checkpoints around compiled blocks keep is stored rounded."""

import functools

import pytest
import torch
from samples_storage import ALL, Block
from torch import nn
from torch.utils.checkpoint import checkpoint as torchs

import hot_compile
from hot_compile import boundaries
from hot_compile.backend import hot
from hot_compile.errors import OptionError
from hot_compile.record import run_uncompiled
from hot_compile.runtime import host_copies
from hot_compile.testing import cosine

EXACT_LAYERS = {**ALL, "override": {"*": "exact"}}
BLOCKS = functools.partial(hot, options=EXACT_LAYERS, inner_compile=run_uncompiled)


@pytest.fixture(autouse=True)
def _packed_node_by_node(monkeypatch, fresh_dynamo):
    monkeypatch.setattr(boundaries, "_compiled", lambda graph: graph)
    boundaries._coder.cache_clear()
    yield
    boundaries._coder.cache_clear()


def gradients(model, x, checkpoint, **options):
    """(gradients by name, bytes that checkpoints kept) of blocks that are compiled one by one."""
    model.zero_grad()
    kept = []

    def saved(tensor):
        kept.append(tensor)
        return tensor

    y = x.detach().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(saved, lambda tensor: tensor):
        for block in model:
            y = checkpoint(torch.compile(block, backend=BLOCKS), y, **options)
    y.square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}, kept


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_are_those_of_a_point_nearby(reentrant):
    torch.manual_seed(0)
    model, x = nn.Sequential(Block(causal=True), Block(causal=True)), torch.randn(4, 48, 128)
    x[..., [3, 70]] *= 100
    want, kept = gradients(model, x, torchs, use_reentrant=reentrant)
    assert sum(t.shape == x.shape for t in kept) >= 2
    closest = []
    for bits in (6, 8, 12):
        given = {"use_reentrant": reentrant, "bits": bits}
        got, kept = gradients(model, x, hot_compile.checkpoint, **given)
        assert not [t for t in kept if t.shape == x.shape], "our hooks stand inside"
        closest.append(min(cosine(got[name], want[name]) for name in want))
    assert closest == sorted(closest)
    assert closest[0] > 0.98
    assert closest[-1] > 0.9999


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [6, 8, 12])
def test_what_is_kept_is_as_small_as_it_says(bits, dtype):
    for rows in (64, 96):
        x = torch.randn(8, rows, 128).to(dtype)
        packed = boundaries._Packed.of(x, bits, host=False)
        assert sum(part.nbytes for part in packed.parts) == x.numel() * bits // 8 + x.numel() // 64
        back = packed.restored()
        assert (back.shape, back.dtype) == (x.shape, dtype)
        assert cosine(back, x) > {6: 0.998, 8: 0.9999, 12: 0.99999}[bits]


def test_in_host_memory_it_is_the_same():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(128, 128), nn.Tanh()), torch.randn(4, 64, 128)
    here, _ = gradients(model, x, hot_compile.checkpoint, use_reentrant=False)
    there, _ = gradients(model, x, hot_compile.checkpoint, use_reentrant=False, host=True)
    for name in here:
        assert torch.equal(here[name], there[name])


def test_copies_back_begin_one_region_ahead(monkeypatch):
    """Of the region that the backward comes to next, before this one is computed again."""
    log, start = [], boundaries._Packed.start
    monkeypatch.setattr(
        boundaries._Packed, "start", lambda self: (log.append(("copy", id(self))), start(self))
    )
    weights = [torch.randn(128, 128, requires_grad=True) for _ in range(3)]

    def region(n):
        def compute(x):
            log.append(("region", n))
            return (x @ weights[n] / 12).tanh(), n

        return compute

    x = torch.randn(4, 64, 128, requires_grad=True)
    for n in range(3):
        x, _ = hot_compile.checkpoint(region(n), x, use_reentrant=False, host=True)
    assert log == [("region", n) for n in range(3)]
    del log[:]
    x.sum().backward()
    told = [what if what == "region" else "copy" for what, _ in log]
    assert told == ["copy", "copy", "region", "copy", "copy", "region", "copy", "region"]
    asked = [key for what, key in log if what == "copy"]
    assert asked[1] == asked[2], "begun ahead, taken later"
    assert asked[3] == asked[4]


@pytest.mark.gpu
def test_on_a_gpu_copies_back_are_under_way_when_wanted(monkeypatch):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(128, 128), nn.Tanh()).cuda() for _ in range(6)]
    x, found, taken = torch.randn(64, 128, 128, device="cuda"), [], []
    take = host_copies._Coming.take
    monkeypatch.setattr(
        host_copies._Coming, "take", lambda self: taken.append(take(self)) or taken[-1]
    )
    for host in (False, True):
        y = x.clone().requires_grad_()
        for block in blocks:
            block.zero_grad()
            y = hot_compile.checkpoint(block, y, use_reentrant=False, host=host)
        y.square().mean().backward()
        found.append([p.grad.clone() for block in blocks for p in block.parameters()])
    assert all(map(torch.equal, *found))
    assert len(taken) == len(blocks)
    assert all(taken)


@pytest.mark.parametrize(
    "unfit",
    [
        torch.randn(4, 64, 128),  # a mask, or angles: it wants no gradient
        torch.randn(4, 8, 128, requires_grad=True),
        torch.randn(4, 101, 101, requires_grad=True),
        torch.randn(64, 4, 128).transpose(0, 1).requires_grad_(),
        torch.randn(4, 64, 128, dtype=torch.float64, requires_grad=True),
    ],
)
def test_what_does_not_fit_is_kept_as_it_is(unfit, monkeypatch):
    monkeypatch.setattr(boundaries._Packed, "of", None)
    link, found = torch.randn((), requires_grad=True), []
    for checkpoint in (hot_compile.checkpoint, torchs):
        link.grad = None
        checkpoint(lambda x: (x * link).tanh(), unfit, use_reentrant=False).sum().backward()
        found.append(link.grad)
    assert torch.equal(*found), "torch's own, to the bit"


def test_a_graph_compiled_as_a_whole_decides_itself():
    torch.manual_seed(0)
    block, x = nn.Linear(128, 128), torch.randn(4, 64, 128, requires_grad=True)

    def loss(x):
        return hot_compile.checkpoint(block, x, use_reentrant=False).square().mean()

    torch.compile(loss, backend="aot_eager", fullgraph=True)(x).backward()
    got = x.grad.clone()
    x.grad = None
    loss(x).backward()
    assert cosine(got, x.grad) > 0.999


def test_a_library_s_model_is_changed_in_place():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
    more = {"num_hidden_layers": 3, "num_key_value_heads": 2, "vocab_size": 128}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **more)).train()
    ids = torch.randint(0, 128, (4, 48))
    with pytest.raises(OptionError, match="gradient_checkpointing_enable"):
        hot_compile.compress_boundaries(model)
    found = []
    for bits in (None, 6):
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
        if bits:
            assert hot_compile.compress_boundaries(model, bits=bits) >= 3
        model.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})
    want, got = found
    differ = [name for name in want if not torch.equal(want[name], got[name])]
    assert any("layers.1" in name for name in differ)
    assert min(cosine(got[name], want[name]) for name in want) > 0.98


def test_other_bits_are_an_error():
    with pytest.raises(OptionError, match=r"got bits=7; expected one of \[6, 8, 12\]"):
        hot_compile.checkpoint(torch.sin, torch.randn(4), bits=7)
