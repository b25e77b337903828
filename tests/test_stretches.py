"""Looks in little memory, in stretches and heads in chunks; random numbers, nothing compiled."""

import contextlib
import functools

import pytest
import torch
import torch.nn.functional as F
from samples_looks import Counter, Least, graph_of, looks_stay_below_a_gpus_peak
from torch import nn
from torch._higher_order_ops.wrap import TagActivationCheckpoint
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import hot_compile
from hot_compile.backend import hot
from hot_compile.inspect import run_uncompiled
from hot_compile.memory import peak_bytes
from hot_compile.observing import acceptance, eager, walk
from hot_compile.observing.draws import Draws, drawn_alike, draws, draws_numbers
from hot_compile.observing.eager import Eager
from hot_compile.observing.stretches import without_regions
from hot_compile.observing.walk import Room
from hot_compile.observing.watching import Twin

CPU = torch.device("cpu")
VOCABULARY, ROWS = 24000, 8 * 128
LOGITS = VOCABULARY * ROWS * 4
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture(autouse=True)
def kept(tmp_path, monkeypatch):
    monkeypatch.setattr(acceptance, "folder", lambda: tmp_path / "accepted")


def compiled(function, lower=False, **options):
    keywords = {} if lower else {"inner_compile": run_uncompiled}
    given = {"min_gain": 0, "accept": "auto", "head_min_bytes": 2**20, **options}
    return torch.compile(function, backend=functools.partial(hot, options=given, **keywords))


class Language(nn.Module):
    """A language model with its loss; attention, residuals and the embedding drop out."""

    def __init__(self, vocabulary, width=64, layers=3, dropped=0.0, tied=True, heads=2):
        super().__init__()
        torch.manual_seed(0)
        self.dropped, self.embedding = dropped, nn.Embedding(vocabulary, width)
        layer = functools.partial(
            nn.TransformerEncoderLayer, width, heads, 4 * width, dropped, F.gelu,
            batch_first=True, norm_first=True,
        )  # fmt: skip
        self.layers = nn.ModuleList(layer() for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens, labels):
        x = F.dropout(self.embedding(tokens), self.dropped)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def tokens(vocabulary=VOCABULARY, device="cpu", shape=(8, 128)):
    return torch.randint(vocabulary, shape, device=device)


@pytest.fixture
def looks(monkeypatch):
    """What each took. A CPU that steps have risen on by ``looks.risen`` bytes, if that is set."""
    own, counters = Eager.gradients, []

    class Looks(list):
        risen, spare = None, 0

    def counted(self, *given):
        results = []
        monkeypatch.setattr(walk, "cuda_devices", lambda _: [0] * (seen.risen is not None))
        counters.append(Counter())
        with counters[-1] if seen.risen is not None else contextlib.nullcontext():
            seen.append(peak_bytes(lambda: results.append(own(self, *given)), CPU))
        return results[0]

    seen = Looks()
    monkeypatch.setattr(walk, "allocated", lambda _: counters[-1].alive)
    monkeypatch.setattr(walk, "highest", lambda _: counters[-1].alive + seen.risen)
    monkeypatch.setattr(walk, "spare", lambda _: seen.spare)
    monkeypatch.setattr(walk, "_LITTLE", 0)
    monkeypatch.setattr(Eager, "gradients", counted)
    return seen


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_language_model_is_looked_at_without_its_logits(looks, dtype, tied):
    """Whole they alone take more than there is; the head's gradient is exact all the same."""
    looks.risen = int(0.5 * LOGITS)
    model = Language(VOCABULARY, tied=tied)
    step, x = compiled(model), tokens()
    for _ in range(2):
        model.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
            step(x, x).backward()
    found = hot_compile.certificate(step)
    assert not found.unseen
    assert len(found.looks) == 2
    assert found.errors.worst < 0.15
    assert max(looks) < looks.risen


def test_a_loss_of_halves_and_a_metric_of_the_logits_are_looked_at():
    """``chunk`` and ``topk`` behind a head give several tensors, as preference losses write it."""
    torch.manual_seed(0)
    body, head = nn.Linear(64, 64), nn.Linear(64, VOCABULARY, bias=False)

    def preference(x, labels):
        logits = head(body(x).tanh())
        found = logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0].sum(-1)
        chosen, rejected = found.chunk(2)
        top = logits.detach().topk(5, -1).indices
        return -F.logsigmoid(chosen - rejected).mean(), (top == labels[..., None]).any(-1).sum()

    step = compiled(preference)
    loss, _ = step(torch.randn(4, 32, 64), tokens(shape=(4, 32)))
    loss.backward()
    found = hot_compile.certificate(step)
    assert not found.unseen
    assert len(found.looks) == 1


