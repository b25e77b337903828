"""Small questions about a joint graph that several stages ask."""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch import fx

from hot_compile.passes.base.operators import CASTS, TRANSPOSES, VIEWS

aten = torch.ops.aten

IMAGE_DIMS = 4
CHANNEL_DIM = 1
"""Of an image, a signal or a volume."""
_SAME_VALUES = VIEWS | CASTS | {aten.clone.default}


def rank_of(node: fx.Node) -> int:
    """Dimensions of what ``node`` computes; 0 if that is no tensor."""
    value = node.meta.get("val")
    return value.dim() if isinstance(value, torch.Tensor) else 0


def is_ours(node: fx.Node) -> bool:
    """``node`` calls one of the operators in namespace ``hot``."""
    return getattr(node.target, "namespace", "") == "hot"


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    """Inputs of the graph, in order."""
    return [node for node in graph.nodes if node.op == "placeholder"]


def readable(graph: fx.Graph | fx.GraphModule) -> str:
    """The graph's code with shapes and source lines, for people; the graph stays as it is.

    A new GraphModule would want every attribute that the graph reads (constants, subgraphs), and
    take the graph from its owner.
    """
    owner = graph if isinstance(graph, fx.GraphModule) else graph.owning_module
    if isinstance(owner, fx.GraphModule) and graph in (owner, owner.graph):
        return owner.print_readable(print_output=False)
    assert isinstance(graph, fx.Graph)
    return graph.python_code("self", verbose=True).src


def named_arguments(node: fx.Node) -> Iterator[tuple[str, Any]]:
    """Arguments of a call by the names that its operator has for them, where it has any."""
    schema = getattr(node.target, "_schema", None)
    names = [a.name for a in schema.arguments] if schema else []
    yield from zip(names, node.args, strict=False)
    yield from node.kwargs.items()


def is_tangent(node: fx.Node) -> bool:
    """A placeholder that holds the gradient of a user-visible output."""
    return node.op == "placeholder" and str(node.target).startswith("tangents")


def named_inputs(graph: fx.Graph, names: Sequence[str | None]) -> dict[fx.Node, str]:
    """Placeholder -> name of the parameter that it is, or is a part of.

    ``names`` has one for every input of Dynamo's graph. AOTAutograd moves and adds inputs and takes
    tensor subclasses apart (a DTensor into its shard and its mesh); its descriptors say which is
    which. Where it gave none, as in graphs made by hand, the place counts.
    """
    found = {}
    for place, node in enumerate(placeholders(graph)):
        described: Any = node.meta.get("desc")
        while hasattr(described, "base"):
            described = described.base
        index = place if described is None else getattr(described, "idx", len(names))
        name = names[index] if index < len(names) else None
        if name and not is_tangent(node):
            found[node] = name
    return found


def graphs_of(gm: fx.GraphModule) -> list[fx.Graph]:
    """Its graph, and those of regions in it."""
    return [part.graph for part in gm.modules() if isinstance(part, fx.GraphModule)]


