"""Keys and values that heads share are not repeated for attention."""

import pytest
import torch
from samples_attention import captured, rewritten
from torch.nn.functional import scaled_dot_product_attention as attention
from torch.utils.checkpoint import checkpoint

from hot_compile.attention import for_fast_kernels

GROUPS = 3


def operands(shared=2, heads=6, rows=5, columns=5, channels=8, batch=2):
    sizes = ((heads, rows), (shared, columns), (shared, columns))
    return [torch.randn(batch, h, n, channels, requires_grad=True) for h, n in sizes]


def rows_first(q, k, v):
    """As (batch, tokens, heads, channels)."""
    return [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v)]


def heads_read(f, inputs, **how):
    """Of each attention of f's graph: its keys' heads and its values', if it shares them."""
    nodes = rewritten(for_fast_kernels, f, inputs, **how)
    assert nodes
    return [
        tuple(int(a.meta["example_value"].shape[1]) for a in n.args[1:3])
        for n in nodes
        if n.kwargs.get("enable_gqa")
    ]


def by_hugging_face(x):
    batch, shared, tokens, channels = x.shape
    wide = x[:, :, None, :, :].expand(batch, shared, GROUPS, tokens, channels)
    return wide.reshape(batch, shared * GROUPS, tokens, channels)


REPEATS = {
    "Hugging Face": by_hugging_face,
    "method": lambda x: x.repeat_interleave(GROUPS, dim=1),
    "negative": lambda x: torch.repeat_interleave(x, GROUPS, -3),
    "by name": lambda x: torch.repeat_interleave(x, repeats=GROUPS, dim=1),
    "unsqueezed": lambda x: x.unsqueeze(2).repeat(1, 1, GROUPS, 1, 1).flatten(1, 2),
    "copied": lambda x: (
        x.unsqueeze(2).expand(-1, -1, GROUPS, -1, -1).contiguous().view(2, 6, -1, 8).clone()
    ),
    "broadcast": lambda x: torch.broadcast_to(x[:, :, None], (2, 2, GROUPS, 5, 8)).reshape(
        2, 6, 5, 8
    ),
}


@pytest.mark.parametrize("repeat", REPEATS.values(), ids=REPEATS)
@pytest.mark.parametrize("causal", [False, True])
def test_keys_of_groups(repeat, causal):
    f = lambda q, k, v: attention(q, repeat(k), repeat(v), is_causal=causal)  # noqa: E731
    assert heads_read(f, operands()) == [(2, 2)]


@pytest.mark.parametrize(
    "f",
    [
        lambda q, k, v: attention(q, k.expand(-1, 6, -1, -1), v.expand(-1, 6, -1, -1)),
        lambda q, k, v: attention(q, k.expand_as(q), v.repeat(1, 6, 1, 1), scale=0.3).sin(),
    ],
    ids=["expanded", "otherwise"],
)
def test_one_key_for_all(f):
    assert heads_read(f, operands(shared=1)) == [(1, 1)]


def test_rows_before_heads():
    """As Llama's own code."""

    def repeated(x):
        batch, tokens, shared, channels = x.shape
        wide = x[:, :, :, None, :].expand(batch, tokens, shared, GROUPS, channels)
        return wide.reshape(batch, tokens, shared * GROUPS, channels)

    def f(q, k, v):
        k, v = repeated(k), repeated(v)
        return attention(q.transpose(1, 2), k.transpose(1, 2), v.permute(0, 2, 1, 3))

    assert heads_read(f, rows_first(*operands())) == [(2, 2)]


def test_what_comes_before_stays():
    """Turned, normalised and added to, then repeated."""

    def f(q, k, v):
        k = k * k.square().mean(-1, keepdim=True).rsqrt() + 1
        return attention(q, by_hugging_face(k), by_hugging_face(v.roll(1, 0)))

    assert heads_read(f, operands()) == [(2, 2)]


@pytest.mark.parametrize("mask", [torch.sin, lambda x: x > 0], ids=["added", "true or false"])
def test_a_mask_for_all(mask):
    """Torch's kernel for CPUs takes both."""

    def f(q, k, v):
        shown = mask(q.detach()[:1, :1, :, :5])
        return attention(q, by_hugging_face(k), by_hugging_face(v), shown)

    assert heads_read(f, operands()) == [(2, 2)]


def test_a_copy_that_is_read_elsewhere():
    def f(q, k, v):
        k = by_hugging_face(k)
        return attention(q, k, by_hugging_face(v)) * k.mean()

    assert heads_read(f, operands()) == [(2, 2)]


