"""What is joined or gathered of tensors that are kept anyway is made again in the backward."""

import pytest
import torch
from samples_experts import gradients, loss_of, routed
from samples_graphs import given
from samples_storage import crossing
from torch import fx, nn
from torch._functorch import partitioners
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy

from hot_compile.passes.base.graph import aten
from hot_compile.passes.storage.made_again import gathered_again, joined_again, kept_nodes
from hot_compile.testing import cosine, hot_step

WIDTH, ROWS = 64, 96


class Beside(nn.Module):
    """One product behind a layer and its activation, joined, as behind attention and MLP."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.out(torch.cat([self.first(x).tanh(), F.gelu(self.second(x))], -1))


def test_parts_cross_and_not_what_they_make():
    torch.manual_seed(0)
    model, x = nn.Sequential(Beside(), Beside()), torch.randn(ROWS, WIDTH)
    model(x).sin().mean().backward()
    exact = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    kept = [c.bytes_before for c in crossing(lambda x: model(x).sin().mean(), x)]
    assert max(kept) == 4 * ROWS * 3 * WIDTH
    for name, p in model.named_parameters():
        assert cosine(p.grad, exact[name]) > 0.98, name


def test_min_cut_knows_of_it_for_as_long_as_it_lasts():
    listed = partitioners.get_default_op_list
    with joined_again():
        assert aten.cat in partitioners.get_default_op_list().recomputable_ops
    assert partitioners.get_default_op_list is listed
    assert aten.cat not in listed().recomputable_ops


def test_a_torch_without_that_list_goes_on(monkeypatch):
    monkeypatch.delattr(partitioners, "get_default_op_list")
    with joined_again():
        assert not hasattr(partitioners, "get_default_op_list")


def test_rows_that_a_router_picked_are_gathered_again():
    model, x = routed(rows=ROWS, inner=48)
    exact = gradients(model, x)
    model.zero_grad()
    kept = [c for c in crossing(loss_of(model), x) if not c.name.startswith("_grouped_mm")]
    assert sorted((2 * ROWS, WIDTH)) not in [sorted(map(int, c.shape)) for c in kept]
    for name, p in model.named_parameters():
        assert cosine(p.grad.float(), exact[name]) > 0.98, name


def _gather(rows, dtype=torch.float32):
    graph = fx.Graph()
    x, order = given(graph, {"x": ((64, 32), dtype), "order": ((rows,), torch.int64)})
    with x.meta["val"].fake_mode:
        value = x.meta["val"][order.meta["val"]]
    node = graph.call_function(aten.index.Tensor, (x, [order]))
    node.meta["val"] = value
    graph.output((node,))
    return fx.GraphModule({}, graph), node


@pytest.mark.parametrize(
    ("rows", "dtype", "least", "again"),
    [
        (128, torch.float32, 1024, True),
        (64, torch.float32, 1024, False),  # as large as what it is gathered from
        (128, torch.float32, 2**20, False),  # too small to be worth it
        (128, torch.int64, 1024, False),
    ],
)
def test_which_rows_are_gathered_again(rows, dtype, least, again):
    gm, node = _gather(rows, dtype)
    with gathered_again(gm, least):
        assert ("recompute" in node.meta) is again
    assert "recompute" not in node.meta


def test_what_is_to_be_kept_is_and_what_others_asked_for_stays():
    gm, node = _gather(128)
    with kept_nodes(gm, [node.name]):
        assert node.meta["recompute"] is CheckpointPolicy.MUST_SAVE
        with gathered_again(gm, 1024):
            assert node.meta["recompute"] is CheckpointPolicy.MUST_SAVE
    assert "recompute" not in node.meta


class Codebook(nn.Module):
    """Codes of a book that each step moves, as by running means; ``cloned``: of its copy."""

    def __init__(self, cloned=False):
        super().__init__()
        self.cloned = cloned
        self.into, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("book", torch.randn(16, WIDTH))

    def forward(self, x):
        z = self.into(x)
        book = self.book.clone() if self.cloned else self.book
        codes = book[(z.detach() @ self.book.t()).argmax(-1)]
        y = self.out(torch.sin(codes * z))
        with torch.no_grad():
            self.book.mul_(0.5).add_(0.1)
        return y.square().mean()


@pytest.mark.parametrize("options", [{"memory": "all", "min_gain": 0}, {"memory": "off"}])
def test_what_was_made_of_an_input_that_changes_is_not_made_of_what_it_became(options):
    torch.manual_seed(0)
    eager, model, x = Codebook(cloned=True), Codebook(), torch.randn(512, WIDTH)
    model.load_state_dict(eager.state_dict())
    eager(x).backward()
    hot_step(model, x, options={"memory_min_bytes": 1024, **options})
    for (name, p), want in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert cosine(p.grad, want.grad) > 0.98, name
    torch.testing.assert_close(model.book, eager.book)
