"""LoRA on one long sequence: stock beside hot, and what others' tools make of it.

    python benchmarks/long_context.py --device cuda --json out.json
    python benchmarks/long_context.py --device cuda --tokens 131072 --vocab 8192 --steps 1
    python benchmarks/long_context.py --device cuda --tokens 8192 --arms \
        "eager,eager liger,stock,stock cce,hot,eager kept,eager liger kept,stock kept,hot kept"

A Llama with LoRA (peft), a batch of one sequence; by default Llama-8B's dimensions cut to four
layers on a GPU, in bf16 under autocast, as Hugging Face's Trainer has it (adapters are fp32, and
without it would be multiplied so); a tiny one in fp32 on a CPU. An arm is words. The first compiles
it: ``eager`` not at all, ``stock`` as a whole by Inductor, ``hot`` by hot. Then:

* ``kept``: without checkpoints, which all others have around their blocks
* ``offload``: under torch's ``save_on_cpu``
* ``blocks``: each block by itself, the head with its loss, ``hot_compile.compress_boundaries``;
  ``host``: these in host memory
* ``liger``: Liger's kernels for all that it has (``pip install liger-kernel``; they are not for
  Dynamo, torch 2.11); ``cce``: the loss by cut-cross-entropy
* ``nf4``: frozen weights in 4 bits (QLoRA) by bitsandbytes

``peak`` is above weights; ``kept`` in the table is what stands between forward and backward, on a
GPU. What does not fit is no row of the table, and has its error in the JSON.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import head
import peft
import tables
import torch
import transformers
import typer
from report import StepRow, document, publish
from step import synchronize
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama import modeling_llama

import hot_compile
from hot_compile.memory import peak_bytes

MASKLESS = {"attn_implementation": "causal"}
"""Transformers makes no mask for a name that it does not know. Traced, it makes one for "sdpa" even
where all is causal: 32 GiB at 131072 tokens, and kept for the backward, by any backend."""
AS_INSTALLED = dict(vars(modeling_llama))
"""Liger changes it."""
LOOKED_AT = 4
"""Steps until hot has looked at three; the next look is at the eighth."""
ARMS = "stock,stock offload,hot,hot blocks,hot blocks host"
LARGE = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "rope_theta": 500000.0,
}  # fmt: skip
SMALL = {
    "hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


@dataclass
class Row(StepRow):
    """One arm at one length."""

    kept_bytes: int = 0
    error: str = ""


def build(
    arm: str, sizes: dict[str, Any], layers: int, vocab: int, device: torch.device
) -> nn.Module:
    """Random weights in bf16 on a GPU, frozen; LoRA of rank 16 on all but the head."""
    more = {"num_hidden_layers": layers, "vocab_size": vocab, "max_position_embeddings": 2**18}
    vars(modeling_llama).update(AS_INSTALLED)
    transformers.AttentionInterface.register("causal", sdpa_attention_forward)
    config = transformers.LlamaConfig(**sizes, **more, use_cache=False, **MASKLESS)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device(device):
        model = transformers.LlamaForCausalLM(config).to(dtype)
    words = arm.split()
    if "liger" in words:
        _use_liger(model)
    if "nf4" in words:
        _in_four_bits(model.model, device)
    return peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules="all-linear")).train()


def _use_liger(model: nn.Module) -> None:
    """Its norms, SwiGLU and head with loss in this model, its rotary embedding in any."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama(model=model)


def _in_four_bits(model: nn.Module, device: torch.device) -> None:
    """Every Linear becomes bitsandbytes' of NF4, which quantises as it is moved."""
    import bitsandbytes

    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear:
                kept = child.weight.data.cpu()
                small = bitsandbytes.nn.Linear4bit(
                    child.in_features, child.out_features, bias=False, quant_type="nf4",
                    compute_dtype=kept.dtype, device="cpu",
                )  # fmt: skip
                small.load_state_dict({"weight": kept})
                setattr(module, name, small.to(device))


