"""Training one cell of the fidelity suite, step by step, so that several can take turns."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from common import Task, learning_rate
from torch import Tensor

from hot_compile.memory import held_bytes, peak_bytes

log = logging.getLogger(__name__)
EAGER_STEPS = 3
"""Steps before the rest is captured: the first compiles, the next fill the allocator's caches."""


class Training:
    """One model under way from one seed.

    On CUDA, after ``eager`` steps, a whole step (forward, backward, optimizer) is captured once and
    replayed for the rest: the same kernels without Python's time between them. Each training has a
    stream of its own and never waits for the device.
    """

    def __init__(self, task: Task, backend: Callable[..., Any], seed: int, eager: int) -> None:
        self.task = task
        self.losses: list[Tensor] = []
        self.held = self.peak = 0
        """Bytes between forward and backward; at most in a step by itself (CUDA)."""
        self._eager = eager
        self._cuda = task.device.type == "cuda"
        self._stream = torch.cuda.Stream() if self._cuda else None
        self._replay: Callable[[], None] | None = None
        self._batches = task.batches(torch.Generator().manual_seed(seed))
        self._batch: tuple[Tensor, ...] = ()
        self._loss = torch.zeros(())
        with self._here():
            torch.manual_seed(seed)
            self.model = task.build().to(task.device).train()
            torch.manual_seed(seed)
            self._forward = torch.compile(self.model, backend=backend)
            self._rate = torch.tensor(task.learning_rate, device=task.device)
            self._optimizer = torch.optim.AdamW(
                self.model.parameters(), lr=self._rate, weight_decay=task.weight_decay,
                fused=self._cuda, capturable=self._cuda,
            )  # fmt: skip

    def step(self) -> None:
        """One training step, or the start of one on the device."""
        number = len(self.losses)
        with self._here():
            self._load(next(self._batches))
            self._rate.fill_(self.task.learning_rate * learning_rate(number, self.task.steps))
            if self._cuda and number == self._eager:
                self._replay = self._captured()
            if self._cuda and number == self._eager - 1:
                self.peak = peak_bytes(self._train, self.task.device)
            else:
                (self._replay or self._train)()
            self.losses.append(self._loss.clone())

    def finish(self) -> tuple[list[float], float]:
        """(losses, held-out metric)."""
        with self._here(), self._cast():
            return torch.stack(self.losses).tolist(), self.task.evaluate(self.model.eval())

    def _cast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.task.device.type, torch.bfloat16, enabled=self.task.bf16)

    def _here(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream) if self._cuda else contextlib.nullcontext()

    def _load(self, batch: tuple[Tensor, ...]) -> None:
        """Put a batch where the captured step reads it."""
        if not self._batch:
            self._batch = tuple(torch.empty_like(t, device=self.task.device) for t in batch)
        for place, t in zip(self._batch, batch, strict=True):
            place.copy_(t.pin_memory() if self._cuda and not t.is_cuda else t, non_blocking=True)

    def _train(self) -> None:
        with self._cast():
            loss = self.task.loss(self._forward, *self._batch)
        if not self.losses:
            self.held = held_bytes(loss, self.model, self._batch)
        loss.backward()
        self._optimizer.step()
        self._loss = loss.detach()
        if self._replay is None:
            self._optimizer.zero_grad()

    def _captured(self) -> Callable[[], None] | None:
        """A replay of ``_train``; None, so that steps stay eager, where it cannot be captured."""
        graph = torch.cuda.CUDAGraph()
        self._replay = graph.replay  # gradients stay where the graph writes them
        try:
            with torch.cuda.graph(graph, stream=self._stream):
                self._train()
        except RuntimeError:
            log.warning("not captured; goes on step by step", exc_info=True)
            self._optimizer.zero_grad()
            return None
        return graph.replay
