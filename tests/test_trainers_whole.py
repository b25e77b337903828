"""Other people's training loops for real: Trainer's features, Lightning, diffusers, torchao, timm.

Each trains a few steps twice, without a backend and with "hot", which lowers by Inductor; losses
agree. What is not installed is skipped: ``pip install 'hot-compile[trainers]'``.
"""

import functools
import os
import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from script_block import BLOCK
from torch import nn

from hot_compile.backend import hot
from hot_compile.record import Reports

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fresh_dynamo")]

ALWAYS = {"min_gain": 0, "lqs": "off"}
STEPS = 3


class Net(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(64, width), nn.Linear(width, width), nn.Linear(width, 64)

    def forward(self, x):
        return self.c(F.gelu(self.b(F.gelu(self.a(x)))))


def compiled(model, reports=None):
    """In place; every graph anew if ``reports`` are wanted."""
    backend = functools.partial(hot, options=ALWAYS, recorder=reports)
    model.compile(backend=backend)
    return model


def agree(train):
    """``train(prepare)`` returns losses; they are as without a backend, and layers rewritten."""
    want = train(lambda model: model)
    torch._dynamo.reset()
    torch.manual_seed(0)
    reports = Reports()
    got = train(functools.partial(compiled, reports=reports))
    assert len(got) == STEPS
    assert got == pytest.approx(want, rel=0.02)
    assert sum(len(graph.plan.rewritten) for graph in reports.graphs) >= 2


def llama():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=128, **heads, **sizes))


def trainer(model, folder, **arguments):
    """Hugging Face's Trainer of a few steps on random tokens."""
    transformers = pytest.importorskip("transformers")
    ids = torch.randint(0, 128, (4 * STEPS, 16), generator=torch.Generator().manual_seed(1))
    defaults = {"max_steps": STEPS, "save_strategy": "no"}
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        per_device_train_batch_size=4,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        seed=0,
        **{**defaults, **arguments},
    )
    data = [{"input_ids": row, "labels": row} for row in ids]
    return transformers.Trainer(model=model, args=arguments, train_dataset=data)


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize(
    "arguments",
    [{}, {"bf16": True}, {"gradient_checkpointing": True}],
    ids=["plain", "bf16", "ckpt"],
)
def test_trainer(tmp_path, arguments):
    def train(prepare):
        made = trainer(prepare(llama()), tmp_path, **arguments)
        made.train()
        return losses(made)

    agree(train)


def test_trainer_with_lora(tmp_path):
    peft = pytest.importorskip("peft")

    def train(prepare):
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"])
        model = peft.get_peft_model(llama(), config)
        made = trainer(prepare(model), tmp_path, learning_rate=1e-2)
        made.train()
        return losses(made)

    agree(train)


@pytest.mark.parametrize(("first", "then"), [("hot", None), (None, "hot")])
def test_trainer_goes_on_from_a_checkpoint_of_another_backend(tmp_path, first, then):
    def model(backend):
        return compiled(llama()) if backend else llama()

    whole = trainer(llama(), tmp_path / "whole")
    whole.train()
    saving = {"save_strategy": "steps", "save_steps": 1, "lr_scheduler_type": "linear"}
    begun = trainer(model(first), tmp_path / "parts", **saving)
    begun.add_callback(stop_after(2))
    begun.train()
    resumed = trainer(model(then), tmp_path / "parts", **saving)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == STEPS
    assert losses(resumed) == pytest.approx(losses(whole), rel=0.02)


def stop_after(step):
    transformers = pytest.importorskip("transformers")

    class Stop(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_training_stop = state.global_step >= step

    return Stop()


def lightning_module(prepare):
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.losses = prepare(Net()), []

        def training_step(self, batch, _):
            return F.mse_loss(self.net(batch[0]), batch[0])

        def on_train_batch_end(self, outputs, *_):
            self.losses.append(outputs["loss"].item())

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), 1e-2)

    return Module()


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_lightning(tmp_path, precision):
    lightning = pytest.importorskip("lightning")
    data = torch.utils.data.TensorDataset(torch.randn(64 * STEPS, 64))

    def train(prepare):
        torch.manual_seed(0)
        module = lightning_module(prepare)
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        made = lightning.Trainer(
            max_epochs=1, accelerator="cpu", precision=precision, default_root_dir=tmp_path, **quiet
        )
        made.fit(module, torch.utils.data.DataLoader(data, batch_size=64))
        made.save_checkpoint(tmp_path / "last.ckpt")
        module.load_state_dict(torch.load(tmp_path / "last.ckpt")["state_dict"])
        assert set(module.state_dict()) == {f"net.{name}" for name in Net().state_dict()}
        return module.losses

    agree(train)


