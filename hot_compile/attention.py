"""Attention in a form that torch has fast kernels for: four dimensions, no idle masks, no copies.

Torch computes attention of other than (batch, heads, tokens, channels) as plain products: where
windows have a dimension of their own (Hiera, NesT, Twins), or frames, or where there are no heads.
With the leading sizes taken as one batch it computes the same.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .again import twin
from .attention_heads import Shared, Steps, moved, same_sizes, shared_heads
from .attention_masks import ATTENTION, argument, checkpointed, traced_with, without_masks

log = logging.getLogger("hot_compile")
_DIMENSIONS = 4
_FEWEST = 100
"""Keys: of fewer, a kernel won in one net and lost in another (ADR 51)."""


def for_fast_kernels(gm: fx.GraphModule) -> fx.GraphModule:
    """Dynamo's graph, or a copy of it whose attention torch has a kernel for; results are the same.

    Left of other than four dimensions: attention with a mask that is needed or with dropout, of
    fewer than 100 keys, of operands whose leading sizes differ, and with more than one leading size
    that is dynamic.
    """
    gm = without_masks(gm)
    inner = [module for module, _ in checkpointed(gm)]
    found = [node for module in (gm, *inner) for node in _attention(module)]
    if not any(_other(node) or shared_heads(node) for node in found):
        return gm
    log.info("hot: attention is written as torch has a kernel for it")
    own = twin(gm)
    for module in (own, *inner):
        for node in _attention(module):
            if _other(node):
                _in_four_dimensions(node)
            elif shared := shared_heads(node):
                _share(node, shared)
        module.recompile()
    return own


def _attention(gm: fx.GraphModule) -> list[fx.Node]:
    return gm.graph.find_nodes(op="call_function", target=ATTENTION)


def _other(attention: fx.Node) -> bool:
    """It is of another number of dimensions, and may be brought to four."""
    operands = [traced_with(operand) for operand in attention.args[:3]]
    if len(operands) < 3 or argument(attention, 3, "attn_mask") is not None:
        return False
    if argument(attention, 4, "dropout_p") or attention.kwargs.get("enable_gqa"):
        return False
    query = operands[0]
    if query is None or not 2 <= query.ndim != _DIMENSIONS:
        return False
    if sum(not isinstance(size, int) for size in query.shape[:-3]) > 1:
        return False
    key = operands[1]
    many = key is not None and statically_known_true(key.shape[-2] >= _FEWEST)
    return many and all(_leads_alike(operand, query) for operand in operands[1:])


def _leads_alike(operand: Tensor | None, query: Tensor) -> bool:
    return operand is not None and same_sizes(operand.shape[:-2], query.shape[:-2])


def _share(attention: fx.Node, shared: Sequence[Shared]) -> None:
    """Its heads read keys and values that are not repeated."""
    meta = attention.meta
    own = [_followed(x.source, x.steps, meta, attention) for x in shared]
    attention.args = (attention.args[0], *own, *attention.args[3:])
    attention.kwargs = {**attention.kwargs, "enable_gqa": True}


def _in_four_dimensions(attention: fx.Node) -> None:
    """Make its leading dimensions one, or add some of size 1; its users get the shape they had."""
    value = traced_with(attention.args[0])
    missing = _DIMENSIONS - value.ndim  # type: ignore[union-attr]
    into: Steps = (("unsqueeze", -3),) * missing
    back: Steps = (("squeeze", -3),) * missing
    if missing < 0:
        sizes = (n if isinstance(n, int) else -1 for n in value.shape[: 1 - missing])  # type: ignore
        into, back = (("flatten", 0, -missing),), (("unflatten", 0, tuple(sizes)),)
    users = list(attention.users)
    meta = attention.meta
    wide = [_followed(x, into, meta, attention) for x in attention.args[:3]]  # type: ignore
    attention.args = (*wide, *attention.args[3:])
    attention.meta = {**meta, "example_value": moved(meta["example_value"], into)}
    result = _followed(attention, back, meta, attention.next)
    for user in users:
        user.replace_input_with(attention, result)


def _followed(node: fx.Node, steps: Steps, meta: dict[str, Any], before: fx.Node) -> fx.Node:
    """What methods make of a node, one after the other, in front of ``before``; as of ``meta``."""
    for name, *args in steps:
        with node.graph.inserting_before(before):
            made = node.graph.call_method(name, (node, *args))
        value = moved(node.meta["example_value"], [(name, *args)])
        made.meta = {**meta, "example_value": value}
        node = made
    return node
