"""Attention of any number of dimensions is computed in four."""

import pytest
import torch
from samples_attention import captured, rewritten
from torch.nn.functional import scaled_dot_product_attention as attention
from torch.utils.checkpoint import checkpoint

from hot_compile import attention as forms
from hot_compile.attention import for_fast_kernels


@pytest.fixture(autouse=True)
def few_keys_are_many(monkeypatch):
    monkeypatch.setattr(forms, "_FEWEST", 1)


def operands(*leading, rows=5, columns=7, channels=8):
    sizes = ((*leading, rows, channels), (*leading, columns, channels), (*leading, columns, 6))
    return [torch.randn(*size, requires_grad=True) for size in sizes]


def dimensions(f, inputs, **how):
    """Of the queries of each attention of f's graph, after its values were compared."""
    nodes = rewritten(for_fast_kernels, f, inputs, **how)
    for graph in {node.graph for node in nodes}:
        _traced_as_computed(graph)
    return [n.args[0].meta["example_value"].ndim for n in nodes]


def _traced_as_computed(graph):
    """What was added says what it makes."""
    for node in graph.nodes:
        if node.op == "call_method" and node.target in ("unflatten", "squeeze"):
            value = node.meta["example_value"]
            made = getattr(node.args[0].meta["example_value"], node.target)(*node.args[1:])
            assert made.shape == value.shape
            assert value.requires_grad


@pytest.mark.parametrize("leading", [(), (3,), (1,), (2, 3), (2, 3, 4), (2, 1, 3, 2), (1, 1, 1, 1)])
@pytest.mark.parametrize("causal", [False, True])
def test_leading_sizes(leading, causal):
    f = lambda q, k, v: attention(q, k, v, is_causal=causal).sin()  # noqa: E731
    assert dimensions(f, operands(*leading, columns=5)) == [4]


def test_windows_of_heads():
    """As Hiera's and Twins': permuted, so that leading sizes cannot be one without a copy."""

    def f(q, k, v):
        return attention(*(x.permute(1, 2, 0, 3, 4) for x in (q, k, v))).transpose(0, 2)

    assert dimensions(f, operands(2, 3, 4)) == [4]


def test_a_result_that_is_read_twice():
    def f(q, k, v):
        made = attention(q, k, v, scale=0.5)
        return made * made.mean()

    assert dimensions(f, operands(2, 3, 2)) == [4]


def test_sizes_that_change():
    given = operands(2, 3, 4)
    for x in given:
        torch._dynamo.mark_dynamic(x, 0)
    assert dimensions(attention, given) == [4]
    assert dimensions(attention, operands(2, 3, 4), dynamic=True) == [5]


@pytest.mark.parametrize(
    "f",
    [
        lambda q, k, v: attention(q, k[:, :1], v[:, :1]),
        lambda q, k, v: attention(q, k[0], v[0]),
        lambda q, k, v: attention(q, k, v, attn_mask=q.detach()[..., :1] > 0),
    ],
    ids=["one key for all", "fewer dimensions", "mask"],
)
def test_others_stay(f):
    assert dimensions(f, operands(2, 3, 2)) == [5]


def test_few_keys_stay(monkeypatch):
    monkeypatch.setattr(forms, "_FEWEST", 8)
    assert dimensions(attention, operands(2, 3, 2, rows=9)) == [5]
    assert dimensions(attention, operands(2, 3, 2, columns=8)) == [4]


def test_dropout_stays():
    f = lambda q, k, v: attention(q, k, v, dropout_p=0.5)  # noqa: E731
    assert for_fast_kernels(gm := captured(f, operands(2, 3, 2))) is gm


def test_a_mask_that_is_taken():
    mask = lambda q: torch.arange(q.shape[-2])[:, None] >= torch.arange(q.shape[-2])  # noqa: E731
    f = lambda q, k, v: attention(q, k, v, attn_mask=mask(q))  # noqa: E731
    assert dimensions(f, operands(2, 3, 2, columns=5)) == [4]


def test_blocks_that_are_checkpointed():
    f = lambda q, k, v: checkpoint(attention, q, k, v, use_reentrant=False) * 2  # noqa: E731
    assert dimensions(f, operands(2, 3, 2)) == [4]


def test_four_dimensions_are_no_work():
    assert for_fast_kernels(gm := captured(attention, operands(2, 3))) is gm
