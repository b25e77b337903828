"""A region of ``torch.utils.checkpoint`` that is computed again from a rounded boundary.

Everything in it is then what the network makes of a point next to the one that the forward saw: no
value is beside one that was kept exactly, so no difference of the two is left where they cancel.
Gradients are as far off as the derivatives of the region's operators change over that distance, so
these must be gentle; and what jumps (a router's choice, a step) or is not known refuses.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Set

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from hot_compile.passes.base.graph import aten, is_ours, makes_bool, named_arguments, walk
from hot_compile.passes.base.operators import (
    BATCHED_PRODUCTS,
    CASTS,
    GENTLE,
    MATRIX_PRODUCTS,
    MOVES,
    REDUCTIONS,
    VIEWS,
)
from hot_compile.passes.storage.chain import is_bounded_power

_AGAIN = {CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE}
_ROOTS = (-1, -0.5, 0.5, 1, 2, 3)
"""Powers of what norms divide by and activations are made of."""
_OF_NORMS = {aten.sqrt.default, aten.rsqrt.default, aten.reciprocal.default}
_PRODUCTS = {
    *MATRIX_PRODUCTS,
    *BATCHED_PRODUCTS,
    aten.convolution.default,
    aten._softmax.default,
    aten.native_layer_norm.default,
    aten.native_group_norm.default,
}
_RESULTS = {"out", "logsumexp"}
"""Of an attention's forward, that its backward reads beside its operands."""


def is_checkpointed(node: fx.Node) -> bool:
    """``node`` of a backward is computed again because the user checkpoints it."""
    return node.meta.get("recompute") in _AGAIN


class Region:
    """What is computed again from one boundary.

    Args:
        root: the boundary, a placeholder of a backward.
        gradients: nodes that depend on a tangent.
        activations: names of placeholders that hold more than functions of parameters.
        cuts: recomputed values that are saved, too: not followed.
    """

    def __init__(
        self, root: fx.Node, gradients: Set[fx.Node], activations: Set[str], cuts: Set[fx.Node]
    ) -> None:
        outside = gradients | cuts
        self._nodes = walk([root], lambda n: n.users.keys() - outside)
        self._root, self._gradients, self._activations = root, gradients, activations

    def readers(self) -> Iterator[fx.Node]:
        """What reads it outside: gradients, or the backward's caller."""
        inside = (node for node in self._nodes if node.op != "output")
        users = (user for node in inside for user in node.users)
        yield from dict.fromkeys(u for u in users if u.op == "output" or u in self._gradients)

    def problem(self) -> str:
        """Why it does not tolerate that its boundary is rounded, '' if it does."""
        nodes = sorted(node for node in self._nodes - {self._root} if node.op == "call_function")
        return next(filter(None, map(self._jumps, nodes)), "") or next(
            filter(None, map(self._beside, self.readers())), ""
        )

    def _jumps(self, node: fx.Node) -> str:
        """Why ``node`` may turn a small error into a large one."""
        inside = [n for n in node.all_input_nodes if n in self._nodes]
        if makes_bool(node) and len(inside) > 1:
            return f"what a checkpoint computes again compares two of its values ({node.target})"
        if not _is_gentle(node, inside):
            return f"what a checkpoint computes again may jump ({node.target})"
        return ""

    def _beside(self, reader: fx.Node) -> str:
        """Why ``reader`` compares what is computed again with what was kept."""
        if reader.op == "output":
            return "returned by the backward"
        if "attention" in str(reader.target):
            results = (given for name, given in named_arguments(reader) if name in _RESULTS)
            if kept := self._kept(n for n in results if isinstance(n, fx.Node)):
                return f"attention's {kept[0].name} was kept, its operands are computed again"
        return ""

    def _kept(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        """Those of ``nodes`` that the forward kept, the boundary left out."""
        arriving = (n for n in nodes if n.op == "placeholder" and n is not self._root)
        return [node for node in arriving if node.name in self._activations]


def _is_gentle(node: fx.Node, inside: list[fx.Node]) -> bool:
    """A small change of ``node``'s operands ``inside`` changes it, and its slope, little."""
    target, value = node.target, node.meta.get("val")
    if isinstance(value, torch.Tensor) and not value.is_floating_point():
        return makes_bool(node) or is_ours(node) or target is operator.getitem
    if target in MOVES:
        return not node.args[1:] or not set(inside) & set(_indices(node))
    if target is aten.pow.Tensor_Scalar:
        return node.args[1] in _ROOTS
    if target is aten.exp.default and not is_checkpointed(node):
        return True  # a GELU's derivative has one, too
    collective = getattr(target, "namespace", "") == "_c10d_functional"
    other = target is operator.getitem or "attention" in str(target) or collective
    known = GENTLE | _OF_NORMS | _PRODUCTS | VIEWS | CASTS | REDUCTIONS
    return target in known or is_ours(node) or other or is_bounded_power(node)


def _indices(node: fx.Node) -> Iterator[fx.Node]:
    """What ``node``, a move, looks up its operand by."""
    for argument in node.args[1:]:
        several = isinstance(argument, (list, tuple))
        for given in argument if several else (argument,):  # type: ignore[union-attr]
            if isinstance(given, fx.Node):
                yield given