def test_tokens_that_change():
    f = lambda q, k, v: attention(q, by_hugging_face(k), by_hugging_face(v))  # noqa: E731
    given = operands(rows=9, columns=9)
    for x in given:
        torch._dynamo.mark_dynamic(x, 2)
    assert heads_read(f, given) == [(2, 2)]
    assert heads_read(f, operands(rows=7, columns=7), dynamic=True) == [(2, 2)]


def _written(x, what):
    """The repeated keys, of which ``what`` was changed after they were copied."""
    y = x * 1
    made = by_hugging_face(y)
    {"source": y, "copy": made, "view": y[:, 0], "elsewhere": x * 1}[what].mul_(2)
    return made


@pytest.mark.parametrize("what", ["source", "copy", "view"])
def test_what_is_written_to_stays(what):
    f = lambda q, k, v: attention(q, _written(k, what), by_hugging_face(v))  # noqa: E731
    assert heads_read(f, operands()) == []


def test_what_is_written_to_elsewhere():
    f = lambda q, k, v: attention(q, _written(k, "elsewhere"), by_hugging_face(v))  # noqa: E731
    assert heads_read(f, operands()) == [(2, 2)]


@pytest.mark.parametrize(
    "f",
    [
        lambda q, k, v: attention(q, by_hugging_face(k), v.repeat(1, 3, 1, 1)),
        lambda q, k, v: attention(q, k.repeat(1, 3, 1, 1), v.repeat(1, 3, 1, 1)),
        lambda q, k, v: attention(q, torch.cat([k] * 3, 1), torch.cat([v] * 3, 1)),
        lambda q, k, v: attention(
            q, k[:, None].expand(-1, 3, -1, -1, -1).reshape(2, 6, 5, 8), by_hugging_face(v)
        ),
        lambda q, k, v: attention(
            q, k.repeat_interleave(torch.tensor([2, 4]), dim=1, output_size=6), by_hugging_face(v)
        ),
        lambda q, k, v: attention(q, by_hugging_face(k), v.repeat_interleave(3, 1) + 1),
        lambda q, k, v: attention(
            q, k.unflatten(1, (1, 2)).repeat(1, 1, 3, 1, 1).flatten(1, 2), by_hugging_face(v)
        ),
        lambda q, k, v: attention(
            q, (k[:, :, None] * q[0, 0, :3, 0][:, None, None]).flatten(1, 2), by_hugging_face(v)
        ),
        lambda q, k, v: attention(
            q.flatten(0, 1), by_hugging_face(k).flatten(0, 1), by_hugging_face(v).flatten(0, 1)
        ),
    ],
    ids=[
        "tiled values",
        "tiled",
        "in a row",
        "tiled by rank",
        "uneven",
        "changed",
        "of two",
        "weighed",
        "flat",
    ],
)
def test_others_stay(f):
    assert heads_read(f, operands()) == []


def test_tokens_that_are_repeated_stay():
    f = lambda q, k, v: attention(  # noqa: E731
        q, k.repeat_interleave(3, dim=2), v.repeat_interleave(3, dim=2)
    )
    assert heads_read(f, operands(shared=6, columns=2)) == []


def test_repeats_that_are_tokens_stay():
    repeated = lambda x: x[:, :, None].expand(-1, -1, 3, -1, -1).reshape(2, 2, 15, 8)  # noqa: E731
    f = lambda q, k, v: attention(q, repeated(k), repeated(v), is_causal=True)  # noqa: E731
    assert heads_read(f, operands(heads=2, rows=15)) == []


def test_as_many_heads_in_another_number():
    """Keys of 2 heads, values of 3."""
    q, k, _ = operands()
    v = torch.randn(2, 3, 5, 8, requires_grad=True)
    f = lambda q, k, v: attention(q, k.repeat_interleave(3, 1), v.repeat_interleave(2, 1))  # noqa: E731
    assert heads_read(f, [q, k, v]) == []


def test_no_kernel():
    """Values of other channels than keys are plain products."""
    q, k, _ = operands()
    v = torch.randn(2, 2, 5, 6, requires_grad=True)
    f = lambda q, k, v: attention(q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1))  # noqa: E731
    assert heads_read(f, [q, k, v]) == []


def test_dropout_stays():
    f = lambda q, k, v: attention(q, by_hugging_face(k), by_hugging_face(v), dropout_p=0.5)  # noqa: E731
    assert for_fast_kernels(gm := captured(f, operands())) is gm


def test_blocks_that_are_checkpointed():
    block = lambda q, k, v: attention(q, by_hugging_face(k), by_hugging_face(v))  # noqa: E731
    f = lambda q, k, v: checkpoint(block, q, k, v, use_reentrant=False) * 2  # noqa: E731
    assert heads_read(f, operands()) == [(2, 2)]