LIGHTNING = (
    """
import sys
import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from script_block import BLOCK
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

strategy, backend = sys.argv[1:]
"""
    + BLOCK
    + """
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())

    def configure_model(self):
        for block in self.blocks:
            block.compile(backend=backend)
            if strategy == "fsdp2":
                fully_shard(block, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, _):
        self.last = F.mse_loss(self.blocks(batch[0]), torch.zeros_like(batch[0]))
        return self.last

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)

torch.manual_seed(0)
module, x = Module(), torch.randn(256, 64)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=32)
own = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
trainer = lightning.Trainer(
    accelerator="cpu", devices=2, strategy=own if strategy == "fsdp2" else "ddp", max_epochs=1,
    logger=False, enable_progress_bar=False, enable_checkpointing=False,
)
trainer.fit(module, data)
if trainer.global_rank == 0:
    print("loss", module.last.item())
"""
)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_lightning_in_two_processes(tmp_path, strategy):
    """Whoever asks for the default gets "hot" in every process that torchrun starts."""
    pytest.importorskip("lightning")
    script = tmp_path / "train.py"
    script.write_text(LIGHTNING)
    start = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    start += ["-m", "hot_compile", "run", "--set", "min_gain=0"]

    def final(backend):
        done = subprocess.run(
            [sys.executable, *start, str(script), strategy, backend],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")},
        )
        assert done.returncode == 0, done.stderr
        (loss,) = re.findall(r"loss (\S+)", done.stdout)
        return float(loss), done.stderr

    want, _ = final("eager")
    got, told = final("inductor")
    assert got == pytest.approx(want, rel=0.02)
    assert re.search(r"[1-9]\d* of \d+ products rewritten", told), told


def test_diffusers(tmp_path):
    """The loop of its ``train_unconditional.py``: accelerate, EMA, noise to be predicted."""
    diffusers = pytest.importorskip("diffusers")
    accelerate = pytest.importorskip("accelerate")
    from diffusers.training_utils import EMAModel

    def train(prepare):
        torch.manual_seed(0)
        channels = {"block_out_channels": (32,), "norm_num_groups": 8, "layers_per_block": 1}
        blocks = {"down_block_types": ("AttnDownBlock2D",), "up_block_types": ("AttnUpBlock2D",)}
        unet = prepare(diffusers.UNet2DModel(sample_size=16, **channels, **blocks))
        average = EMAModel(unet.parameters())
        noising = diffusers.DDPMScheduler(num_train_timesteps=100)
        helper = accelerate.Accelerator(cpu=True)
        optimizer = torch.optim.AdamW(unet.parameters(), 1e-3)
        unet, optimizer = helper.prepare(unet, optimizer)
        told = []
        for _ in range(STEPS):
            clean = torch.randn(4, 3, 16, 16)
            noise, times = torch.randn_like(clean), torch.randint(0, 100, (4,))
            with helper.accumulate(unet):
                found = unet(noising.add_noise(clean, noise, times), times).sample
                loss = F.mse_loss(found, noise)
                helper.backward(loss)
                helper.clip_grad_norm_(unet.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            average.step(unet.parameters())
            told.append(loss.item())
        helper.unwrap_model(unet).save_pretrained(tmp_path)
        diffusers.UNet2DModel.from_pretrained(tmp_path)
        return told

    agree(train)


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_torchaos_optimizers(name):
    optim = pytest.importorskip("torchao.optim")

    def train(prepare):
        torch.manual_seed(0)
        model, x = prepare(Net()), torch.randn(64, 64)
        optimizer, told = getattr(optim, name)(model.parameters(), 1e-2), []
        for _ in range(STEPS):
            loss = F.mse_loss(model(x), x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            told.append(loss.item())
        return told

    agree(train)


def test_timm():
    """The step of its ``train.py``, which is not in its package, from its own parts."""
    timm = pytest.importorskip("timm")
    from timm.data import Mixup
    from timm.loss import SoftTargetCrossEntropy
    from timm.optim import create_optimizer_v2
    from timm.scheduler import CosineLRScheduler
    from timm.utils import ModelEmaV3, NativeScaler

    def train(prepare):
        torch.manual_seed(0)
        mixup = Mixup(mixup_alpha=0.8, label_smoothing=0.1, num_classes=10)
        model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2, num_classes=10)
        average = ModelEmaV3(model, decay=0.9)
        model = prepare(model.train())
        optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, layer_decay=0.7)
        schedule, scaler = CosineLRScheduler(optimizer, STEPS), NativeScaler(device="cpu")
        told = []
        for step in range(STEPS):
            images, labels = mixup(torch.randn(8, 3, 64, 64), torch.randint(0, 10, (8,)))
            with torch.autocast("cpu", torch.bfloat16):
                loss = SoftTargetCrossEntropy()(model(images), labels)
            scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
            optimizer.zero_grad()
            average.update(model, step=step)
            schedule.step_update(step)
            told.append(loss.item())
        return told

    agree(train)