def worst_errors(looks, model, function, shares):
    """By looks that may take such shares of what the first, uncut, took."""
    x, errors = tokens(50, shape=(8, 128)), []
    for share in shares:
        looks.risen = share and int(share * looks[0])
        torch._dynamo.reset()
        model.zero_grad()
        step = compiled(function, gx_bits=8)
        step(x, x).backward()
        found = hot_compile.certificate(step)
        assert not found.unseen
        errors.append(found.errors.worst)
    return errors


def test_less_memory_finds_the_same(looks):
    """In halves, and halves of these, as far as there is need."""
    model, shares = Language(50, layers=4), (None, 0.4)
    errors = worst_errors(looks, model, model, shares)
    assert all(
        took < int(share * looks[0]) for took, share in zip(looks[1:], shares[1:], strict=True)
    )
    assert max(errors) - min(errors) < 1e-5


def test_less_memory_finds_the_same_inside_autocast(looks):
    """As accelerate and Hugging Face's trainer write it: the graph itself enters the mode."""
    model = Language(50, layers=4)

    def loss(tokens, labels):
        with torch.autocast("cpu", torch.bfloat16):
            return model(tokens, labels)

    errors = worst_errors(looks, model, loss, (None, 0.6))
    assert looks[-1] < 0.65 * looks[0]  # a CPU's products of halves take some for themselves
    assert max(errors) - min(errors) < 1e-3
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("spare", [0, 60 * 2**20])
def test_a_look_stops_where_it_does_not_fit(looks, spare):
    """In the middle is an activation of 16 MiB, which takes thrice that; what is behind counts.

    Unless much more is free.
    """
    looks.spare = spare
    torch.manual_seed(0)
    layers = nn.Linear(16, 4096), nn.ReLU(), nn.Linear(4096, 16), nn.ReLU(), nn.Linear(16, 16)
    step, x = compiled(nn.Sequential(*layers)), torch.randn(1024, 16)
    looks.risen = 46 * 2**20
    step(x).square().mean().backward()
    found = hot_compile.certificate(step)
    assert len(found.looks) == 1
    if spare:
        assert not found.unseen
        assert looks.risen < max(looks) < looks.risen + spare
        return
    ((what, why),) = found.unseen.items()
    assert what == "4 of 6 parameters of graph 0, 0.weight the first"
    assert "memory was too short" in why
    assert max(looks) < looks.risen


class Checkpointed(nn.Module):
    """Blocks by ``torch.utils.checkpoint``, each with a region of its own inside."""

    def __init__(self, layers, **more):
        super().__init__()
        torch.manual_seed(0)
        self.more = more
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128))
            for _ in range(layers)
        )

    def forward(self, x):
        for block in self.blocks:
            y, mean = checkpoint(self.ran, block, x, use_reentrant=False, **self.more)
            x = x + y * mean
        return (x * x).mean()

    @staticmethod
    def ran(block, x):
        y = checkpoint(block[:2], x, use_reentrant=False)
        return block[2](y), y.mean()


PRODUCTS_SAVED = functools.partial(
    create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default, torch.ops.aten.mm.default]
)


@pytest.mark.parametrize(
    "more", [{}, pytest.param({"context_fn": PRODUCTS_SAVED}, marks=pytest.mark.slow)]
)
def test_looks_at_more_checkpointed_blocks_take_no_more(looks, monkeypatch, more):
    """Also where torch keeps all that a region makes, run operator by operator, as 2.11 does."""
    looks.risen = 13 * 2**20  # of which sketches of eight blocks' gradients take 2
    x = torch.randn(1024, 128)
    for layers in (2, 8):
        torch._dynamo.reset()
        step = compiled(Checkpointed(layers, **more))
        loss = step(x)
        with monkeypatch.context() as patch:
            patch.setattr(TagActivationCheckpoint, "__call__", lambda _, gm, *args, **__: gm(*args))
            loss.backward()
        found = hot_compile.certificate(step)
        assert not found.unseen
        assert found.errors.worst < 0.15
    assert max(looks) < looks.risen


