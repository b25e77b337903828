"""Models of diffusion at their true widths, cut in depth, as their training scripts step them.

What a step learns is the noise in latents, from a text's embeddings: a mean squared error. With
``lora`` only adapters of rank 16 at the attentions learn, as in diffusers' own scripts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from models import Size, Workload
from torch import Tensor, nn
from torch.nn import functional as F

TEXT, JOINT = 256, 4096
"""Tokens of a text, and how wide T5's embeddings of them are."""
_ADAPTED = ["to_q", "to_k", "to_v", "to_out.0"]

Made = tuple[nn.Module, dict[str, Tensor]]


def _given(batch: int, text: int, **more: Tensor) -> dict[str, Tensor]:
    """A text's embeddings, as wide as ``text``, and how noisy latents are: of 1000, or as told."""
    embeddings = torch.randn(batch, TEXT, text)
    return {"encoder_hidden_states": embeddings, "timestep": torch.rand(batch) * 999, **more}


def _sd3(size: Size) -> Made:
    """SD3 medium's transformer."""
    from diffusers import SD3Transformer2DModel

    side, width = size.image or 128, size.width or 1536
    model = SD3Transformer2DModel(
        sample_size=side, num_layers=size.depth or 6, num_attention_heads=width // 64,
        caption_projection_dim=width, joint_attention_dim=JOINT,
    )  # fmt: skip
    latents = torch.randn(size.batch, 16, side, side)
    pooled = torch.randn(size.batch, 2048)
    return model, _given(size.batch, JOINT, hidden_states=latents, pooled_projections=pooled)


def _flux(size: Size) -> Made:
    """Flux's: two kinds of blocks, those of two streams and twice as many of one."""
    from diffusers import FluxTransformer2DModel

    torch.backends.cuda.enable_cudnn_sdp(False)  # torch 2.11's fails in a backward of this size
    side, depth, batch = size.image or 64, size.depth or 2, size.batch
    model = FluxTransformer2DModel(
        num_layers=depth, num_single_layers=2 * depth, joint_attention_dim=JOINT,
        num_attention_heads=(size.width or 3072) // 128,
    )  # fmt: skip
    rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    places = torch.stack([torch.zeros_like(rows), rows, columns], -1).view(-1, 3).float()
    return model, _given(
        batch, JOINT, hidden_states=torch.randn(batch, side * side, 64), img_ids=places,
        txt_ids=torch.zeros(TEXT, 3), pooled_projections=torch.randn(batch, 768),
        timestep=torch.rand(batch),
    )  # fmt: skip


def _unet(size: Size) -> Made:
    """Stable Diffusion 1.5's, of convolutions and cross attention; ``depth`` of 2 layers a block"""
    from diffusers import UNet2DConditionModel

    side, width = size.image or 64, size.width or 320
    model = UNet2DConditionModel(
        sample_size=side, layers_per_block=size.depth or 1, cross_attention_dim=768,
        block_out_channels=(width, 2 * width, 4 * width, 4 * width),
    )  # fmt: skip
    return model, _given(size.batch, 768, sample=torch.randn(size.batch, 4, side, side))


def _video(size: Size) -> Made:
    """Wan 2.1's of 1.3 billion parameters, whose patches are of several frames' latents."""
    from diffusers import WanTransformer3DModel

    side, width = size.image or 64, size.width or 1536
    model = WanTransformer3DModel(
        num_layers=size.depth or 4, num_attention_heads=width // 128, ffn_dim=width * 35 // 6,
        text_dim=JOINT,
    )  # fmt: skip
    frames = torch.randn(size.batch, 16, 5, side, side)
    return model, _given(size.batch, JOINT, hidden_states=frames)


MODELS: dict[str, Callable[[Size], Made]] = {
    "sd3": _sd3, "flux": _flux, "unet": _unet, "video": _video,
}  # fmt: skip
"""By name."""


def build(name: str, size: Size, lora: bool = False) -> Workload:
    """Random weights and inputs of one of ``MODELS``."""
    model, given = MODELS[name](size)
    if lora:
        from peft import LoraConfig

        model.requires_grad_(False)
        model.add_adapter(LoraConfig(r=16, lora_alpha=16, target_modules=_ADAPTED))
    names = list(given)

    def loss(forward: Callable[..., Any], *inputs: Tensor) -> Tensor:
        *inputs, noise = inputs
        made = forward(**dict(zip(names, inputs, strict=True)), return_dict=False)[0]
        return F.mse_loss(made.float(), noise)

    latents = given["sample" if "sample" in given else "hidden_states"]
    return Workload(model.train(), (*given.values(), torch.randn_like(latents)), loss)
