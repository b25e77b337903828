"""How passes that give exact operators a faster form go over a graph."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from torch import fx

log = logging.getLogger("hot_compile")


def replace_each(
    graph: fx.Graph, found: Sequence[tuple[fx.Node, ...]], replace: Callable[..., bool]
) -> int:
    """Call ``replace(graph, *nodes)`` for each of ``found``; where it fails, warn and go on.

    Returns how many were replaced.
    """
    done = 0
    for nodes in found:
        try:
            done += replace(graph, *nodes)
        except Exception:  # what was built so far is right, or used by nobody
            log.warning("hot: %s stays as it is", nodes[0].name, exc_info=True)
    if found:
        graph.eliminate_dead_code()
        graph.lint()
    return done


def each(graph: fx.Graph, target: object) -> list[tuple[fx.Node]]:
    """The nodes that call ``target``."""
    return [(node,) for node in graph.nodes if node.target is target]