def test_regions_become_part_of_their_graph():
    model, x = Checkpointed(2), torch.randn(32, 128)
    given = []
    gm = graph_of(model, x, given=given)
    flat = without_regions(gm)
    assert len(gm.graph.find_nodes(op="get_attr")) == 2
    assert not flat.graph.find_nodes(op="get_attr")
    want = torch.autograd.grad(model(x), list(model.parameters()))
    (loss,) = flat(*given[0])
    for got, exact in zip(torch.autograd.grad(loss, list(model.parameters())), want, strict=True):
        torch.testing.assert_close(got, exact)


def drawing(x):
    """Everything that draws of a seed, once; of one value in the order of its strides."""
    y = F.dropout(x, 0.2)
    y = F.scaled_dot_product_attention(y, y, y, dropout_p=0.1)
    y = F.dropout(y.transpose(1, 2) * 2, 0.3)
    return (y + torch.rand_like(y) * torch.randn(16, dtype=y.dtype)).square().sum()


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)]
)
def test_numbers_are_those_of_inductors_code(dtype):
    x = torch.randn(4, 2, 32, 16, dtype=dtype, requires_grad=True)
    grads = []
    torch.manual_seed(7)
    torch.compile(drawing, backend="inductor")(x).backward()
    grads.append(x.grad)
    for _ in range(2):
        x.grad = None
        torch.manual_seed(7)
        numbers = Draws()
        with numbers.since(numbers.mark):
            loss = drawing(x)
        loss.backward()
        grads.append(x.grad)
    assert torch.equal(grads[1], grads[2])
    allowed = 1e-5 if dtype is torch.float32 else 0.02  # a kernel rounds less often
    assert (grads[0] - grads[1]).norm() < allowed * grads[1].norm()


@pytest.mark.slow
def test_dropout_is_looked_at_with_nothing_compiled(looks, monkeypatch):
    """Whole and in stretches, which draw again what they drew."""
    monkeypatch.setattr(Twin, "_compiled", lambda *_: pytest.fail("a twin is compiled"))
    model = Language(50, layers=1, dropped=0.2)
    step, x = compiled(model, lower=True), tokens(50)
    for room in (Room, Least):
        monkeypatch.setattr(eager, "Room", room)
        model.zero_grad()
        step(x, x).backward()
    found = hot_compile.certificate(step)
    assert not found.unseen
    assert len(found.looks) == 2
    assert found.errors.worst < 0.15
    assert looks[1] < looks[0]


def test_where_other_numbers_are_drawn_the_thorough_twin_is_asked(monkeypatch):
    own = Draws.numbers
    monkeypatch.setattr(Draws, "numbers", lambda *given: own(*given).flip(-1))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.3), nn.Linear(64, 64))
    x = torch.randn(64, 64)
    step = compiled(model, lower=True)
    for _ in range(5):
        model.zero_grad()
        step(x).square().mean().backward()
    found = hot_compile.certificate(step)
    assert not found.unseen
    assert len(found.looks) == 3
    assert found.errors.worst < 0.1
    assert not found.repaired


class Noisy(nn.Sequential):
    """What comes of its first layer is multiplied by noise, as before a router of experts."""

    def __init__(self, noise):
        super().__init__(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        self.noise = noise

    def forward(self, x):
        y = self[1](self[0](x))
        return self[2](y * self.noise(y))


_SLOW = pytest.mark.slow
_NOISES = {
    "uniform": lambda y: torch.empty_like(y).uniform_(0.2, 1.8),
    "normal": lambda y: torch.normal(torch.ones_like(y), 0.5),
    "exponential": lambda y: torch.empty_like(y).exponential_(),
    "poisson": lambda y: torch.poisson(torch.ones_like(y)),
}


@pytest.mark.parametrize(
    "name", ["uniform", *(pytest.param(n, marks=_SLOW) for n in _NOISES if n != "uniform")]
)
def test_noise_of_any_kind_is_looked_at(name):
    torch.manual_seed(0)
    model, x, wanted = Noisy(_NOISES[name]), torch.randn(256, 64), torch.randn(256, 64)
    step = compiled(model, lower=True)
    for _ in range(2):
        model.zero_grad()
        F.mse_loss(step(x), wanted).backward()
    found = hot_compile.certificate(step)
    assert not found.unseen
    assert len(found.looks) == 2
    assert found.errors.worst < 0.15
    assert not found.repaired


def test_which_graphs_draw_random_numbers():
    def traced(function):
        return draws(torch.fx.symbolic_trace(function))

    assert traced(lambda x: F.dropout(x, 0.1, True))
    assert traced(lambda x: x + torch.rand_like(x))
    for noise in _NOISES.values():
        assert traced(noise)
    assert traced(lambda x: F.rrelu(x, training=True))
    assert traced(lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1))
    assert not traced(lambda x: F.dropout(x, 0.1, False))
    assert not traced(lambda x: F.scaled_dot_product_attention(x, x, x))
    assert not traced(lambda x: F.dropout(x, p=0.0) + torch.linspace(0, 1, 3))


