"""Fine-tune Stable Diffusion's UNet by LoRA on a folder of images; ``unet.compile(backend="hot")``.

The loop is that of diffusers' ``train_dreambooth_lora.py``: noise is added to images' latents, and
learned. Without ``--model`` a tiny UNet with random weights learns scikit-learn's digits, each by
its number. Nothing is downloaded then.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from common import learn
from data import digits
from peft import LoraConfig
from torch import Tensor, nn

TEXT = 32
TINY = {
    "sample_size": 16, "in_channels": 1, "out_channels": 1, "layers_per_block": 1,
    "block_out_channels": (32,), "norm_num_groups": 8, "attention_head_dim": 8,
    "down_block_types": ("CrossAttnDownBlock2D",),
    "up_block_types": ("CrossAttnUpBlock2D",), "cross_attention_dim": TEXT,
}  # fmt: skip
ATTENTION = ["to_q", "to_k", "to_v", "to_out.0"]

Given = tuple[nn.Module, Any, Tensor, Tensor]
"""(UNet, noise's scheduler, latents [N, C, H, W], a text for each [N, tokens, width])."""


def tiny() -> Given:
    """A UNet for 16 x 16 pixels, and digits for it."""
    from diffusers import DDPMScheduler, UNet2DConditionModel

    split = digits(16)
    texts = torch.randn(10, 4, TEXT)[split.train_y]
    return UNet2DConditionModel(**TINY), DDPMScheduler(), split.train_x, texts


@torch.no_grad()
def pretrained(name: str, images: Path | None, prompt: str, size: int, device: str) -> Given:
    """A pipeline's UNet; what its other parts make of the images and of the prompt.

    Raises FileNotFoundError if the folder has no image.
    """
    files = sorted(f for f in images.iterdir() if f.suffix.lower() in (".jpg", ".jpeg", ".png"))
    if not files:
        raise FileNotFoundError(f"got {images}, in which no .jpg, .jpeg or .png lies")
    from diffusers import DDPMScheduler, StableDiffusionPipeline
    from PIL import Image

    parts = StableDiffusionPipeline.from_pretrained(name, safety_checker=None).to(device)
    loaded = [Image.open(f).convert("RGB").resize((size, size)) for f in files]
    pixels = [parts.image_processor.preprocess(image).to(device) for image in loaded]
    factor = parts.vae.config.scaling_factor
    latents = torch.cat([parts.vae.encode(x).latent_dist.mean * factor for x in pixels])
    text, _ = parts.encode_prompt(prompt, device, 1, do_classifier_free_guidance=False)
    scheduler = DDPMScheduler.from_config(parts.scheduler.config)
    return parts.unet, scheduler, latents, text.repeat(len(latents), 1, 1)


def loss_of(unet: nn.Module, scheduler: Any, latents: Tensor, text: Tensor) -> Tensor:
    """Mean squared error of the noise that the UNet finds, or of what its scheduler asks for."""
    noise = torch.randn_like(latents)
    steps = scheduler.config.num_train_timesteps
    times = torch.randint(steps, (len(latents),), device=latents.device)
    found = unet(scheduler.add_noise(latents, noise, times), times, text, return_dict=False)[0]
    velocity = scheduler.config.prediction_type == "v_prediction"
    wanted = scheduler.get_velocity(latents, noise, times) if velocity else noise
    return F.mse_loss(found.float(), wanted)


def main(
    model: Annotated[str | None, typer.Option(help="a pipeline on the hub, or a folder")] = None,
    images: Annotated[Path | None, typer.Option(help="folder of images to learn")] = None,
    prompt: Annotated[str, typer.Option(help="what all of them show")] = "a photo of sks dog",
    backend: Annotated[str, typer.Option(help="hot, or inductor to compare")] = "hot",
    steps: Annotated[int, typer.Option(min=1)] = 400,
    batch: Annotated[int, typer.Option(min=1, help="images in a step")] = 4,
    size: Annotated[int, typer.Option(min=64, help="side of the images, in pixels")] = 512,
    rank: Annotated[int, typer.Option(min=1, help="LoRA's r")] = 16,
    out: Annotated[Path, typer.Option(help="folder for the adapter")] = Path("lora-unet"),
    quick: Annotated[bool, typer.Option(help="a few steps only")] = False,
) -> list[float]:
    """Train, print the loss now and then, and keep the adapter."""
    if (model is None) != (images is None):
        raise typer.BadParameter(
            "--model and --images go together; without them digits are learned"
        )
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    steps = min(steps, 8) if quick else steps
    given = tiny() if model is None else pretrained(model, images, prompt, size, device)
    unet, scheduler, latents, texts = given
    unet.requires_grad_(False).to(device)
    unet.add_adapter(LoraConfig(r=rank, lora_alpha=rank, target_modules=ATTENTION))
    unet.train().compile(backend=backend)  # the one line
    trained = [p for p in unet.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3 if model is None else 1e-4)

    def loss_of_a_batch() -> Tensor:
        rows = torch.randint(len(latents), (batch,))
        with torch.autocast(device, torch.bfloat16):
            return loss_of(unet, scheduler, latents[rows].to(device), texts[rows].to(device))

    losses = learn(loss_of_a_batch, optimizer, steps)
    unet.save_lora_adapter(out)
    return losses


if __name__ == "__main__":
    typer.run(main)
