"""Models of true widths and cut depths, for a GPU: found by asking the libraries what they have.

One small model of each module of timm; each architecture of transformers that words, images or
sound can train without more ado, by its default configuration; torchvision's heads of detection and
segmentation; graph nets of torch_geometric; recurrent nets. Tensors are made on the default device.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from zoo_models import Built, images_loss, smallest, still

BATCH, TOKENS, WORDS, CLASSES = 8, 256, 8192, 10
SCANNED = 32
"""Tokens of state-space models, whose steps a compiler unrolls."""
MOST = 250_000_000
"""Parameters: some fourteen models share a device."""
Models = dict[str, Callable[[], Built]]

_LAYERS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers",
    "num_decoder_layers", "num_encoder_layers", "num_hidden_groups", "n_head_layers",
)  # fmt: skip
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_NARROWER: Mapping[str, int] = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 64, "moe_intermediate_size": 704,
}  # fmt: skip
"""For what is larger than ``MOST`` as it is."""
_TIMM: tuple[dict[str, Any], ...] = (
    {"depth": 2}, {"depths": (1, 1, 1, 1)}, {"layers": (1, 1, 1, 1)}, {"depths": (1, 1, 1)}, {},
)  # fmt: skip


def wide_models() -> Models:
    """By name: how each is built. What is not installed is left out."""
    found: Models = {}
    for library, models in (
        ("timm", _timm), ("transformers", _transformers), ("torchvision", _torchvision),
        ("torch_geometric", _graphs),
    ):  # fmt: skip
        if importlib.util.find_spec(library):
            found |= {f"{library}:{name}": make for name, make in models()}
    return found | {f"torch:{kind}": functools.partial(_recurrent, kind) for kind in _RECURRENT}


def _first_that_runs(builders: Iterator[Callable[[], Built]]) -> Built:
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
            yield module, functools.partial(_image_model, smallest(names))


def _image_model(name: str) -> Built:
    import timm

    def build(cut: dict[str, Any]) -> Built:
        model = still(timm.create_model(name, num_classes=CLASSES, **cut))
        return _classifier(model, torch.randn(BATCH, *model.default_cfg["input_size"]))

    return _first_that_runs(functools.partial(build, cut) for cut in _TIMM)


def _classifier(model: nn.Module, *inputs: Tensor) -> Built:
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
        with torch.device("meta"):
            size = sum(p.numel() for p in model(made).parameters())
        if size > MOST:
            raise ValueError(f"{size:,} parameters even cut; at most {MOST:,} are tried")
        given = inputs(made)
        return Built(still(model(made)), lambda m: m(**given).loss)

    return _first_that_runs(functools.partial(build, n) for n in ({}, _NARROWER))


def _cut(config: Any, narrower: Mapping[str, int]) -> Any:
    """A configuration of two layers, few experts and words, without dropout; so its parts'."""
    has = {n: p.default for n, p in inspect.signature(config.__init__).parameters.items()}
    given: dict[str, Any] = {n: 2 for n in _LAYERS if isinstance(has.get(n), int)}
    given |= {n: min(8, has[n]) for n in _EXPERTS if isinstance(has.get(n), int)}
    given |= {n: min(v, has[n]) for n, v in narrower.items() if isinstance(has.get(n), int)}
    given |= {n: 0.0 for n, v in has.items() if "drop" in n and isinstance(v, float)}
    given |= {n: 1 for n, v in has.items() if n.endswith("_token_id") and _beyond(v)}
    if isinstance(has.get("depths"), (list, tuple)):
        given["depths"] = [1] * len(has["depths"])
    if isinstance(has.get("vocab_size"), int):
        given["vocab_size"] = min(WORDS, has["vocab_size"])
    for part, kind in getattr(config, "sub_configs", {}).items():
        if part in has and hasattr(kind, "sub_configs"):
            given[part] = _cut(kind, narrower)
    return config(**given)


def _beyond(token: object) -> bool:
    return isinstance(token, int) and token >= WORDS


