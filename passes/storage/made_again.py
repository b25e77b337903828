"""What min-cut is told of a joint graph: what to keep, and what the backward makes again.

It does not know that a ``cat`` may be computed twice: a DenseNet's layer keeps all that the layers
before it made once more, a U-Net what it skips, a transformer with one product behind attention and
MLP both of these. Nor does it have rows gathered twice if what they are taken from has another
reader far away, as where a router picks each token's experts: these rows are several times what
they are gathered from. And it makes again, of an input that the forward changes, what was made of
it as it came: a codebook that a step moves gives other codes by then (seen on torch 2.11 and 2.14).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx
from torch._functorch import partitioners
from torch.utils.checkpoint import CheckpointPolicy

from hot_compile.passes.base.graph import (
    aten,
    closure,
    made_of_tangents,
    placeholders,
    through_views,
    value_of,
)
from hot_compile.passes.base.site import bytes_of

_LEAST = 1.5
"""Gathered rows take as many times the bytes of what they are gathered from, indices with it."""
_OURS = "hot_asked"
"""What a node's meta holds where it is asked for here."""
_LOCK = threading.RLock()
"""One graph is cut at a time, so that each puts back what it found."""


@contextlib.contextmanager
def joined_again() -> Iterator[None]:
    """Min-cut may leave a ``cat`` for the backward to compute again (tried on torch 2.11, 2.14)."""
    with _LOCK:
        listed: Any = getattr(partitioners, "get_default_op_list", None)

        def with_joins() -> Any:
            kinds = listed()
            kinds.recomputable_ops.add(aten.cat)
            return kinds

        if listed is None:
            yield
            return
        partitioners.get_default_op_list = with_joins
        try:
            yield
        finally:
            partitioners.get_default_op_list = listed


def gathered_again(gm: fx.GraphModule, min_bytes: int) -> contextlib.AbstractContextManager[None]:
    """Inside, min-cut keeps no rows that are much larger than what they are gathered from."""
    gathers = gm.graph.find_nodes(op="call_function", target=aten.index.Tensor)
    repeating = [node.name for node in gathers if _repeats(node, min_bytes)]
    return _asked(gm, repeating, CheckpointPolicy.PREFER_RECOMPUTE)


def made_of_changed(graph: fx.Graph) -> list[str]:
    """Names of what a joint graph's backward needs, and its forward makes of inputs as they come,
    which it changes."""
    backward = made_of_tangents(graph)
    readers = (user for source in _changed(graph) for user in through_views(source))
    return [node.name for node in readers if not closure([node]).isdisjoint(backward)]


def _changed(graph: fx.Graph) -> list[fx.Node]:
    copies = graph.find_nodes(op="call_function", target=aten.copy_.default)
    into = {node.args[0] for node in copies}
    results = graph.output_node().meta.get("desc") or ()
    described = [each.mutated_input for each in results if hasattr(each, "mutated_input")]
    return [n for n in placeholders(graph) if n in into or n.meta.get("desc") in described]


def kept_nodes(gm: fx.GraphModule, names: Sequence[str]) -> contextlib.AbstractContextManager[None]:
    """Inside, min-cut recomputes none of the joint graph's nodes of these names."""
    return _asked(gm, names, CheckpointPolicy.MUST_SAVE)


def forget_asked(graph: fx.Graph) -> None:
    """Its nodes are asked for no more by what is here: halves of a graph inherit that."""
    for node in graph.nodes:
        if node.meta.pop(_OURS, False):
            node.meta.pop("recompute", None)


def _repeats(gather: fx.Node, min_bytes: int) -> bool:
    value = value_of(gather)
    made = bytes_of(value)
    sources = sum(bytes_of(value_of(node)) for node in gather.all_input_nodes)
    return value.is_floating_point() and made >= max(min_bytes, _LEAST * sources)


@contextlib.contextmanager
def _asked(gm: fx.GraphModule, names: Sequence[str], policy: CheckpointPolicy) -> Iterator[None]:
    """As ``torch.utils.checkpoint`` asks; what it asked for itself stays."""
    for node in gm.graph.nodes:
        if node.name in names and "recompute" not in node.meta:
            node.meta |= {"recompute": policy, _OURS: True}
    try:
        yield
    finally:
        forget_asked(gm.graph)  # perhaps another graph: min-cut replaces it by one of its own
