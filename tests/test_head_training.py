"""Heads in chunks under what people train with: LoRA, DDP, FSDP2, accumulation, HF's Trainer."""

import contextlib
import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from forked import in_two_processes
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from hot_compile.backend import hot
from hot_compile.inspect import Reports, run_uncompiled

VOCABULARY, RANKS = 509, 2
OPTIONS = {"head_min_bytes": 0, "memory": "off", "min_gain": 1e9}
FORWARD = "gradients in the forward"


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.mlp = nn.Linear(width, width)

    def forward(self, x):
        return x + F.gelu(self.mlp(x))


class Tied(nn.Module):
    """A model with one weight for its embedding and its head, which returns its logits, too."""

    def __init__(self, width=32, blocks=1):
        super().__init__()
        torch.manual_seed(0)
        self.wte = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, input_ids, labels):
        logits = self.lm_head(self.blocks(self.wte(input_ids)))
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def hugging_face(name="GPT2LMHeadModel", **sizes):
    """A causal model of a few thousand weights, without dropout."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    owner = getattr(transformers, name)
    if name == "GPT2LMHeadModel":
        sizes = {"n_embd": 32, "n_head": 2, "n_layer": 1, "n_positions": 32} | sizes
        sizes |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    else:
        sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1} | sizes
        sizes |= {"num_key_value_heads": 2, "intermediate_size": 32}
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = owner.config_class(vocab_size=VOCABULARY, use_cache=False, **tokens, **sizes)
    return owner(config).train()


def ids(seed, tokens=12):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (2, tokens), generator=generator)


def backend(reports, **options):
    return functools.partial(
        hot, options=OPTIONS | options, recorder=reports, inner_compile=run_uncompiled
    )


def heads(reports):
    return [head for graph in reports.graphs for head in graph.plan.heads]


def agree(got, want, tolerance=2e-6):
    for one, other in zip(got, want, strict=True):
        assert float((one - other).norm()) <= tolerance * float(other.norm()) + 1e-12


# LoRA


def adapted(name, **lora):
    peft = pytest.importorskip("peft")
    model = hugging_face(name)
    config = peft.LoraConfig(r=4, task_type="CAUSAL_LM", init_lora_weights=False, **lora)
    torch.manual_seed(1)
    return peft.get_peft_model(model, config)


def stepped(model, compiled):
    model.zero_grad()
    loss = compiled(input_ids=ids(1), labels=ids(1))["loss"]
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


LORA = {
    "frozen head": {"target_modules": ["c_attn"]},
    "trained head": {"target_modules": ["c_attn"], "modules_to_save": ["lm_head"]},
    "head with factors": {"target_modules": ["c_attn", "lm_head"]},
}


@pytest.mark.parametrize(
    "name", [*LORA][:1] + [pytest.param(name, marks=pytest.mark.slow) for name in [*LORA][1:]]
)
def test_lora(name):
    model, reports = adapted("GPT2LMHeadModel", **LORA[name]), Reports()
    torch._dynamo.reset()
    got = stepped(model, torch.compile(model, backend=backend(reports)))
    agree(got, stepped(model, model))
    if name == "head with factors":
        assert all("LoRA on the head" in head.reason for head in heads(reports))
        assert len(heads(reports)) == 2
    else:
        (head,) = heads(reports)
        assert (head.way, head.returned) == (FORWARD, True)


# Two processes


def process(rank, store, names):
    """``as_exact`` of these settings in a gloo group of two."""
    torch.set_num_threads(1)
    group = torch.distributed
    group.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    for name in names:
        torch._dynamo.reset()
        as_exact(rank, *SETTINGS[name])
    group.destroy_process_group()


def replicated(model, **options):
    return DistributedDataParallel(model, **options)


def sharded(model, blocks, policy=None):
    options = {"mp_policy": policy} if policy else {}
    for block in blocks(model):
        fully_shard(block, **options)
    return fully_shard(model, **options)


def syncing(model, now):
    """Where gradients are reduced across processes only in the last of several backwards."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(now)
        return contextlib.nullcontext()
    return contextlib.nullcontext() if now else model.no_sync()


