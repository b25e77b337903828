"""Attention loses masks that are known to hide nothing, or just the future; and no others."""

import functools

import pytest
import torch
from samples_attention import captured, rewritten
from torch.nn.functional import scaled_dot_product_attention as attention
from torch.utils.checkpoint import checkpoint

from hot_compile import attention_masks
from hot_compile.attention_masks import without_masks
from hot_compile.backend import hot
from hot_compile.record import run_uncompiled

ROWS = 17


def operands(batch=2, heads=3, rows=ROWS, columns=ROWS):
    sizes = ((batch, heads, rows, 8), (batch, heads, columns, 8), (batch, heads, columns, 8))
    return [torch.randn(*size, requires_grad=True) for size in sizes]


def masked(f, inputs, **how):
    """What each attention of f's graph is told of a mask, after its values were compared."""
    nodes = rewritten(without_masks, f, inputs, **how)
    return ["mask" if n.kwargs.get("attn_mask") is not None else _end(n) for n in nodes]


def _end(node):
    return "causal" if node.kwargs.get("is_causal") else "none"


def index(q):
    return torch.arange(q.shape[-2], device=q.device)


def hugging_face(q, window=None, packed=False):
    """A mask as Transformers 5 makes it while it is traced."""
    rows, columns = index(q)[None, None, :, None], index(q)[None, None, None, :]
    shown = rows.new_ones((), dtype=torch.bool) & (columns <= rows).to(q.device)
    if window:
        shown = shown & (rows - columns < window).to(q.device)
    if packed:
        batch = torch.arange(q.shape[0])[:, None, None, None]
        places = index(q).unsqueeze(0).expand(q.shape[0], -1)
        documents = (torch.diff(places, prepend=places[:, :1] - 1, dim=-1) != 1).cumsum(-1)
        shown = shown & (documents[batch, rows] == documents[batch, columns])
    return shown.expand(q.shape[0], -1, q.shape[-2], q.shape[-2])


def documents_of_eight(q):
    number = index(q) // 8
    return hugging_face(q) & (number[:, None] == number)


KNOWN = {
    "ones": (lambda q: torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool), "none"),
    "all rows": (lambda q: (index(q)[:, None] >= 0).expand(2, 1, -1, q.shape[-2]), "none"),
    "zeros": (lambda q: torch.zeros(1, 1, q.shape[-2], q.shape[-2]), "none"),
    "as BERT": (
        lambda q: (1.0 - torch.ones(2, 1, 1, q.shape[-2])).masked_fill(
            (1.0 - torch.ones(2, 1, 1, q.shape[-2])).to(torch.bool), torch.finfo(q.dtype).min
        ),
        "none",
    ),
    "lower triangle": (
        lambda q: torch.tril(torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool)),
        "causal",
    ),
    "minus infinity": (
        lambda q: torch.triu(torch.full((q.shape[-2], q.shape[-2]), float("-inf")), 1),
        "causal",
    ),
    "future that is half seen": (
        lambda q: torch.triu(torch.full((q.shape[-2], q.shape[-2]), -1.0), 1),
        "mask",
    ),
    "Transformers": (hugging_face, "causal"),
    "packed, one document": (lambda q: hugging_face(q, packed=True), "causal"),
    "a window that is wide enough": (lambda q: hugging_face(q, window=ROWS), "causal"),
    "near keys, and all are": (lambda q: (index(q)[:, None] - index(q)).abs() <= ROWS, "none"),
    "near keys": (lambda q: (index(q)[:, None] - index(q)).abs() <= 4, "mask"),
    "a narrow window": (lambda q: hugging_face(q, window=ROWS - 1), "mask"),
    "documents": (documents_of_eight, "mask"),
    "upper triangle": (
        lambda q: torch.triu(torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool)),
        "mask",
    ),
    "weights": (lambda q: torch.zeros(q.shape[-2], q.shape[-2]) + 0.5, "mask"),
    "distances": (lambda q: -0.1 * (index(q)[:, None] - index(q)).abs(), "mask"),
}


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("block", [attention_masks._BLOCK, 40], ids=["whole", "by rows"])
def test_masks(name, block, monkeypatch):
    monkeypatch.setattr(attention_masks, "_BLOCK", block)
    mask, kept = KNOWN[name]
    f = lambda q, k, v: attention(q, k, v, attn_mask=mask(q))  # noqa: E731
    assert masked(f, operands()) == [kept]