def _words(config: Any) -> Tensor:
    told = config.get_text_config()
    scans = any(hasattr(told, n) for n in ("state_size", "mamba_d_state", "mamba_expand", "conv_L"))
    most = getattr(told, "max_position_embeddings", None) or TOKENS
    tokens = SCANNED if scans else min(TOKENS, most // 2)
    return torch.randint(3, told.vocab_size - 1, (BATCH, tokens))


def _text(config: Any) -> dict[str, Any]:
    ids = _words(config)
    return {"input_ids": ids, "labels": ids}


def _seq2seq(config: Any) -> dict[str, Any]:
    return {"input_ids": _words(config), "labels": _words(config)}


def _pixels(config: Any, *lead: int) -> Tensor:
    side = getattr(config, "image_size", None) or 224
    height, width = side if isinstance(side, (list, tuple)) else (side, side)
    return torch.randn(*(lead or (BATCH,)), getattr(config, "num_channels", 3), height, width)


def _picture(config: Any) -> dict[str, Any]:
    return {"pixel_values": _pixels(config), "labels": torch.arange(BATCH) % 2}


def _map(config: Any) -> dict[str, Any]:
    pixels = _pixels(config)
    return {"pixel_values": pixels, "labels": torch.randint(2, (BATCH, *pixels.shape[-2:]))}


def _film(config: Any) -> dict[str, Any]:
    frames = getattr(config, "num_frames", 8)
    return {"pixel_values": _pixels(config, 2, frames), "labels": torch.arange(2)}


def _sound(config: Any) -> dict[str, Any]:
    labels = torch.randint(1, 30, (2, 20))
    return {"input_values": torch.randn(2, 32000), "labels": labels}


def _heard(config: Any) -> dict[str, Any]:
    return {"input_values": torch.randn(2, 32000), "labels": torch.arange(2)}


def _spoken(config: Any) -> dict[str, Any]:
    frames = 2 * getattr(config, "max_source_positions", 1500)
    features = torch.randn(2, getattr(config, "num_mel_bins", 80), frames)
    return {"input_features": features, "labels": torch.randint(3, WORDS, (2, 32))}


def _pair(config: Any) -> dict[str, Any]:
    ids = torch.randint(3, WORDS - 1, (BATCH, 32))
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


def _torchvision() -> Iterator[tuple[str, Callable[[], Built]]]:
    for name in ("fcn_resnet50", "deeplabv3_resnet50", "lraspp_mobilenet_v3_large"):
        yield name, functools.partial(_segmenting, name)
    for name in ("r3d_18", "mc3_18", "s3d", "mvit_v1_b", "swin3d_t"):
        yield name, functools.partial(_filming, name)
    yield from ((name, functools.partial(_detecting, name)) for name in _HEADS)


def _segmenting(name: str) -> Built:
    from torchvision.models import segmentation

    model = still(getattr(segmentation, name)(weights=None, weights_backbone=None, num_classes=21))
    x, y = torch.randn(BATCH, 3, 224, 224), torch.randint(21, (BATCH, 224, 224))
    return Built(model, lambda m: F.cross_entropy(m(x)["out"], y))


def _filming(name: str) -> Built:
    from torchvision.models import video

    side = 224 if name.startswith(("mvit", "swin")) else 112
    model = still(getattr(video, name)(weights=None, num_classes=CLASSES))
    return _classifier(model, torch.randn(4, 3, 16, side, side))


_HEADS = ("rpn", "retinanet", "fcos", "fast_rcnn", "mask_rcnn", "keypoint_rcnn")


def _detecting(name: str) -> Built:
    """A head of detection on features of a pyramid, whose results are compared with noise."""
    from torchvision.models import detection as d

    pyramid = [torch.randn(BATCH, 256, side, side) for side in (64, 32, 16)]
    regions = torch.randn(64, 256, 14, 14)
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

    nodes, edges = 4096, 32768
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
    return _classifier(model, torch.randn(64, 16 if cells else 128, 512))