def prepare(model: nn.Module, arm: str, bits: int) -> Callable[[Tensor], Tensor]:
    """Compile ``model`` as ``arm`` says; gives the forward, which returns the loss."""
    torch._dynamo.reset()
    words = arm.split()
    if "kept" not in words:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.disable_input_require_grads()  # only reentrant ones need it; Dynamo's graph breaks
    backend = {"eager": "eager", "stock": "inductor", "hot": "hot"}[words[0]]
    causal: nn.Module = model.base_model.model
    call: Callable[[Tensor], Tensor]
    if "blocks" in words:
        hot_compile.compress_boundaries(model, bits=bits, host="host" in words)
        for block in causal.model.layers:
            block.forward = torch.compile(block.forward, backend=backend)
        call = with_head(causal, backend)
    else:
        whole = head.LossOnly(causal)
        whole.config = "cce" if "cce" in words else "exact"
        call = whole if backend == "eager" else torch.compile(whole, backend=backend)
    on_gpu = next(model.parameters()).is_cuda

    def forward(ids: Tensor) -> Tensor:
        offload = torch.autograd.graph.save_on_cpu(on_gpu) if "offload" in words else None
        bf16 = torch.autocast(ids.device.type, torch.bfloat16, enabled=on_gpu)
        with bf16, offload or contextlib.nullcontext():
            return call(ids)

    return forward


def with_head(causal: nn.Module, backend: str) -> Callable[[Tensor], Tensor]:
    """What calls ``causal``'s blocks as they are, and its head with its loss compiled as one."""

    @torch.compile(backend=backend)
    def loss_of(hidden: Tensor, labels: Tensor) -> Tensor:
        logits = causal.lm_head(hidden[:, :-1]).float()
        return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())

    return lambda ids: loss_of(causal.model(ids)[0], ids)


def measure(row: Row, model: nn.Module, ids: Tensor, bits: int, steps: int) -> None:
    """Fill ``row``: the first step compiles, hot looks at that and at two of the next three; then
    one is watched, and the rest are timed."""
    forward = prepare(model, row.config, bits)

    def step() -> None:
        model.zero_grad()  # steps that do not are taken for parts of one, and looked at together
        before = allocated(ids.device)
        loss = forward(ids)
        row.kept_bytes = allocated(ids.device) - before
        loss.backward()
        row.loss = loss.item()  # read in between, it would have the device wait for its host

    def seconds() -> float:
        begun = time.perf_counter()
        step()
        synchronize(ids.device)
        return time.perf_counter() - begun

    row.compile_s = seconds()
    for _ in range(LOOKED_AT - 1):
        step()
    row.peak_bytes = peak_bytes(step, ids.device)
    row.best_ms = 1e3 * min(seconds() for _ in range(steps))


def allocated(device: torch.device) -> int:
    """Bytes on a GPU; 0 of a CPU, whose hooked tensors nobody counts without unpacking them."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def rows_of(
    arms: list[str], tokens: int, device: torch.device, bits: int, steps: int, **sizes: Any
) -> list[Row]:
    """One model after the other: several would not fit."""
    rows = [Row(f"{tokens} tokens", arm) for arm in arms]
    for row in rows:
        torch.manual_seed(0)
        model = build(row.config, device=device, **sizes)
        ids = torch.randint(sizes["vocab"], (1, tokens), device=device)
        try:
            measure(row, model, ids, bits, steps)
        except torch.OutOfMemoryError:
            row.error = "out of memory"
        del model
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        print(row, flush=True)
    return rows


def main(
    device: Annotated[str, typer.Option()] = "cpu",
    tokens: Annotated[int, typer.Option(help="in the one sequence; 0: 32768, or 512 on a CPU")] = 0,
    layers: Annotated[int, typer.Option(help="0: 4, or 2 on a CPU")] = 0,
    vocab: Annotated[int, typer.Option(help="0: 128256, or 256 on a CPU")] = 0,
    arms: Annotated[str, typer.Option(help="of those above, divided by commas")] = ARMS,
    bits: Annotated[int, typer.Option(help="of hot blocks' inputs: 6, 8 or 12")] = 6,
    steps: Annotated[int, typer.Option(help="timed, of which the best counts")] = 2,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> list[Row]:
    """Measure the arms at one length."""
    where = torch.device(device)
    large = where.type == "cuda"
    tokens = tokens or (32768 if large else 512)
    sizes = {
        "sizes": LARGE if large else SMALL,
        "layers": layers or (4 if large else 2),
        "vocab": vocab or (128256 if large else 256),
    }
    rows = rows_of(arms.split(","), tokens, where, bits, steps, **sizes)
    said = document(where, {**sizes, "tokens": tokens, "bits": bits, "steps": steps}, rows)
    publish(tables.steps, said, "one sequence, LoRA", json_file)
    return rows


if __name__ == "__main__":
    typer.run(main)
