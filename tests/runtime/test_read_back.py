"""A kernel that reads back what it wrote waits until that is written, by whichever thread."""

import re

import absent_gpu
import pytest
import torch
from forked import in_a_process
from torch import nn

TOKENS = 50
NARROW, WIDE = 192, 1536
"""Elements of rows that Inductor takes in a loop: torch 2.11 does, for so many operands; any."""
POINTER = re.compile(r"tl\.(store|load)\((\w*out_ptr\d+) ")


class Tokens(nn.Module):
    """Of images, as a ViT's first block has them: rows of the norms are joined as they are read."""

    def __init__(self, width):
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.first = nn.Parameter(torch.randn(1, 1, width))
        self.place = nn.Parameter(torch.randn(1, TOKENS, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x):
        x = torch.cat([self.first.expand(len(x), -1, -1), self.embed(x)], 1) + self.place
        for norm, layer in zip(self.norms, self.layers, strict=False):
            x = x + layer(norm(x))
        return self.norms[-1](x)


def model(width=WIDE):
    torch.manual_seed(0)
    x = torch.randn(324, TOKENS - 1, width)
    return Tokens(width), lambda forward: forward(x).float().relu().square().mean()


def read_back(source):
    """(pointers that are loaded behind a store, those of them for which nothing waits)."""
    written, new, back, bare = set(), set(), set(), set()
    for line in source.splitlines():
        if "tl.debug_barrier()" in line:
            new.clear()
        for kind, pointer in POINTER.findall(line):
            if kind == "store":
                written.add(pointer)
                new.add(pointer)
            else:
                back |= {pointer} & written
                bare |= {pointer} & new
    return back, bare


def kernels(folder):
    """What is read back by the kernels of a step, and what of it without waiting."""
    codes = absent_gpu.codes_of(model, {"memory": "all"}, folder)
    return [read_back(source) for code in codes for _, source in absent_gpu.KERNEL.findall(code)]


def test_a_barrier_stands_before_what_is_read_back(tmp_path):
    found = in_a_process(kernels, str(tmp_path))
    assert any(back for back, _ in found)  # a norm's values, of which codes are made
    assert not any(bare for _, bare in found), found


def test_what_is_read_without_waiting_is_seen():
    lines = ["tl.store(out_ptr2 + (x0), tmp1, xmask)", "tmp2 = tl.load(out_ptr2 + (x0), xmask)"]
    assert read_back("\n".join(lines)) == ({"out_ptr2"}, {"out_ptr2"})
    assert read_back("\n".join([lines[0], "tl.debug_barrier()", lines[1]])) == ({"out_ptr2"}, set())


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("width", [NARROW, WIDE])
def test_gradients_are_right_by_every_configuration(width, number, monkeypatch):
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    def chosen(tuner, *_, **__):
        found = sorted(tuner.launchers, key=lambda launcher: str(launcher.config))
        return {launcher: (i - number) % len(found) for i, launcher in enumerate(found)}

    monkeypatch.setattr(CachingAutotuner, "benchmark_all_configs", chosen)
    with torch.device("cuda"):
        module, loss = model(width)

    def gradients(forward):
        with torch.autocast("cuda", torch.bfloat16):
            loss(forward).backward()
        found = {name: p.grad.clone() for name, p in module.named_parameters()}
        module.zero_grad()
        return found

    exact = gradients(module)
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        compiled = torch.compile(module, backend="hot", options={"accept": "off", "memory": "all"})
        found = [gradients(compiled) for _ in range(3)]
    for name, want in exact.items():
        for got in found:
            assert (got[name] - want).norm() < 0.1 * want.norm(), name  # what storing rounds