@pytest.mark.parametrize("target", [torch.ops.aten.bernoulli.p, torch.ops.aten.uniform.default])
def test_operators_of_aten_draw_themselves(target):
    graph = torch.fx.Graph()
    assert draws_numbers(graph.call_function(target, (graph.placeholder("x"),)))


@pytest.mark.parametrize("name", ["__eq__", "__class__", "name", "", "no such operator", "add"])
def test_others_draw_none(name):
    graph = torch.fx.Graph()
    assert not draws_numbers(graph.call_method(name, (graph.placeholder("x"),)))


def test_whose_numbers_are_known():
    def region(x):
        return torch.utils.checkpoint.checkpoint(F.dropout, x, 0.5, use_reentrant=False)

    x = torch.randn(4, 4, requires_grad=True)
    plain = graph_of(lambda x: F.dropout(x, 0.5), x)
    assert drawn_alike(plain)
    assert not drawn_alike(graph_of(region, x))
    with torch._inductor.config.patch(fallback_random=True):
        assert not drawn_alike(plain)


@pytest.mark.parametrize(
    ("highest", "coming", "free", "left"),
    [(900, 0, False, 300), (600, 0, False, 64), (600, 100, False, 100), (900, 0, True, 900)],
)
def test_looks_take_what_steps_do_and_what_is_free_if_asked(
    highest, coming, free, left, monkeypatch
):
    monkeypatch.setattr(walk, "cuda_devices", lambda args: [0])
    for name, size in (("allocated", 600), ("highest", highest), ("unused", 1000)):
        monkeypatch.setattr(walk, name, lambda device, size=size: size * 2**20)
    room = Room((), coming * 2**20, free)
    assert room.left == left * 2**20


@pytest.mark.parametrize(("total", "left"), [(4000, 500), (42600, 300)])
def test_what_does_not_fit_gets_a_quarter_of_what_is_free(total, left, monkeypatch):
    """But no device is filled by it above 95 %."""
    monkeypatch.setattr(walk, "cuda_devices", lambda args: [0])
    for name, size in (("allocated", 600), ("highest", 900), ("unused", 2000)):
        monkeypatch.setattr(walk, name, lambda device, size=size: size * 2**20)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, total * 2**20))
    room = Room(())
    assert room.left == 300 * 2**20
    assert room.widen() is (left > 300)
    assert room.left == left * 2**20
    assert not room.widen()
    room.narrow()  # what needed it is through
    assert room.left == 300 * 2**20


@pytest.mark.gpu
@pytest.mark.parametrize("dropped", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_looks_at_a_language_model_do_not_raise_a_gpus_peak(dtype, dropped):
    def make(accept):
        model = Language(32000, 512, 6, dropped, heads=8).cuda()
        step = compiled(model, lower=True, accept=accept, head_min_bytes=2**25)

        def forward():
            x = tokens(32000, "cuda", (8, 512))
            return step(x, x)

        return model, step, forward

    looks_stay_below_a_gpus_peak(make, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_are_those_of_inductors_code_on_a_gpu(dtype):
    x = torch.randn(16, 512, 1024, dtype=dtype, device="cuda", requires_grad=True)

    def dropped(x):
        q = F.dropout(x, 0.1).unflatten(-1, (16, 64)).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, q, q, dropout_p=0.1).transpose(1, 2).flatten(2)
        y = y * y.new_empty(16, 1, 1).bernoulli_(0.8)
        return F.dropout(y, 0.3)

    torch.manual_seed(7)
    want = torch.compile(dropped, backend="inductor")(x)
    torch.manual_seed(7)
    numbers = Draws()
    with numbers.since(numbers.mark):
        got = dropped(x)
    assert ((got != 0) == (want != 0)).float().mean() > 0.9999
    assert (got - want).norm() < 0.01 * want.norm()
