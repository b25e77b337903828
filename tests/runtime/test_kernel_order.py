"""Kernels stand where their last part does, where Inductor estimates that to take least memory."""

import os
import random
from types import SimpleNamespace

import absent_gpu
import pytest
import torch
from forked import in_a_process
from torch import nn
from torch.nn import functional as F

from hot_compile.runtime.kernel_order import by_last_part

WIDTH, TOKENS = 512, 1024


class Node(SimpleNamespace):
    """What a scheduler's node is asked for."""

    __hash__ = object.__hash__

    def get_buffer_names(self):
        return [self.name]


def node(name, place, *reads):
    found = [SimpleNamespace(name=n) for n in reads]
    return Node(name=name, max_order=place, unmet_dependencies=found)


def test_what_is_fused_of_early_and_late_waits_for_its_last_part():
    total = node("total", 7, "g1", "g3")  # fused of places 2 and 7, and so put at 2 by Inductor
    nodes = [node("g1", 1), node("g3", 5, "g2"), total]
    nodes += [node("w1", 3, "g1"), node("g2", 4, "g1"), node("w2", 6, "g2")]
    assert [n.name for n in by_last_part(nodes)] == ["g1", "w1", "g2", "g3", "w2", "total"]


def test_every_node_comes_once_and_behind_what_it_reads():
    chance = random.Random(0)
    nodes = []
    for i in range(60):
        reads = {f"n{j}" for j in chance.sample(range(i), min(i, 3))} | {"an input"}
        nodes.append(node(f"n{i}", chance.randrange(100), *reads))
    order = by_last_part(chance.sample(nodes, len(nodes)))
    place = {n.name: i for i, n in enumerate(order)}
    assert sorted(place.values()) == list(range(60))
    for n in nodes:
        assert all(place[d.name] < place[n.name] for d in n.unmet_dependencies if d.name in place)


class Modulated(nn.Module):
    """A block that is told of a sample's time, as a transformer's of diffusion."""

    def __init__(self):
        super().__init__()
        self.told = nn.Linear(WIDTH, 3 * WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, time):
        shift, scale, gate = self.told(F.silu(time)).unsqueeze(1).chunk(3, -1)
        y = F.layer_norm(x, (WIDTH,)) * (1 + scale) + shift
        return x + gate * self.narrow(F.gelu(self.wide(y)))


class Diffusion(nn.Module):
    """A few of them."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Modulated() for _ in range(12)])

    def forward(self, x, time):
        time = self.embed(time)
        for block in self.blocks:
            x = block(x, time)
        return x


def model():
    torch.manual_seed(0)
    given = torch.randn(8, TOKENS, WIDTH), torch.randn(8, WIDTH)
    return Diffusion(), lambda forward: forward(*given).square().mean()


def peaks(folder):
    """Bytes of the highest place as Inductor estimates it, of each of its graphs' orders."""
    from torch._inductor import memory

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    absent_gpu.pretend(kernels=False)
    found = []
    memory.signpost_event = lambda category, name, parameters: found.append(parameters["orm"])
    graphs = absent_gpu.lowered(model, {"memory": "all"})
    assert graphs == [("forward", ""), ("backward", "")], graphs
    return found


@pytest.mark.slow
def test_a_gradient_that_all_blocks_add_to_does_not_hurry_the_backward(tmp_path):
    forward, backward = in_a_process(peaks, str(tmp_path))
    ours = backward.pop("by_last_part")
    assert ours < 0.95 * min(backward.values())
    assert "by_last_part" in forward
