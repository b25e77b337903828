"""Models of the zoo beyond timm's and transformers': heads of detection and segmentation, films,
graph nets, recurrent nets, and small ones of diffusers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from zoo_models import CLASSES, Built, classifier, scale, still


def _torchvision() -> Iterator[tuple[str, Callable[[], Built]]]:
    for name in ("fcn_resnet50", "deeplabv3_resnet50", "lraspp_mobilenet_v3_large"):
        yield name, functools.partial(_segmenting, name)
    for name in ("r3d_18", "mc3_18", "s3d", "mvit_v1_b", "swin3d_t"):
        yield name, functools.partial(_filming, name)
    yield from ((name, functools.partial(_detecting, name)) for name in _HEADS)


def _segmenting(name: str) -> Built:
    from torchvision.models import segmentation

    model = still(getattr(segmentation, name)(weights=None, weights_backbone=None, num_classes=21))
    x, y = torch.randn(scale()[0], 3, 224, 224), torch.randint(21, (scale()[0], 224, 224))
    return Built(model, lambda m: F.cross_entropy(m(x)["out"], y))


def _filming(name: str) -> Built:
    from torchvision.models import video

    side = 224 if name.startswith(("mvit", "swin")) else 112
    model = still(getattr(video, name)(weights=None, num_classes=CLASSES))
    return classifier(model, torch.randn(scale()[0], 3, 16, side, side))


_HEADS = ("rpn", "retinanet", "fcos", "fast_rcnn", "mask_rcnn", "keypoint_rcnn")


def _detecting(name: str) -> Built:
    """A head of detection on features of a pyramid, whose results are compared with noise."""
    from torchvision.models import detection as d

    pyramid = [torch.randn(scale()[0], 256, side, side) for side in (64, 32, 16)]
    regions = torch.randn(8 * scale()[0], 256, 14, 14)
    keypoints = d.keypoint_rcnn
    model, x = {
        "rpn": lambda: (d.rpn.RPNHead(256, 3), pyramid),
        "retinanet": lambda: (d.retinanet.RetinaNetHead(256, 9, 91), pyramid),
        "fcos": lambda: (d.fcos.FCOSHead(256, 1, 91), pyramid),
        "fast_rcnn": lambda: (_boxes(d.faster_rcnn), regions[..., ::2, ::2].contiguous()),
        "mask_rcnn": lambda: (_masks(d.mask_rcnn), regions),
        "keypoint_rcnn": lambda: (_points(keypoints), regions),
    }[name]()
    return Built(still(model), lambda m: _spread(m(x)))


def _boxes(rcnn: Any) -> nn.Module:
    return nn.Sequential(rcnn.TwoMLPHead(256 * 49, 1024), rcnn.FastRCNNPredictor(1024, 91))


def _masks(rcnn: Any) -> nn.Module:
    heads = rcnn.MaskRCNNHeads(256, (256,) * 4, 1)
    return nn.Sequential(heads, rcnn.MaskRCNNPredictor(256, 256, 91))


def _points(rcnn: Any) -> nn.Module:
    heads = rcnn.KeypointRCNNHeads(256, (512,) * 8)
    return nn.Sequential(heads, rcnn.KeypointRCNNPredictor(512, 17))


def _spread(out: Any) -> Tensor:
    """A loss of any nest of results: how far each is from a ramp."""
    leaves = [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, Tensor)]
    ramps = [torch.linspace(-1, 1, t.numel(), device=t.device).view_as(t) for t in leaves]
    return torch.stack([F.mse_loss(t.float(), r) for t, r in zip(leaves, ramps, strict=True)]).sum()


def _graphs() -> Iterator[tuple[str, Callable[[], Built]]]:
    for name in ("GCN", "GraphSAGE", "GIN", "GAT", "PNA", "EdgeCNN"):
        yield name.lower(), functools.partial(_graph, name)


def _graph(name: str) -> Built:
    import torch_geometric.nn as pyg

    nodes, edges = 512 * scale()[0], 4096 * scale()[0]
    more = {"aggregators": ["mean", "max"], "scalers": ["identity"], "deg": torch.ones(16)}
    kind = getattr(pyg, name)
    model = kind(128, 256, 2, CLASSES, **(more if name == "PNA" else {}))
    x, y = torch.randn(nodes, 128), torch.arange(nodes) % CLASSES
    edge_index = torch.randint(nodes, (2, edges))
    return Built(still(model), lambda m: F.cross_entropy(m(x, edge_index), y))


class _Cells(nn.Module):
    """A recurrent net by its cell, step by step, which compiles as one graph."""

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.cell, self.head = getattr(nn, kind)(width, width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, C] -> [B, classes]."""
        state: Any = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.head(state[0] if isinstance(state, tuple) else state)


