"""Language models as they are: each head and its loss in chunks, without an edit."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hot_compile.backend import hot
from hot_compile.inspect import Reports, explain, run_uncompiled
from hot_compile.testing import cosine

transformers = pytest.importorskip("transformers")

VOCABULARY = 509
OPTIONS = {"head_min_bytes": 0, "memory": "off", "min_gain": 1e9}
SMALL = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
GATED = {**SMALL, "num_key_value_heads": 2, "intermediate_size": 32, "use_cache": False}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


class NanoGPT(nn.Module):
    """Written by hand: tied head, logits returned beside the loss."""

    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, 32)
        self.mlp = nn.Linear(32, 32)
        self.lm_head = nn.Linear(32, VOCABULARY, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, input_ids, labels):
        x = self.wte(input_ids)
        logits = self.lm_head(x + F.gelu(self.mlp(x)))
        flat = logits.view(-1, logits.size(-1))
        return F.cross_entropy(flat, labels.view(-1), ignore_index=-1), logits


def model_of(name):
    config = {
        "GPT2LMHeadModel": {"n_embd": 32, "n_head": 2, "n_layer": 1, "n_positions": 32},
        "BertForMaskedLM": {**SMALL, "intermediate_size": 32},
        "T5ForConditionalGeneration": {
            **{"d_model": 32, "num_heads": 2, "d_kv": 16, "d_ff": 32, "num_layers": 1},
            **{"decoder_start_token_id": 0, "use_cache": False, "dropout_rate": 0.0},
        },
        "Qwen3ForCausalLM": {**GATED, "head_dim": 16},
        "Gemma2ForCausalLM": {**GATED, "head_dim": 16},
        "CohereForCausalLM": GATED,
        "BartForConditionalGeneration": {
            **{"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "use_cache": False},
            **{"encoder_attention_heads": 2, "decoder_attention_heads": 2},
            **{"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "dropout": 0.0},
            **{"max_position_embeddings": 64, "decoder_start_token_id": 2},
        },
        "ModernBertForMaskedLM": {
            **{**SMALL, "intermediate_size": 32, "global_attn_every_n_layers": 1},
            **{"cls_token_id": 1, "sep_token_id": 2},
        },
    }
    torch.manual_seed(0)
    if name == "NanoGPT":
        return NanoGPT()
    owner = getattr(transformers, name)
    made = owner.config_class(vocab_size=VOCABULARY, **TOKENS, **config[name])
    model = owner(made).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    made.attention_dropout = made.attention_probs_dropout_prob = made.dropout_rate = 0.0
    return model


def ids():
    return torch.randint(3, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(1))


def outcome(model, backend):
    """(loss, logits, all gradients as one vector)."""
    torch._dynamo.reset()
    model.zero_grad()
    result = torch.compile(model, backend=backend)(input_ids=ids(), labels=ids())
    loss, logits = result[:2] if isinstance(result, tuple) else (result.loss, result.logits)
    loss.backward()
    grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return loss.detach(), logits.detach(), torch.cat(grads)


FAST = ("GPT2LMHeadModel", "Gemma2ForCausalLM", "NanoGPT")
SLOW = (
    "BertForMaskedLM",
    "T5ForConditionalGeneration",
    "Qwen3ForCausalLM",
    "CohereForCausalLM",
    "BartForConditionalGeneration",
    "ModernBertForMaskedLM",
)


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW)])
def test_a_model_is_taken_as_it_is(name):
    model, reports = model_of(name), Reports()
    backend = functools.partial(
        hot, options=OPTIONS, recorder=reports, inner_compile=run_uncompiled
    )
    got, want = outcome(model, backend), outcome(model, "eager")
    (head,) = [head for graph in reports.graphs for head in graph.plan.heads]
    assert head.way == "gradients in the forward", head.reason
    assert head.returned
    torch.testing.assert_close(got[0], want[0])
    torch.testing.assert_close(got[1], want[1], atol=1e-5, rtol=1e-4)
    assert cosine(got[2], want[2]) > 1 - 1e-9


OTHERS = (*FAST[1:], *SLOW)


@pytest.mark.parametrize(
    "name", [FAST[0], *(pytest.param(n, marks=pytest.mark.slow) for n in OTHERS)]
)
def test_the_rest_of_the_model_is_compressed_as_without_a_head(name):
    """What a head in chunks leaves in the graph must not keep rules from what lies before it."""
    options = {"head_min_bytes": 0, "memory_min_bytes": 0, "min_gain": 0}
    held = {}
    for head in ("chunked", "off"):
        model, reports = model_of(name), Reports()
        taken = {**options, "head": head}
        outcome(model, functools.partial(
            hot, options=taken, recorder=reports, inner_compile=run_uncompiled
        ))  # fmt: skip
        crossing = [c for graph in reports.graphs for c in graph.crossing]
        held[head] = sum(c.bytes_before for c in crossing if c.scheme != "exact")
    assert held["off"] > 0
    assert held["chunked"] >= 0.5 * held["off"]


def test_the_norm_in_front_of_a_head_is_stored_like_any_other():
    """The loss's own gradient was multiplied into the head's already, in the forward."""
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, VOCABULARY))
    x, labels = torch.randn(128, 64), torch.randint(VOCABULARY, (128,))
    options = {"head_min_bytes": 0, "memory_min_bytes": 0, "min_gain": 1e9}
    schemes = {}
    for head in ("chunked", "off"):
        reports = Reports()
        step = torch.compile(
            lambda x, y: F.cross_entropy(model(x), y),
            backend=functools.partial(
                hot,
                options={**options, "head": head},
                recorder=reports,
                inner_compile=run_uncompiled,
            ),
        )
        torch.compiler.reset()
        step(x, labels).backward()
        (graph,) = reports.graphs
        schemes[head] = [c.scheme for c in graph.crossing if c.module == "1" and len(c.shape) > 1]
    assert schemes["chunked"] == schemes["off"]
    assert "rows8" in schemes["chunked"]


def test_explain_says_why_logits_that_are_used_twice_stay(capsys):
    class Twice(NanoGPT):
        def forward(self, input_ids, labels):
            loss, logits = super().forward(input_ids, labels)
            return loss + 1e-3 * logits.mean((0, 1)).square().sum()

    explain(Twice(), ids(), ids(), options=OPTIONS)
    assert "reduced over rows" in " ".join(capsys.readouterr().out.split())
