"""Hugging Face's Trainer and accelerate: by name after one import, or under hot-compile run."""

import copy
import functools
import pickle
import subprocess
import sys

import pytest
import torch
from torch._dynamo.backends import registry

from hot_compile import launch
from hot_compile.backend import hot
from hot_compile.record import Reports, run_uncompiled

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

ALWAYS = {"min_gain": 0, "lqs": "off"}
STEPS = 2


@pytest.fixture
def reports(monkeypatch):
    """What becomes of the graphs that backend "hot" is asked for by name; nothing is lowered."""
    reports = Reports()
    unlowered = functools.partial(
        hot, options=ALWAYS, recorder=reports, inner_compile=run_uncompiled
    )
    registry.lookup_backend("hot")
    monkeypatch.setitem(registry._COMPILER_FNS, "hot", unlowered)
    torch._dynamo.reset()
    # a trainer of another test may have left its state, which goes before a new one's backend
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield reports
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    torch._dynamo.reset()


@pytest.fixture
def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 96}
    config = transformers.LlamaConfig(
        vocab_size=128, num_attention_heads=2, num_key_value_heads=2, **sizes
    )
    return transformers.LlamaForCausalLM(config)


def trained(model, folder, **arguments):
    """(losses, the model) after a few steps of Hugging Face's Trainer."""
    ids = torch.randint(0, 128, (4 * STEPS, 16), generator=torch.Generator().manual_seed(1))
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=4,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=0,
        **arguments,
    )
    data = [{"input_ids": row, "labels": row} for row in ids]
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def rewritten(reports):
    return sum(len(graph.plan.rewritten) for graph in reports.graphs)


def test_without_the_import_accelerate_refuses():
    code = "from accelerate.utils import TorchDynamoPlugin; TorchDynamoPlugin(backend='hot')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "'HOT' is not a valid DynamoBackend" in done.stderr  # else the docs have a step too many


def test_a_member_like_the_others():
    from accelerate.utils import DynamoBackend, TorchDynamoPlugin

    before = list(DynamoBackend)
    import hot_compile.integrations.accelerate as integration

    integration.register()
    after = list(DynamoBackend)
    member = DynamoBackend("HOT")
    assert after == [*(b for b in before if b is not member), member]
    assert member is DynamoBackend.HOT is DynamoBackend["HOT"]
    assert "HOT" in DynamoBackend
    assert "no" not in DynamoBackend
    assert (str(member), member.name, member.value, member) == ("HOT", "HOT", "HOT", "HOT")
    assert copy.deepcopy(member) is member is pickle.loads(pickle.dumps(member))
    assert "HOT" in DynamoBackend.list()
    plugin = TorchDynamoPlugin(backend="hot", options={"recipe": "fast"})
    assert plugin.to_kwargs() == {"backend": "hot", "options": {"recipe": "fast"}}
    with pytest.raises(ValueError, match="COLD"):
        TorchDynamoPlugin(backend="cold")


def test_trainer_by_name(reports, model, tmp_path):
    import hot_compile.integrations.accelerate  # noqa: F401

    exact = trained(copy.deepcopy(model), tmp_path)
    assert not reports.graphs
    ours = trained(model, tmp_path, torch_compile_backend="hot")
    assert ours == pytest.approx(exact, rel=0.01)
    assert rewritten(reports) >= 6


def test_accelerate_by_name(reports, model):
    import hot_compile.integrations.accelerate  # noqa: F401

    plugin = accelerate.utils.TorchDynamoPlugin(backend="hot")
    accelerator = accelerate.Accelerator(cpu=True, dynamo_plugin=plugin)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    ids = torch.randint(0, 128, (4, 16))
    accelerator.backward(prepared(input_ids=ids, labels=ids).loss)
    optimizer.step()
    assert rewritten(reports) >= 6
    assert accelerator.unwrap_model(prepared, keep_torch_compile=False) is model


def test_trainer_under_run(monkeypatch, model, tmp_path):
    """``TrainingArguments(torch_compile=True)`` and no import at all."""
    monkeypatch.setattr(launch, "hot", functools.partial(hot, inner_compile=run_uncompiled))
    torch._dynamo.reset()
    exact = trained(copy.deepcopy(model), tmp_path)
    with launch.hot_by_default(ALWAYS) as summary:
        ours = trained(model, tmp_path, torch_compile=True)
    torch._dynamo.reset()
    assert ours == pytest.approx(exact, rel=0.01)
    assert "products rewritten" in str(summary)
    assert "0 of" not in str(summary)


@pytest.mark.slow
def test_trainer_for_real(model, tmp_path):
    import hot_compile.integrations.accelerate  # noqa: F401

    exact = trained(copy.deepcopy(model), tmp_path)
    ours = trained(model, tmp_path, torch_compile_backend="hot")
    assert ours == pytest.approx(exact, rel=0.01)


def byte_tokenizer():
    """A token a byte; nothing is downloaded."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters = ["<pad>", "<eos>", *sorted(bytewise.alphabet())]
    tokenizer = Tokenizer(models.BPE({letter: n for n, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = bytewise, decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    )


TRL = {
    "SFT": {"text": "the quick brown fox jumps over the lazy dog"},
    "DPO": {"prompt": "what is it? ", "chosen": "a fox that jumps", "rejected": "a dog, lazy"},
    "GRPO": {"prompt": "what is it? "},
}
"""A row of what each of TRL's trainers wants."""
VOCABULARY = 260
SAMPLING = {"num_generations": 4, "max_completion_length": 8}


def letters(completions, **_):
    """A reward."""
    return [float(sum(map(str.isalpha, text))) for text in completions]


def trl_trained(kind, row, folder, **arguments):
    """What is logged, by name, of a few steps of one of TRL's trainers; a tiny Llama of bytes."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    ours = {"reward_funcs": letters} if kind == "GRPO" else {}
    config = getattr(trl, f"{kind}Config")(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        max_steps=STEPS,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **(SAMPLING if kind == "GRPO" else {}),
        **arguments,
    )
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 96}
    sizes["vocab_size"] = VOCABULARY
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    special = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    config_of_model = transformers.LlamaConfig(**sizes, **heads, **special)
    transformers.LlamaForCausalLM(config_of_model).save_pretrained(folder / "tiny")
    trainer = getattr(trl, f"{kind}Trainer")(
        model=str(folder / "tiny"),  # DPO loads it again, as its reference
        args=config,
        train_dataset=datasets.Dataset.from_list([row] * 16),
        processing_class=byte_tokenizer(),
        **ours,
    )
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return {name: [entry[name] for entry in logged] for name in ("loss", "grad_norm")}


@pytest.mark.parametrize("kind", TRL)
def test_trl_by_name(reports, tmp_path, kind):
    """As it comes, with gradient checkpointing; GRPO samples from the compiled model."""
    import hot_compile.integrations.accelerate  # noqa: F401

    exact = trl_trained(kind, TRL[kind], tmp_path)
    assert not reports.graphs
    ours = trl_trained(kind, TRL[kind], tmp_path, torch_compile_backend="hot")
    assert ours["loss"] == pytest.approx(exact["loss"], rel=0.02, abs=1e-6)
    assert ours["grad_norm"] == pytest.approx(exact["grad_norm"], rel=0.05)
    assert rewritten(reports) >= 6
    widths = {decision.shape[1] for graph in reports.graphs for decision in graph.plan}
    assert str(VOCABULARY) not in widths, "its head is an operator of its own, in no graph"