class _Layers(nn.Module):
    """torch's own recurrent layers, which Dynamo does not trace."""

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.before = nn.Linear(width, width)
        self.layers = getattr(nn, kind)(width, width, 2, batch_first=True)
        self.head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, C] -> [B, classes]."""
        return self.head(self.layers(self.before(x))[0][:, -1])


_RECURRENT = ("LSTM", "GRU", "RNN", "LSTMCell", "GRUCell")


def _recurrent(kind: str) -> Built:
    cells = kind.endswith("Cell")
    model = (_Cells if cells else _Layers)(kind, 512)
    return classifier(model, torch.randn(8 * scale()[0], 16 if cells else 128, 512))


_SIDE = 32
"""Pixels of diffusers' latents."""


def _latent(channels: int = 4) -> Tensor:
    return torch.randn(scale()[0], channels, _SIDE, _SIDE)


def _moves(tokens: int = 0, width: int = 128) -> dict[str, Tensor]:
    """Noisy latents at their steps, with ``tokens`` embeddings of a text if there are any."""
    count = scale()[0]
    given = {"sample": _latent(), "timestep": torch.randint(1000, (count,))}
    return given | ({"encoder_hidden_states": torch.randn(count, tokens, width)} if tokens else {})


def _dit() -> dict[str, Tensor]:
    steps, classes = torch.randint(1000, (scale()[0],)), torch.arange(scale()[0]) % CLASSES
    return {"hidden_states": _latent(), "timestep": steps, "class_labels": classes}


def _sd3() -> dict[str, Tensor]:
    return {
        "hidden_states": _latent(), "timestep": torch.randint(1000, (scale()[0],)),
        "encoder_hidden_states": torch.randn(scale()[0], 16, 64),
        "pooled_projections": torch.randn(scale()[0], 64),
    }  # fmt: skip


def _pixart() -> dict[str, Any]:
    return {
        "hidden_states": _latent(), "timestep": torch.randint(1000, (scale()[0],)),
        "encoder_hidden_states": torch.randn(scale()[0], 16, 64),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }  # fmt: skip


def _drawing(kind: str, inputs: Callable[[], dict[str, Any]], **settings: Any) -> Built:
    """A model of diffusers, whose result is compared with noise."""
    import diffusers

    model, given = still(getattr(diffusers, kind)(**settings)), inputs()
    with torch.no_grad():
        noise = torch.randn_like(model(**given).sample)
    return Built(model, lambda m: torch.nn.functional.mse_loss(m(**given).sample, noise))


_DIFFUSION = {"num_attention_heads": 4, "attention_head_dim": 32, "num_layers": 2,
              "sample_size": _SIDE, "patch_size": 2}  # fmt: skip

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
    "autoencoder_kl": ("AutoencoderKL", lambda: {"sample": _latent(3)},
                       {"block_out_channels": (32, 64), "latent_channels": 4,
                        "down_block_types": ("DownEncoderBlock2D",) * 2,
                        "up_block_types": ("UpDecoderBlock2D",) * 2, "norm_num_groups": 8}),
    "oobleck": ("AutoencoderOobleck", lambda: {"sample": torch.randn(scale()[0], 2, 8192)},
                {"encoder_hidden_size": 64, "downsampling_ratios": [2, 4, 4],
                 "channel_multiples": [1, 2, 4], "decoder_channels": 64,
                 "decoder_input_channels": 32, "audio_channels": 2}),
    "vq": ("VQModel", lambda: {"sample": _latent(3)},
           {"block_out_channels": (32, 64), "norm_num_groups": 8,
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "up_block_types": ("UpDecoderBlock2D",) * 2}),
}  # fmt: skip


def _recurrents() -> Iterator[tuple[str, Callable[[], Built]]]:
    yield from ((kind, functools.partial(_recurrent, kind)) for kind in _RECURRENT)


def _drawings() -> Iterator[tuple[str, Callable[[], Built]]]:
    for name, (kind, inputs, settings) in _DRAWING.items():
        yield name, functools.partial(_drawing, kind, inputs, **settings)


OTHERS: Mapping[str, Callable[[], Iterator[tuple[str, Callable[[], Built]]]]] = {
    "torchvision": _torchvision,
    "torch_geometric": _graphs,
    "torch": _recurrents,
    "diffusers": _drawings,
}
"""By library: its models, and how each is built."""