def trained(rank, model, compile_it, lengths):
    """Losses, last gradients and weights after two optimizer steps of ``len(lengths)`` batches."""
    step = compile_it(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, gradients = [], []
    for number in range(2):
        optimizer.zero_grad()
        for place, tokens in enumerate(lengths):
            with syncing(model, place == len(lengths) - 1):
                batch = ids(100 * rank + 10 * number + place, tokens)
                loss = step(input_ids=batch, labels=batch)["loss"] / len(lengths)
                loss.backward()
            losses.append(loss.detach())
        gradients = [whole(p.grad) for p in model.parameters()]
        optimizer.step()
    return [*losses, *gradients, *(whole(p.detach()) for p in model.parameters())]


def whole(tensor):
    """A copy of all of a tensor that may be sharded."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def as_exact(rank, make, wrap, lengths=(12, 12), tolerance=2e-6):
    """The same training by the backend and by eager, in one process of two."""
    reports, model = Reports(), make()
    want = trained(rank, wrap(copy.deepcopy(model)), lambda model: model, lengths)
    compile_it = functools.partial(torch.compile, backend=backend(reports))
    agree(trained(rank, wrap(model), compile_it, lengths), want, tolerance)
    assert heads(reports)
    assert all((head.way, head.returned) == (FORWARD, True) for head in heads(reports))


def gpt2_blocks(model):
    return model.transformer.h


def checkpointed():
    model = hugging_face()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
SHARDED = functools.partial(sharded, blocks=gpt2_blocks)


SETTINGS = {
    "tied, ddp": (Tied, replicated),
    "tied, fsdp2": (Tied, functools.partial(sharded, blocks=lambda model: model.blocks)),
    "ddp": (hugging_face, replicated),
    "ddp, lengths that change": (hugging_face, replicated, (12, 9, 10)),
    "ddp, static graph": (
        hugging_face,
        functools.partial(replicated, static_graph=True),
        (12,),
    ),
    "ddp, in buckets": (
        functools.partial(hugging_face, n_embd=160, n_layer=2),
        functools.partial(replicated, bucket_cap_mb=1),
    ),
    "ddp, checkpointing": (checkpointed, replicated),
    "fsdp2": (hugging_face, SHARDED),
    "fsdp2, lengths that change": (hugging_face, SHARDED, (12, 9, 10)),
    "fsdp2, bf16": (hugging_face, functools.partial(SHARDED, policy=BF16), (12, 12), 2e-2),
    "fsdp2, checkpointing": (checkpointed, SHARDED),
}


def test_two_processes_with_a_tied_head_and_accumulation(tmp_path):
    in_two_processes(process, tmp_path / "store", ("tied, ddp", "tied, fsdp2"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_processes_with_gpt2(tmp_path, kind):
    pytest.importorskip("transformers")
    names = [name for name in SETTINGS if name.startswith(kind)]
    in_two_processes(process, tmp_path / "store", names)


# Hugging Face's Trainer


def by_trainer(model, folder, compiled):
    """(losses, weights) after three steps of two batches each, padded to the longest."""
    transformers = pytest.importorskip("transformers")
    lengths = [12, 9, 7, 12, 10, 12, 8, 5, 11, 6, 9, 12]
    rows = [ids(n, tokens)[0] for n, tokens in enumerate(lengths)]

    def padded(examples):
        given, labels = (
            nn.utils.rnn.pad_sequence(examples, batch_first=True, padding_value=value)
            for value in (0, -100)
        )
        return {"input_ids": given, "labels": labels, "attention_mask": (labels >= 0).long()}

    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        max_steps=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        optim="sgd",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=0,
        remove_unused_columns=False,
        **({"torch_compile_backend": "hot"} if compiled else {}),
    )
    trainer = transformers.Trainer(
        model=model, args=arguments, train_dataset=rows, data_collator=padded
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, [p.detach().clone() for p in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM"])
def test_trainer_with_accumulation_and_padding(monkeypatch, tmp_path, name):
    """The loss is a sum over ``num_items_in_batch``, a tensor; each batch is as long as it is."""
    pytest.importorskip("accelerate")
    from torch._dynamo.backends import registry

    import hot_compile.integrations.accelerate  # noqa: F401

    reports, model = Reports(), hugging_face(name)
    registry.lookup_backend("hot")
    monkeypatch.setitem(registry._COMPILER_FNS, "hot", backend(reports))
    torch._dynamo.reset()
    want = by_trainer(copy.deepcopy(model), tmp_path, compiled=False)
    got = by_trainer(model, tmp_path, compiled=True)
    torch._dynamo.reset()
    assert got[0] == pytest.approx(want[0], rel=1e-4)
    agree(got[1], want[1], 1e-5)
    assert heads(reports)
    assert all(head.way == FORWARD for head in heads(reports)), heads(reports)
