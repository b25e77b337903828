"""Small models that see, hear, or draw: transformers' beyond plain text, and diffusers'."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from zoo_models import (
    BATCH,
    BLOCKS,
    CLASSES,
    ENCODER_DECODER,
    GPT2,
    T5,
    TEXT,
    TOKENS,
    WORDS,
    Built,
    configured,
    still,
    text,
)

_SIDE = 32
_VIT = BLOCKS | {"image_size": _SIDE, "patch_size": 4}
_SPEECH = BLOCKS | {
    "vocab_size": 32, "conv_dim": (32, 32, 32), "conv_stride": (5, 4, 4),
    "conv_kernel": (10, 8, 4), "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
    "mask_time_prob": 0.0, "layerdrop": 0.0, "pad_token_id": 0,
}  # fmt: skip


def _ids(length: int = TOKENS) -> Tensor:
    return torch.randint(3, WORDS, (BATCH, length))


def _image(channels: int = 3) -> Tensor:
    return torch.randn(BATCH, channels, _SIDE, _SIDE)


def _hears() -> dict[str, Tensor]:
    return {"input_values": torch.randn(BATCH, 16000), "labels": torch.randint(1, 32, (BATCH, 20))}


def _whisper() -> dict[str, Tensor]:
    return {"input_features": torch.randn(BATCH, 16, 128), "labels": _ids(32)}


def _pairs() -> dict[str, Any]:
    """Images with texts; a text ends with its largest word."""
    ids = _ids(16)
    ids[:, -1] = WORDS - 1
    return {"input_ids": ids, "pixel_values": _image(), "return_loss": True}


def _moves(tokens: int = 0, width: int = 128) -> dict[str, Tensor]:
    """Noisy latents at their steps, with ``tokens`` embeddings of a text if there are any."""
    given = {"sample": _image(4), "timestep": torch.randint(1000, (BATCH,))}
    return given | ({"encoder_hidden_states": torch.randn(BATCH, tokens, width)} if tokens else {})


def _dit() -> dict[str, Tensor]:
    steps, classes = torch.randint(1000, (BATCH,)), torch.arange(BATCH) % CLASSES
    return {"hidden_states": _image(4), "timestep": steps, "class_labels": classes}


def _sd3() -> dict[str, Tensor]:
    return {
        "hidden_states": _image(4), "timestep": torch.randint(1000, (BATCH,)),
        "encoder_hidden_states": torch.randn(BATCH, 16, 64),
        "pooled_projections": torch.randn(BATCH, 64),
    }  # fmt: skip


def _pixart() -> dict[str, Any]:
    return {
        "hidden_states": _image(4), "timestep": torch.randint(1000, (BATCH,)),
        "encoder_hidden_states": torch.randn(BATCH, 16, 64),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }  # fmt: skip


def drawing(kind: str, inputs: Callable[[], dict[str, Any]], **settings: Any) -> Built:
    """A model of diffusers, whose result is compared with noise."""
    import diffusers

    model, given = still(getattr(diffusers, kind)(**settings)), inputs()
    with torch.no_grad():
        noise = torch.randn_like(model(**given).sample)
    return Built(model, lambda m: torch.nn.functional.mse_loss(m(**given).sample, noise))


def _seq2seq(length: int = TOKENS) -> dict[str, Tensor]:
    return {"input_ids": _ids(length), "labels": _ids(length)}


def _labelled() -> dict[str, Tensor]:
    return {"pixel_values": _image(), "labels": torch.arange(BATCH) % CLASSES}


_MOE = TEXT | {
    "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0,
}  # fmt: skip
_WHISPER = ENCODER_DECODER | {
    "num_mel_bins": 16, "max_source_positions": 64, "max_target_positions": TOKENS,
    "suppress_tokens": None, "begin_suppress_tokens": None,
}  # fmt: skip
_DIFFUSION = {"num_attention_heads": 4, "attention_head_dim": 32, "num_layers": 2,
              "sample_size": _SIDE, "patch_size": 2}  # fmt: skip

_CONFIGURED: Mapping[str, tuple[str, str, Callable[[], dict[str, Any]], dict[str, Any]]] = {
    "vit": ("ViTForImageClassification", "ViTConfig", _labelled, {**_VIT, "num_labels": CLASSES}),
    "clip": ("CLIPModel", "CLIPConfig", _pairs,
             {"text_config": TEXT | {"eos_token_id": WORDS - 1}, "vision_config": _VIT}),
    "siglip": ("SiglipModel", "SiglipConfig", _pairs,
               {"text_config": TEXT, "vision_config": _VIT}),
    "wav2vec2": ("Wav2Vec2ForCTC", "Wav2Vec2Config", _hears, _SPEECH),
    "hubert": ("HubertForCTC", "HubertConfig", _hears, _SPEECH),
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig", _whisper, _WHISPER),
    "mbart": ("MBartForConditionalGeneration", "MBartConfig", _seq2seq, ENCODER_DECODER),
    "pegasus": ("PegasusForConditionalGeneration", "PegasusConfig", _seq2seq, ENCODER_DECODER),
    "blenderbot": ("BlenderbotForConditionalGeneration", "BlenderbotConfig", _seq2seq,
                   ENCODER_DECODER),
    "qwen2_moe": ("Qwen2MoeForCausalLM", "Qwen2MoeConfig", text,
                  {**_MOE, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 128}),
    "olmoe": ("OlmoeForCausalLM", "OlmoeConfig", text, _MOE),
    "switch": ("SwitchTransformersForConditionalGeneration", "SwitchTransformersConfig", _seq2seq,
               {**T5, "num_experts": 4, "router_jitter_noise": 0.0}),
    "gptj": ("GPTJForCausalLM", "GPTJConfig", text, {**GPT2, "rotary_dim": 16}),
}  # fmt: skip
_DRAWING: Mapping[str, tuple[str, Callable[[], dict[str, Any]], dict[str, Any]]] = {
    "unet2d": ("UNet2DModel", _moves,
               {"sample_size": _SIDE, "in_channels": 4, "out_channels": 4,
                "block_out_channels": (32, 64), "layers_per_block": 1,
                "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
                "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}),
    "unet2d_condition": ("UNet2DConditionModel", functools.partial(_moves, 16, 64),
                         {"sample_size": _SIDE, "block_out_channels": (32, 64),
                          "layers_per_block": 1, "cross_attention_dim": 64,
                          "attention_head_dim": 4,
                          "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
                          "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D")}),
    "dit": ("DiTTransformer2DModel", _dit,
            {**_DIFFUSION, "in_channels": 4, "num_embeds_ada_norm": 1000}),
    "pixart": ("PixArtTransformer2DModel", _pixart,
               {**_DIFFUSION, "in_channels": 4, "out_channels": 4, "cross_attention_dim": 128,
                "caption_channels": 64}),
    "sd3": ("SD3Transformer2DModel", _sd3,
            {**_DIFFUSION, "in_channels": 4, "out_channels": 4, "joint_attention_dim": 64,
             "caption_projection_dim": 128, "pooled_projection_dim": 64,
             "pos_embed_max_size": 16}),
    "autoencoder_kl": ("AutoencoderKL", lambda: {"sample": _image()},
                       {"block_out_channels": (32, 64), "latent_channels": 4,
                        "down_block_types": ("DownEncoderBlock2D",) * 2,
                        "up_block_types": ("UpDecoderBlock2D",) * 2, "norm_num_groups": 8}),
    "vq": ("VQModel", lambda: {"sample": _image()},
           {"block_out_channels": (32, 64), "norm_num_groups": 8,
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "up_block_types": ("UpDecoderBlock2D",) * 2}),
}  # fmt: skip


def more_models() -> dict[str, Callable[[], Built]]:
    """By name: how each is built."""
    found: dict[str, Callable[[], Built]] = {}
    for name, (kind, config, inputs, settings) in _CONFIGURED.items():
        found[f"transformers:{name}"] = functools.partial(
            configured, kind, config, inputs, **settings
        )
    for name, (kind, inputs, settings) in _DRAWING.items():
        found[f"diffusers:{name}"] = functools.partial(drawing, kind, inputs, **settings)
    return found
