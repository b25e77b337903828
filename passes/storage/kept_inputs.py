"""Inputs of a backward's products that had better be kept than made again.

Where layers' inputs are cheap functions of what is kept anyway, min-cut has the backward make them
again (docs/adr/0004). A product reads its operand from memory, so each is written once more: 2.5 %
of a Qwen3's step on an H100, 4.8 % of a SegFormer's. What does not fit into the time that a step
may take longer crosses as stock has it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator

import torch
from torch import fx

from hot_compile.passes.base.graph import made_of_tangents, strip
from hot_compile.passes.base.operators import CASTS, VIEWS
from hot_compile.passes.base.site import bytes_of
from hot_compile.passes.cost.linear import Rates
from hot_compile.passes.storage.allowed import dearest
from hot_compile.passes.storage.crossers import saved_pairs, seen_by_user
from hot_compile.passes.storage.cut import CutEditor
from hot_compile.passes.storage.prices import fuses


def keep_inputs(
    forward: fx.Graph,
    backward: fx.Graph,
    num_fwd_outputs: int,
    rates_of: Callable[[torch.device], Rates | None],
    most: float,
) -> tuple[int, float]:
    """Keep as many, the largest first, as leave at most ``most`` seconds of making others again.

    Both graphs change in place. Returns how many are kept, and the seconds that are left.
    """
    made = {node.name: node for node in forward.nodes if _may_be_kept(node)}
    shown = seen_by_user(forward, num_fwd_outputs)
    again = [n for n in made_again(backward) if n.name in made and made[n.name] not in shown]
    seconds = {node: _seconds(node, rates_of) for node in again}
    anchor = next(iter(saved_pairs(forward, backward, num_fwd_outputs)), None)
    if anchor is None:
        return 0, sum(seconds.values())
    kept, left = dearest(seconds, most)
    cut = CutEditor(forward, backward, num_fwd_outputs)
    for node in kept:
        cut.add(*anchor, made[node.name], node)
    return cut.finish(), left


def made_again(backward: fx.Graph) -> list[fx.Node]:
    """What the backward computes without gradients, and writes for a library or an operator."""
    gradients, found = made_of_tangents(backward), dict[fx.Node, None]()
    for node in backward.nodes:
        if _reads_memory(node):
            for operand in _operands(node):
                if operand not in gradients and not _of_an_input(operand):
                    found[operand] = None
    return list(found)


def _may_be_kept(node: fx.Node) -> bool:
    """Nobody asked for it to be made again, as ``torch.utils.checkpoint`` does."""
    return node.op == "call_function" and "recompute" not in node.meta


def _reads_memory(node: fx.Node) -> bool:
    plain = node.target in VIEWS or node.target in CASTS or node.target is operator.getitem
    return node.op == "call_function" and not plain and not fuses(node)


def _operands(node: fx.Node) -> Iterator[fx.Node]:
    """Tensors that ``node`` reads, and that a kernel of Inductor's makes."""
    for operand in node.all_input_nodes:
        whole = strip(operand, VIEWS)
        if fuses(whole) and whole.all_input_nodes and isinstance(whole.meta["val"], torch.Tensor):
            yield whole


def _of_an_input(node: fx.Node) -> bool:
    """A weight's cast: ``kept_casts`` is about these."""
    source = strip(node, VIEWS | CASTS)
    return source.op == "placeholder"


def _seconds(node: fx.Node, rates_of: Callable[[torch.device], Rates | None]) -> float:
    value = node.meta["val"]
    rates = rates_of(value.device)
    return bytes_of(value) / rates.copy if rates else 0.0