def test_a_drawn_mask_is_not_drawn_here():
    f = lambda q, k, v: attention(q, k, v, attn_mask=torch.rand(ROWS, ROWS) >= 0)  # noqa: E731
    before = torch.get_rng_state()
    gm = captured(f, operands())
    torch.set_rng_state(before)
    assert without_masks(gm) is gm
    assert torch.equal(torch.get_rng_state(), before)


def test_the_graph_itself_stays_as_it_is():
    f = lambda q, k, v: attention(q, k, v, attn_mask=hugging_face(q))  # noqa: E731
    gm = captured(f, operands())
    before = gm.code
    own = without_masks(gm)
    assert gm.code == before
    assert "arange" in before
    assert "arange" not in own.code


def test_keys_that_nobody_sees():
    mask = lambda q: (index(q)[:, None] >= index(q)) & (index(q) > 3)[None]  # noqa: E731
    f = lambda q, k, v: attention(q, k, v, attn_mask=mask(q))  # noqa: E731
    assert without_masks(gm := captured(f, operands())) is gm


@pytest.mark.parametrize(
    "change",
    [
        lambda shown: shown.masked_fill_(index(shown) > 5, False),
        lambda shown: shown[:, :4].zero_(),
        lambda shown: shown.t()[3:9].fill_(False),
        lambda shown: shown.__setitem__((slice(None), 2), False),
        lambda shown: shown.__iand__(index(shown) != 1),
        lambda shown: torch.logical_not(shown[0], out=shown[1]),
        lambda shown: torch.nn.functional.relu(shown.view(torch.int8)[2:3].sub_(1), inplace=True),
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_a_mask_that_is_written_to(change, causal):
    def f(q, k, v):
        shown = index(q)[:, None] >= index(q) * int(causal)
        change(shown)
        return attention(q, k, v, attn_mask=shown)

    gm = captured(f, operands())
    assert without_masks(gm) is gm


def test_a_mask_that_others_read():
    """Rotary embeddings read the places that a mask is made of; what is computed of them may be
    changed."""

    def f(q, k, v):
        places = index(q)
        turned = (places.float() * 0.1).cos()
        turned += 1
        return attention(q * turned[:, None], k, v, attn_mask=places[:, None] >= places)

    assert masked(f, operands()) == ["causal"]


def test_of_two_masks_one_is_known():
    """As T5's: what the other is made of may be written to."""

    def f(q, k, v, bias):
        buckets = 0
        buckets += (index(q)[:, None] > index(q)).long()
        first = attention(q, k, v, attn_mask=bias[buckets])
        return attention(first, k, v, attn_mask=index(q)[:, None] >= index(q) * 0)

    assert masked(f, [*operands(), torch.randn(2, requires_grad=True)]) == ["mask", "none"]


def test_inputs_may_hide_padding():
    f = lambda q, k, v, shown: attention(q, k, v, attn_mask=shown)  # noqa: E731
    assert masked(f, [*operands(), torch.ones(ROWS, ROWS, dtype=torch.bool)]) == ["mask"]
    both = lambda q, k, v, m: attention(q, k, v, attn_mask=hugging_face(q) & m)  # noqa: E731
    assert masked(both, [*operands(), torch.ones(2, 1, 1, ROWS, dtype=torch.bool)]) == ["mask"]


def test_keys_that_are_more_than_queries():
    """``is_causal`` would count from the first key."""
    lower = lambda q, k: torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()  # noqa: E731
    f = lambda q, k, v: attention(q, k, v, attn_mask=lower(q, k))  # noqa: E731
    assert masked(f, operands(rows=5)) == ["mask"]
    ones = lambda q, k: torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool)  # noqa: E731
    f = lambda q, k, v: attention(q, k, v, attn_mask=ones(q, k))  # noqa: E731
    assert masked(f, operands(rows=5)) == ["none"]


def test_a_mask_that_makes_the_result_larger():
    f = lambda q, k, v: attention(  # noqa: E731
        q, k, v, attn_mask=torch.ones(4, 1, ROWS, ROWS, dtype=torch.bool)
    )
    assert without_masks(gm := captured(f, operands(batch=1))) is gm


def test_sizes_that_change():
    """Batches may; of lengths that do a mask's values are not known."""
    f = lambda q, k, v: attention(  # noqa: E731
        q, k, v, attn_mask=(index(q)[:, None] >= 0).expand(q.shape[0], 1, -1, ROWS)
    )
    given = operands()
    for x in given:
        torch._dynamo.mark_dynamic(x, 0)
    assert masked(f, given) == ["none"]
    f = lambda q, k, v: attention(q, k, v, attn_mask=index(q)[:, None] >= index(q))  # noqa: E731
    assert masked(f, operands(), dynamic=True) == ["mask"]


def test_lengths_that_change_are_compiled_once():
    """Nobody compares their sizes with numbers."""
    times = []

    def backend(gm, example_inputs):
        times.append(without_masks(gm))
        return gm.forward

    f = lambda q, k, v: attention(q, k, v, attn_mask=hugging_face(q, packed=True))  # noqa: E731
    torch._dynamo.reset()
    compiled = torch.compile(f, backend=backend, dynamic=True)
    for rows in (ROWS, 19, 40):
        given = operands(rows=rows, columns=rows)
        torch.testing.assert_close(compiled(*given), f(*given))
    assert len(times) == 1


def test_too_large_a_mask(monkeypatch):
    monkeypatch.setattr(attention_masks, "_MOST", ROWS)
    f = lambda q, k, v: attention(q, k, v, attn_mask=hugging_face(q))  # noqa: E731
    assert without_masks(gm := captured(f, operands())) is gm


def test_rows_are_computed_apart(monkeypatch):
    """The whole of a large mask is in memory at no time."""
    monkeypatch.setattr(attention_masks, "_MOST_BYTES", 2 * 8 * ROWS)
    f = lambda q, k, v: attention(q, k, v, attn_mask=hugging_face(q, packed=True))  # noqa: E731
    assert masked(f, operands()) == ["causal"]
    monkeypatch.setattr(attention_masks, "_MOST_BYTES", ROWS)
    assert masked(f, operands()) == ["mask"]


def test_blocks_that_are_checkpointed():
    def f(q, k, v):
        shown = hugging_face(q, packed=True)
        for _ in range(2):
            q = checkpoint(attention, q, k, v, attn_mask=shown, use_reentrant=False)
        return q

    assert masked(f, operands()) == ["causal", "causal"]


def test_a_checkpointed_block_that_writes_to_its_mask():
    def block(q, k, v, shown):
        shown[:, 0] = False
        return attention(q, k, v, attn_mask=shown)

    def f(q, k, v):
        shown = torch.ones(ROWS, ROWS, dtype=torch.bool)
        return checkpoint(block, q, k, v, shown, use_reentrant=False)

    assert without_masks(gm := captured(f, operands())) is gm


@pytest.mark.parametrize("forms", [True, False])
def test_option_exact_forms(forms):
    """Where exact operators are to stay as they are, masks do, too."""
    reached = []

    def lower(gm, example_inputs, **kwargs):
        reached.extend(str(node.target) for node in gm.graph.nodes)
        return run_uncompiled(gm, example_inputs, **kwargs)

    options = {"exact_forms": forms, "accept": "off", "strict": True}
    backend = functools.partial(hot, options=options, inner_compile=lower)
    f = lambda q, k, v: attention(q, k, v, attn_mask=hugging_face(q))  # noqa: E731
    torch._dynamo.reset()
    inputs = operands()
    torch.testing.assert_close(torch.compile(f, backend=backend)(*inputs), f(*inputs))
    assert any("attention" in name for name in reached)
    assert any("arange" in name or "iota" in name for name in reached) != forms
