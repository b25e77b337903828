"""Models of true widths and cut depths, found by asking the libraries what they have.

One small model of each module of timm; each architecture of transformers that words, images or
sound can train without more ado, by its default configuration; and ``zoo_others``. Tensors are made
on the default device, fewer of them on a CPU.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

WORDS, CLASSES = 8192, 10
SCANNED = 32
"""Tokens of state-space models, whose steps a compiler unrolls."""
MOST = 250_000_000
"""Parameters: some fourteen models share a device."""
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


Models = dict[str, Callable[[], Built]]

_LAYERS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers",
    "num_decoder_layers", "num_encoder_layers", "num_hidden_groups", "n_head_layers",
)  # fmt: skip
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_NARROWER: Mapping[str, int] = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 64, "moe_intermediate_size": 704,
    "n_embd": 1024, "n_head": 16,
}  # fmt: skip
"""For what is larger than ``MOST`` as it is."""
_TIMM: tuple[dict[str, Any], ...] = (
    {"depth": 2}, {"depths": (1, 1, 1, 1)}, {"layers": (1, 1, 1, 1)}, {"depths": (1, 1, 1)}, {},
)  # fmt: skip


def every_model() -> Models:
    """By name: how each is built. What is not installed is left out; libraries take turns, so that
    what is cut short has some of all.
    """
    from zoo_others import OTHERS

    found: dict[tuple[int, str], Callable[[], Built]] = {}
    for library, models in {"timm": _timm, "transformers": _transformers, **OTHERS}.items():
        if importlib.util.find_spec(library):
            named = enumerate(models())
            found |= {(place, f"{library}:{name}"): make for place, (name, make) in named}
    return {key[1]: found[key] for key in sorted(found, key=lambda key: key[0])}


def scale() -> tuple[int, int]:
    """(samples, tokens of each) on the default device."""
    return (8, 256) if torch.get_default_device().type == "cuda" else (2, 64)


def smallest(names: list[str]) -> str:
    """The smallest by name: parameters would take building all thousand of them."""

    def size(name: str) -> tuple[int, int, str]:
        return next((i for i, p in enumerate(SMALL) if p in name), len(SMALL)), len(name), name

    return min(names, key=size)


def draws() -> bool:
    """Models keep what is drawn anew in every forward: dropout, as in training."""
    return False


def still(model: nn.Module) -> nn.Module:
    """To be trained; without what is drawn anew in every forward, unless models are to keep it."""
    for module in () if draws() else model.modules():
        for name in ("drop_prob", "drop_rate", "dropout_prob", "p"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model.train()


def images_loss(out: Any, y: Tensor) -> Tensor:
    """Cross entropy of logits, or of several heads' on average."""
    outs = out if isinstance(out, (tuple, list)) else (out,)
    return torch.stack([nn.functional.cross_entropy(o, y) for o in outs]).mean()


def first_that_runs(builders: Iterator[Callable[[], Built]]) -> Built:
    """The first that can be built and has a loss; else the last one's error."""
    error: Exception | None = None
    for build in builders:
        try:
            built = build()
            with torch.no_grad():
                built.loss(built.model)
        except Exception as failed:
            error = failed
            continue
        if sum(p.numel() for p in built.model.parameters()) <= MOST:
            return built
        error = ValueError(f"more than {MOST:,} parameters even cut")
    assert error is not None
    raise error


def _timm() -> Iterator[tuple[str, Callable[[], Built]]]:
    import timm

    for module in timm.list_modules():
        if names := timm.list_models(module=module):
            yield module, functools.partial(image_model, smallest(names))
    yield from ((name, functools.partial(image_model, name)) for name in BESIDE)


def image_model(name: str) -> Built:
    """One of timm's, by its own name."""
    import timm

    def build(cut: dict[str, Any]) -> Built:
        model = still(timm.create_model(name, num_classes=CLASSES, **cut))
        return classifier(model, torch.randn(scale()[0], *model.default_cfg["input_size"]))

    return first_that_runs(functools.partial(build, cut) for cut in _TIMM)


def classifier(model: nn.Module, *inputs: Tensor) -> Built:
    y = torch.arange(len(inputs[0])) % CLASSES
    return Built(model, lambda m: images_loss(m(*inputs), y))


def _transformers() -> Iterator[tuple[str, Callable[[], Built]]]:
    from transformers.models.auto import modeling_auto

    seen: set[str] = set()
    for kind, inputs in _INPUTS.items():
        names = getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES", {})
        for name, model in names.items():
            chosen = model[0] if isinstance(model, (tuple, list)) else model
            if name not in seen and not chosen.endswith("Backbone"):
                seen.add(name)
                yield name, functools.partial(_configured, name, chosen, inputs)


def _configured(name: str, kind: str, inputs: Callable[[Any], dict[str, Any]]) -> Built:
    """An architecture of transformers by its default configuration, cut."""
    import transformers

    config = transformers.models.auto.configuration_auto.CONFIG_MAPPING[name]
    model = getattr(transformers, kind)

    def build(narrower: Mapping[str, int]) -> Built:
        made = _cut(config, narrower)
        made.use_cache = False
        if getattr(made, "decoder_start_token_id", None) is None:
            made.decoder_start_token_id = 0  # T5's; its configuration has none of its own
        with torch.device("meta"):
            size = sum(p.numel() for p in model(made).parameters())
        if size > MOST:
            raise ValueError(f"{size:,} parameters even cut; at most {MOST:,} are tried")
        given = inputs(made)
        return Built(still(model(made)), lambda m: m(**given).loss)

    return first_that_runs(functools.partial(build, n) for n in ({}, _NARROWER))


