"""Two processes (gloo): what fails in one, both leave out, and nobody hangs."""

import contextlib
import datetime
import functools
import itertools
import logging
import random
import re
from pathlib import Path

import pytest
import torch
from forked import in_two_processes
from test_guarantee import OPTIONS, PIPES, PLACES, failing, plant, rewritten
from test_two_processes import distributed, parallel, whole
from torch import nn

from hot_compile import reproduction
from hot_compile.again import called_by
from hot_compile.backend import hot
from hot_compile.passes import pipeline
from hot_compile.record import run_uncompiled
from hot_compile.testing import cosine

STEPS = [(pipe, step.name) for pipe in PIPES for step in getattr(pipeline, pipe)]
COMPILING = [*STEPS, *PLACES[:2]]
STAGES = [*STEPS, *PLACES]


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(64, width), nn.Linear(width, 64)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


class Told(logging.Handler):
    """The ways in which graphs were said to go on, and in which step."""

    def __init__(self):
        super().__init__()
        self.ways, self.step = [], 0

    def emit(self, record):
        if found := re.search(r"the graph goes on (.*?)\.", record.getMessage()):
            self.ways.append((self.step, found[1]))


@contextlib.contextmanager
def planted(stage, here):
    """An ``inner_compile``; in this process something fails, if it is ``here``."""
    with pytest.MonkeyPatch.context() as patch:
        if here and isinstance(stage, tuple):
            plant(patch, *stage)
        yield failing(stage, rewritten) if here and stage in PLACES else run_uncompiled


def trained(wrap, rank, stage, culprit, seed):
    """What this process was told; gradients are as if nothing had failed."""
    torch._dynamo.reset()
    torch.manual_seed(seed)
    width = random.Random(seed).choice((96, 128, 160))
    model, x = nn.Sequential(Block(width), Block(width)), torch.randn(2, 64, 64)
    exact, mine = (
        [p.detach().clone() for p in model.parameters()],
        x[0 if wrap is parallel else rank],
    )
    told, log = Told(), logging.getLogger("hot_compile")
    log.addHandler(told)
    with planted(stage, rank == culprit) as inner:
        options = {**OPTIONS, "forward": "exact", "keep_head": False}
        backend = functools.partial(hot, options=options, inner_compile=inner)
        step = wrap(model, backend)
        for told.step in range(3):
            model.zero_grad()
            step(mine).square().mean().backward()
            same = [whole(p.grad) for p in model.parameters()]
            for gradient, want in zip(
                same, exact_gradients(exact, x if wrap is not parallel else x[:1]), strict=True
            ):
                assert cosine(gradient, want) > 0.98
                other = gradient.clone()
                torch.distributed.broadcast(other, 0)
                assert torch.equal(gradient, other)
    log.removeHandler(told)
    return told.ways


def exact_gradients(parameters, batch):
    """Of the same model, uncompiled."""
    model = nn.Sequential(Block(len(parameters[1])), Block(len(parameters[1])))
    for parameter, value in zip(model.parameters(), parameters, strict=True):
        parameter.data.copy_(value)
    model(batch.flatten(0, 1)).square().mean().backward()
    return [p.grad for p in model.parameters()]


def agree(rank, folder, cases):
    torch.set_num_threads(1)
    reproduction.cache_dir = lambda: Path(folder)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2,
        timeout=datetime.timedelta(seconds=100),
    )  # fmt: skip
    for case in cases:
        both = [None, None]
        torch.distributed.all_gather_object(both, trained(case[0], rank, *case[1:]))
        one, other = both
        assert one, case
        # who fails twice in a row says where that ends, who follows perhaps what lay between, too
        assert one[-1][1] == other[-1][1], (case, both)
        assert max(step for step, _ in one + other) <= 1, (case, both)
    torch.distributed.destroy_process_group()


SHORT = [
    (distributed, "running a forward", 1, 0),
    (distributed, "compiling a backward", 0, 0),
    (parallel, "compiling a backward", 1, 0),
]


def test_what_fails_in_one_process_both_leave_out(tmp_path):
    in_two_processes(agree, tmp_path, SHORT)


def test_processes_know_a_graph_by_names_that_are_the_same_in_each():
    def made():
        def inner(x):
            return x

        return inner

    graph = torch.fx.Graph()
    one, other = (graph.call_function(made(), (graph.placeholder("x"),)) for _ in range(2))
    assert str(one.target) != str(other.target)
    assert called_by(one) == called_by(other)
    assert "made.<locals>.inner" in called_by(one)


@pytest.mark.slow
def test_a_hundred_failures_without_a_deadlock(tmp_path):
    """Graphs with collectives inside are guarded while they compile only."""
    either = itertools.product((distributed,), STAGES, (0, 1), (0, 1))
    inside = itertools.product((parallel,), COMPILING, (0, 1), (0,))
    cases = [*either, *inside]
    assert len(cases) >= 100
    in_two_processes(agree, tmp_path, cases)
