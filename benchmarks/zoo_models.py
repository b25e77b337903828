"""Small models of every family: one of each module of timm, and transformers by configuration."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

BATCH, TOKENS, WORDS, CLASSES = 2, 64, 211, 10
SMALL = (
    "atto", "femto", "pico", "nano", "_xx", "_t0", "_b0", "_m0", "_s0", "tiny", "_ti_", "_t",
    "mini", "small", "xs", "_s", "test_",
)  # fmt: skip
"""Parts of names by which timm's small models are found, the smallest first."""

BESIDE = ("deit3_small_patch16_224", "swinv2_cr_tiny_224")
"""Others of timm that were once found wanting."""


@dataclasses.dataclass
class Built:
    """A model and what gives its loss, also through a compiled form of it."""

    model: nn.Module
    loss: Callable[[Any], Tensor]


def every_model() -> dict[str, Callable[[], Built]]:
    """By name: how each is built."""
    import timm

    found: dict[str, Callable[[], Built]] = {}
    for module in timm.list_modules():
        names = timm.list_models(module=module)
        if names:
            found[f"timm:{module}"] = functools.partial(image_model, smallest(names))
    found |= {f"timm:{n}": functools.partial(image_model, n) for n in BESIDE}
    return {**found, **{f"transformers:{n}": f for n, f in TRANSFORMERS.items()}}


def smallest(names: list[str]) -> str:
    """The smallest by name: parameters would take building all thousand of them."""

    def size(name: str) -> tuple[int, int, str]:
        return next((i for i, p in enumerate(SMALL) if p in name), len(SMALL)), len(name), name

    return min(names, key=size)


def still(model: nn.Module) -> nn.Module:
    """Without what is drawn anew in every forward."""
    for module in model.modules():
        for name in ("drop_prob", "drop_rate", "dropout_prob", "p"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model.train()


def image_model(name: str) -> Built:
    """A timm model on random images, with cross entropy outside of the graph."""
    import timm

    model = still(timm.create_model(name, num_classes=CLASSES))
    size = model.default_cfg["input_size"]
    x, y = torch.randn(BATCH, *size), torch.arange(BATCH) % CLASSES

    return Built(model, lambda m: images_loss(m(x), y))


def images_loss(out: Any, y: Tensor) -> Tensor:
    """Cross entropy of logits, or of several heads' on average."""
    outs = out if isinstance(out, (tuple, list)) else (out,)
    return torch.stack([nn.functional.cross_entropy(o, y) for o in outs]).mean()


def configured(
    kind: str, config: str, inputs: Callable[[], dict[str, Any]], **settings: Any
) -> Built:
    """A model of transformers by its configuration, with its own loss."""
    import transformers

    made = getattr(transformers, config)(**settings)
    for name in vars(made):
        if "dropout" in name and isinstance(getattr(made, name), float):
            setattr(made, name, 0.0)
    model, given = still(getattr(transformers, kind)(made)), inputs()
    return Built(model, lambda m: m(**given).loss)


def text() -> dict[str, Tensor]:
    """Words, to be predicted."""
    ids = torch.randint(3, WORDS, (BATCH, TOKENS))
    return {"input_ids": ids, "labels": ids}


BLOCKS = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
TEXT = BLOCKS | {"vocab_size": WORDS, "max_position_embeddings": TOKENS}
GPT2 = {"vocab_size": WORDS, "n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": TOKENS,
        "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
T5 = {"vocab_size": WORDS, "d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 2,
      "num_heads": 4, "decoder_start_token_id": 0}  # fmt: skip
ENCODER_DECODER = {
    "vocab_size": WORDS, "d_model": 128, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 256,
    "decoder_ffn_dim": 256, "max_position_embeddings": TOKENS, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip
_LLAMA = TEXT | {"num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_BERT = TEXT | {"max_position_embeddings": 2 * TOKENS, "pad_token_id": 0}


def _text(kind: str, config: str, **settings: Any) -> Callable[[], Built]:
    return functools.partial(configured, kind, config, text, **settings)


TRANSFORMERS: dict[str, Callable[[], Built]] = {
    "gpt2": _text("GPT2LMHeadModel", "GPT2Config", **GPT2),
    "gpt_neox": _text("GPTNeoXForCausalLM", "GPTNeoXConfig", **_BERT),
    "llama": _text("LlamaForCausalLM", "LlamaConfig", **_LLAMA),
    "mistral": _text("MistralForCausalLM", "MistralConfig", **_LLAMA),
    "qwen2": _text("Qwen2ForCausalLM", "Qwen2Config", **_LLAMA),
    "qwen3": _text("Qwen3ForCausalLM", "Qwen3Config", **_LLAMA, head_dim=32),
    "gemma2": _text("Gemma2ForCausalLM", "Gemma2Config", **_LLAMA, head_dim=32),
    "phi3": _text("Phi3ForCausalLM", "Phi3Config", **_LLAMA),
    "olmo2": _text("Olmo2ForCausalLM", "Olmo2Config", **_LLAMA),
    "cohere": _text("CohereForCausalLM", "CohereConfig", **_LLAMA),
    "falcon": _text("FalconForCausalLM", "FalconConfig", vocab_size=WORDS, hidden_size=128,
                    num_hidden_layers=2, num_attention_heads=4, bos_token_id=1,
                    eos_token_id=2),
    "bloom": _text("BloomForCausalLM", "BloomConfig", vocab_size=WORDS, hidden_size=128,
                   n_layer=2, n_head=4),
    "opt": _text("OPTForCausalLM", "OPTConfig", vocab_size=WORDS, hidden_size=128, ffn_dim=256,
                 word_embed_proj_dim=128, num_hidden_layers=2, num_attention_heads=4,
                 max_position_embeddings=TOKENS, pad_token_id=0, bos_token_id=1, eos_token_id=2),
    "mixtral": _text("MixtralForCausalLM", "MixtralConfig", **_LLAMA, num_local_experts=4),
    "mamba": _text("MambaForCausalLM", "MambaConfig", vocab_size=WORDS, hidden_size=128,
                   num_hidden_layers=2, state_size=8),
    "bert": _text("BertForMaskedLM", "BertConfig", **_BERT),
    "roberta": _text("RobertaForMaskedLM", "RobertaConfig", **_BERT),
    "albert": _text("AlbertForMaskedLM", "AlbertConfig", **_BERT, embedding_size=64),
    "distilbert": _text("DistilBertForMaskedLM", "DistilBertConfig", vocab_size=WORDS, dim=128,
                        hidden_dim=256, n_layers=2, n_heads=4, max_position_embeddings=TOKENS),
    "electra": _text("ElectraForMaskedLM", "ElectraConfig", **_BERT, embedding_size=64),
    "modernbert": _text("ModernBertForMaskedLM", "ModernBertConfig", **_BERT, cls_token_id=1,
                        sep_token_id=2, bos_token_id=1, eos_token_id=2),
    "deberta_v2": _text("DebertaV2ForMaskedLM", "DebertaV2Config", **_BERT),
    "t5": _text("T5ForConditionalGeneration", "T5Config", **T5),
    "bart": _text("BartForConditionalGeneration", "BartConfig", **ENCODER_DECODER,
                  forced_eos_token_id=2),
}  # fmt: skip