def _cut(config: Any, narrower: Mapping[str, int]) -> Any:
    """A configuration of two layers, few experts and words, ``still``; so its parts'."""
    has = {n: p.default for n, p in inspect.signature(config.__init__).parameters.items()}
    given: dict[str, Any] = {n: 2 for n in _LAYERS if isinstance(has.get(n), int)}
    given |= {n: min(8, has[n]) for n in _EXPERTS if isinstance(has.get(n), int)}
    given |= {n: min(v, has[n]) for n, v in narrower.items() if isinstance(has.get(n), int)}
    if not draws():
        given |= {n: 0.0 for n, v in has.items() if "drop" in n and isinstance(v, float)}
        if "apply_spec_augment" in has:
            given["apply_spec_augment"] = False
    given |= {n: 1 for n, v in has.items() if n.endswith("_token_id") and _beyond(v)}
    if {"num_heads", "head_dim", "expand", "hidden_size"} <= has.keys():  # Mamba 2's go together
        width = given.get("hidden_size", has["hidden_size"])
        given["num_heads"] = width * has["expand"] // has["head_dim"]
    if has.get("num_key_value_heads", 1) is None:  # Nemotron's: as many as there are heads
        given["num_key_value_heads"] = given.get("num_attention_heads", has["num_attention_heads"])
    if "attention_types" in has:  # GPT-Neo's: kinds of layers, and how often they come in turns
        given["attention_types"] = [[["global", "local"], 1]]
    if isinstance(has.get("depths"), (list, tuple)):
        given["depths"] = [1] * len(has["depths"])
    if isinstance(has.get("vocab_size"), int):
        given["vocab_size"] = min(WORDS, has["vocab_size"])
    for part, kind in getattr(config, "sub_configs", {}).items():
        if part not in has:
            continue
        if not hasattr(kind, "sub_configs"):  # of any kind: the one that it has by default
            kind = type(getattr(config(), part, None))
        if hasattr(kind, "sub_configs"):
            given[part] = _cut(kind, narrower)
    return config(**given)


def _beyond(token: object) -> bool:
    return isinstance(token, int) and token >= WORDS


def _words(config: Any) -> Tensor:
    told = config.get_text_config()
    scans = any(hasattr(told, n) for n in ("state_size", "mamba_d_state", "mamba_expand", "conv_L"))
    batch, most = scale()
    known = max(getattr(told, "max_position_embeddings", None) or 0, 0) or 2 * most
    tokens = SCANNED if scans else min(most, known // 2)
    return torch.randint(3, told.vocab_size - 1, (batch, tokens))


def _text(config: Any) -> dict[str, Any]:
    ids = _words(config)
    return {"input_ids": ids, "labels": ids}


def _seq2seq(config: Any) -> dict[str, Any]:
    return {"input_ids": _words(config), "labels": _words(config)}


def _pixels(config: Any, *lead: int) -> Tensor:
    side = getattr(config, "image_size", None) or 224
    height, width = side if isinstance(side, (list, tuple)) else (side, side)
    return torch.randn(*(lead or (scale()[0],)), getattr(config, "num_channels", 3), height, width)


def _picture(config: Any) -> dict[str, Any]:
    return {"pixel_values": _pixels(config), "labels": _two_classes()}


def _map(config: Any) -> dict[str, Any]:
    pixels = _pixels(config)
    return {"pixel_values": pixels, "labels": torch.randint(2, (scale()[0], *pixels.shape[-2:]))}


def _two_classes() -> Tensor:
    return torch.arange(scale()[0]) % 2


def _film(config: Any) -> dict[str, Any]:
    frames = getattr(config, "num_frames", 8)
    return {"pixel_values": _pixels(config, scale()[0], frames), "labels": _two_classes()}


def _sound(config: Any) -> dict[str, Any]:
    labels = torch.randint(1, 30, (scale()[0], 20))
    return {"input_values": torch.randn(scale()[0], 32000), "labels": labels}


def _heard(config: Any) -> dict[str, Any]:
    mels = getattr(config, "num_mel_bins", None)  # an AST's pictures of sounds
    shape = (config.max_length, mels) if mels else (32000,)
    return {"input_values": torch.randn(scale()[0], *shape), "labels": _two_classes()}


def _spoken(config: Any) -> dict[str, Any]:
    frames = 2 * getattr(config, "max_source_positions", 1500)
    features = torch.randn(scale()[0], getattr(config, "num_mel_bins", 80), frames)
    return {"input_features": features, "labels": torch.randint(3, WORDS, (scale()[0], 32))}


def _pair(config: Any) -> dict[str, Any]:
    ids = torch.randint(3, WORDS - 1, (scale()[0], 32))
    ids[:, -1] = getattr(config.text_config, "eos_token_id", None) or WORDS - 1
    pixels = _pixels(config.vision_config)
    return {"input_ids": ids, "pixel_values": pixels, "return_loss": True}


_INPUTS: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    "CAUSAL_LM": _text, "MASKED_LM": _text, "SEQ_TO_SEQ_CAUSAL_LM": _seq2seq,
    "IMAGE_CLASSIFICATION": _picture, "CTC": _sound, "SPEECH_SEQ_2_SEQ": _spoken,
    "ZERO_SHOT_IMAGE_CLASSIFICATION": _pair, "SEMANTIC_SEGMENTATION": _map,
    "VIDEO_CLASSIFICATION": _film, "AUDIO_CLASSIFICATION": _heard,
}  # fmt: skip
"""What transformers' lists of architectures are trained on."""
