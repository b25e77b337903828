"""How passes that give exact operators a faster form go over a graph."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from torch import fx

log = logging.getLogger("hot_compile")


def replace_each(
    graph: fx.Graph, found: Sequence[fx.Node], replace: Callable[[fx.Graph, fx.Node], bool]
) -> int:
    """Call ``replace(graph, node)`` for each of ``found``; where it fails, warn and go on.

    Returns how many were replaced.
    """
    done = 0
    for node in found:
        try:
            done += replace(graph, node)
        except Exception:  # what was built so far is right, or used by nobody
            log.warning("hot: %s stays as it is", node.name, exc_info=True)
    if found:
        graph.eliminate_dead_code()
        graph.lint()
    return done