def walk(seeds: Iterable[fx.Node], step: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    """``seeds``, and all nodes that one comes to from them by ``step``s."""
    found: set[fx.Node] = set()
    stack = list(seeds)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(step(node))
    return found


def closure(seeds: Iterable[fx.Node], within: Set[fx.Node] | None = None) -> set[fx.Node]:
    """The nodes that depend on any of ``seeds``, themselves included; by paths ``within``."""
    return walk(seeds, lambda node: node.users if within is None else node.users.keys() & within)


def made_of_tangents(graph: fx.Graph) -> set[fx.Node]:
    """The gradients that come in, and everything that depends on them: the backward."""
    return closure(node for node in graph.nodes if is_tangent(node))


def made_of(node: fx.Node) -> set[fx.Node]:
    """``node`` and everything that it is computed from."""
    return walk([node], lambda made: made.all_input_nodes)


def makes_bool(node: fx.Node) -> bool:
    """``node`` computes a mask."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype is torch.bool


def through_views(node: fx.Node) -> Iterator[fx.Node]:
    """Readers of ``node``, seen through views."""
    for user in node.users:
        if user.target in VIEWS:
            yield from through_views(user)
        else:
            yield user


def settle(graph: fx.Graph, places: Mapping[fx.Node, int]) -> None:
    """Order ``graph`` by ``places`` as far as operands come first.

    A node that has no place goes right behind its operands. Torch's own sort keeps no more of an
    order than that operands come first: behind what moved it put every weight's gradient last, far
    from what it shares with the gradients of inputs, and Inductor neither fused nor freed it.
    """
    end = graph.output_node()
    missing = {node: len(node.all_input_nodes) for node in graph.nodes if node is not end}
    keys: dict[fx.Node, int] = {}
    ready: list[tuple[int, int, fx.Node]] = []

    def offer(node: fx.Node) -> None:
        operands = (keys[given] for given in node.all_input_nodes)
        keys[node] = places[node] if node in places else max(operands, default=0)
        heapq.heappush(ready, (keys[node], len(keys), node))

    for node in [node for node, count in missing.items() if not count]:
        offer(node)
    while ready:
        *_, node = heapq.heappop(ready)
        end.prepend(node)
        for user in node.users:
            if user is not end:
                missing[user] -= 1
                if not missing[user]:
                    offer(user)


def value_of(node: Any) -> torch.Tensor:
    """The fake tensor of a node that makes one."""
    return node.meta["val"]


def is_zeros(node: Any) -> bool:
    """A tensor full of zeros, or the number as one."""
    if node.target is aten.scalar_tensor.default:
        return node.args[0] == 0
    return node.target is aten.full.default and node.args[1] == 0


def untranspose(node: fx.Node) -> tuple[fx.Node, bool]:
    """(base, transposed): ``node`` without 2-D transposes, and whether their number was odd."""
    transposed = False
    while node.target in TRANSPOSES and node.meta["val"].dim() == 2:
        if node.target is not aten.permute.default or node.args[1] == [1, 0]:
            transposed = not transposed
        node = node.args[0]  # type: ignore[assignment]
    return node, transposed


def returned(graph: fx.Graph) -> list[Any]:
    """What the graph returns, in order: nodes, numbers, None."""
    return list(graph.output_node().args[0])  # type: ignore[arg-type]


def strip(node: fx.Node, kinds: Set[Any]) -> fx.Node:
    """``node`` followed back through the first operand of nodes whose target is in ``kinds``.

    A list of operands, as a concatenation has, ends the way.
    """
    while node.target in kinds and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def as_made(node: fx.Node) -> fx.Node:
    """What made the values that ``node`` shows, or holds a copy of in another shape or dtype."""
    return strip(node, _SAME_VALUES)


def reaches(node: fx.Node, through: set[object], goal: Callable[[fx.Node], bool]) -> bool:
    """Some user of ``node``, followed only through ``through``, satisfies ``goal``."""
    stack = list(node.users)
    while stack:
        user = stack.pop()
        if goal(user):
            return True
        if user.target in through:
            stack.extend(user.users)
    return False


def module_path(node: fx.Node) -> str | None:
    """Dotted path of the module that called this product, e.g. ``blocks.0.attn.qkv``."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return None
    entry = list(stack.values())[-1]
    return clean_path(entry[0] if isinstance(entry, tuple) else str(entry)) or None


def clean_path(source: str) -> str:
    """Dynamo's source of a module or parameter as a plain dotted name.

    ``L['self']._modules['blocks']._modules['0'].qkv`` becomes ``blocks.0.qkv``.
    """
    # How Dynamo reads a module whose class overrides __getattr__ (peft's do).
    source = re.sub(r"\.__dict__\[['\"](_(?:modules|parameters|buffers))['\"]\]", r".\1", source)
    # ``__self__``: a Sequential that is compiled in place is read off its bound method
    path = re.sub(r"^[LG]\[['\"]\w+['\"]\](?:\.__self__)?\.?", "", source)
    path = re.sub(r"\.?_(?:modules|parameters|buffers)\[['\"]([^'\"]+)['\"]\]", r".\1", path)
    path = re.sub(r"\[['\"]?([^'\"\]]+)['\"]?\]", r".\1", path)
    return re.sub(r"\.+", ".", path).strip(".")
