"""One host call a layer: its ``hot::`` nodes, in the finished graph, become one node.

Strategies are written, traced and priced operator by operator. Called one by one from Python, these
cost the host more than a small layer's kernels run. So at the very end those of one layer that feed
each other are gathered into one ``hot::layer_calls``, whose last argument lists them
(docs/adr/0020-one-call-a-layer.md). What is not ours stays outside, for Inductor to fuse.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import networkx
import torch
import torch._inductor.config
from torch import fx

from hot_compile.passes.base.emit import describe
from hot_compile.passes.base.graph import closure, walk
from hot_compile.passes.base.operators import CASTS, MOVES, REDUCTIONS, VIEWS, is_pointwise
from hot_compile.runtime.ops import SCHEMAS
from hot_compile.runtime.planes import RESTORING
from hot_compile.runtime.reference.calls import argument_words

_IN_KERNELS = VIEWS | CASTS | MOVES | REDUCTIONS | RESTORING
_OPERATORS = {getattr(torch.ops.hot, name).default for name in SCHEMAS if name != "layer_calls"}


def gather(graph: fx.Graph) -> int:
    """Gather the calls of every layer in ``graph``, in place; how many layers' there were.

    Nodes become one only where nothing outside them depends on one and feeds another, and where
    that keeps no two kernels apart that Inductor may make one.
    """
    gathered = 0
    waiting = _layers(graph)
    while waiting:
        calls = waiting.pop()
        span = list(_between(min(calls), max(calls)))
        taken = _convex(span, set(calls))
        late = _late(taken)
        if late:
            waiting += [late, [call for call in taken if call not in late]]
        elif len(taken) > 1 and _callable(taken):
            _hoist(span, taken)
            _replace(graph, taken)
            gathered += 1
    graph.lint()
    return gathered


def _layers(graph: fx.Graph) -> list[list[fx.Node]]:
    """Calls of ours by layer, those together that feed each other.

    A layer is told by autograd's number of its forward.
    """
    layers: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target in _OPERATORS and "seq_nr" in node.meta and _sizes_are_whole(node):
            layers.setdefault(node.meta["seq_nr"], []).append(node)
    return [part for calls in layers.values() for part in _connected(calls)]


def _sizes_are_whole(call: fx.Node) -> bool:
    """A list of calls has a form for what ``call`` is given: tensors, and whole numbers."""
    given = (node.meta["val"] for node in call.all_input_nodes)
    return all(isinstance(value, (torch.Tensor, torch.SymInt, int)) for value in given)


def _connected(calls: Sequence[fx.Node]) -> Iterator[list[fx.Node]]:
    feeds = networkx.Graph()
    feeds.add_nodes_from(calls)
    for call in calls:
        for value in _values(call):
            feeds.add_edges_from((call, user) for user in value.users if user in feeds)
    return map(list, networkx.connected_components(feeds))


def _values(call: fx.Node) -> list[fx.Node]:
    """The nodes that hold what ``call`` makes: itself, or its parts."""
    several = isinstance(call.meta["val"], (tuple, list))
    return list(call.users) if several else [call]


def _between(first: fx.Node, last: fx.Node) -> Iterator[fx.Node]:
    """Nodes from ``first`` to ``last``, both included."""
    node = first
    while node is not last:
        yield node
        node = node.next
    yield last


def _convex(span: Sequence[fx.Node], calls: set[fx.Node]) -> list[fx.Node]:
    """Of ``calls`` in order: those that no path leaves and comes back to."""
    taken: dict[fx.Node, None] = {}
    inside: set[fx.Node] = set()
    behind: set[fx.Node] = set()  # outside, and dependent on what is taken
    for node in span:
        given = node.all_input_nodes
        if node in calls and behind.isdisjoint(given):
            taken[node] = None
            inside.update((node, *_values(node)))
        elif node not in inside and not (inside.isdisjoint(given) and behind.isdisjoint(given)):
            behind.add(node)
    return list(taken)


def _late(taken: Sequence[fx.Node]) -> list[fx.Node]:
    """Of ``taken``, those to be called after the others' results went into a kernel; often none.

    What x is restored from is often read with g_x as well: GELU's input, for x and for GELU's
    slope. One kernel reads it once and makes both, if g_x is there before x is asked for.
    """
    inside = {node for call in taken for node in (call, *_values(call))}
    operands = dict.fromkeys(n for call in taken for n in call.all_input_nodes if n not in inside)
    for operand in operands:
        made_of = _kernel_sources(operand)
        if not made_of:
            continue
        behind = closure([operand], within=inside)
        results = inside - behind
        late = [call for call in taken if call in behind]
        if len(late) < len(taken) and not made_of.isdisjoint(_read_with(results, inside)):
            return late
    return []


def _kernel_sources(operand: fx.Node) -> set[fx.Node]:
    """What the kernel that makes ``operand`` reads or makes; nothing if no such kernel makes it.

    Vectors aside: to read one again costs nothing.
    """
    found = _through_kernels([operand], lambda node: node.all_input_nodes)
    if all(node.target in VIEWS for node in found if _in_kernels(node)):
        return set()
    return {node for node in found if len(getattr(node.meta["val"], "shape", ())) > 1}


def _read_with(results: Iterable[fx.Node], inside: Set[fx.Node]) -> set[fx.Node]:
    """What kernels read or make that read ``results``, or what is made of them in kernels."""
    users = [user for node in results for user in node.users if user not in inside]
    after = {node for node in _through_kernels(users, lambda n: n.users) if _in_kernels(node)}
    return _through_kernels(after, lambda node: node.all_input_nodes)


def _through_kernels(
    seeds: Iterable[fx.Node], step: Callable[[fx.Node], Iterable[fx.Node]]
) -> set[fx.Node]:
    """``seeds``, and where ``step`` leads from those that Inductor computes in kernels of its own.

    What it does not is where a path ends.
    """
    return walk(seeds, lambda node: step(node) if _in_kernels(node) else ())


def _in_kernels(node: fx.Node) -> bool:
    """Inductor writes the kernel that computes ``node``, or none is needed."""
    return node.target in _IN_KERNELS or is_pointwise(node)


def _hoist(span: Sequence[fx.Node], taken: Sequence[fx.Node]) -> None:
    """Move what ``taken`` needs before the first of them, so that nothing else comes between."""
    movable = set(span) - {value for call in taken for value in (call, *_values(call))}
    needed: set[fx.Node] = set()
    for node in reversed(span):
        if node in needed or node not in movable:
            needed.update(movable.intersection(node.all_input_nodes))
    for node in span:
        if node in needed:
            taken[0].prepend(node)


def _callable(taken: Sequence[fx.Node]) -> bool:
    """Inductor's code can call a list of ``taken``.

    Its C++ wrapper takes a list of one tensor for the tensor itself (torch 2.11, mended by 2.14).
    """
    return not torch._inductor.config.cpp_wrapper or len(_inside_and_results(taken)[1]) > 1


def _inside_and_results(taken: Sequence[fx.Node]) -> tuple[set[fx.Node], list[fx.Node]]:
    """``taken`` with what they make, and what of it others read."""
    inside = {node for call in taken for node in (call, *_values(call))}
    results = [n for call in taken for n in _values(call) if not inside.issuperset(n.users)]
    return inside, results


def _replace(graph: fx.Graph, taken: Sequence[fx.Node]) -> None:
    """One node in the place of ``taken``, before the first of them."""
    inside, results = _inside_and_results(taken)
    given = dict.fromkeys(n for call in taken for n in call.all_input_nodes if n not in inside)
    operands = [node for node in given if isinstance(node.meta["val"], torch.Tensor)]
    sizes = [node for node in given if node not in operands]
    text = _listed(taken, operands, sizes, results)
    with graph.inserting_before(taken[0]):
        one = graph.call_function(torch.ops.hot.layer_calls.default, (operands, sizes, text))
        one.meta = {**describe(taken[-1]), "val": [node.meta["val"] for node in results]}
        for place, node in enumerate(results):
            part = graph.call_function(operator.getitem, (one, place))
            part.meta = dict(node.meta)
            node.replace_all_uses_with(part, lambda user: user not in inside)
    for node in sorted(inside, reverse=True):
        graph.erase_node(node)


def _listed(
    taken: Sequence[fx.Node],
    operands: Sequence[fx.Node],
    sizes: Sequence[fx.Node],
    results: Sequence[fx.Node],
) -> str:
    """The list of calls that are ``taken``; it hands ``results`` back."""
    names = {node: f"${n}" for n, node in enumerate(sizes)}
    names |= {node: f"%{n}" for n, node in enumerate(operands)}
    numbers = itertools.count(len(operands))
    words: list[str] = []
    for call in taken:
        several = isinstance(call.meta["val"], (tuple, list))
        made = ["_"] * (len(call.meta["val"]) if several else 1)
        for node in _values(call):
            place: Any = node.args[1] if several else 0
            if made[place] == "_":
                made[place] = f"%{next(numbers)}"
            names[node] = made[place]
        arguments = _arguments(call, names)
        name = call.target._schema.name  # type: ignore[union-attr]
        words += [*made, "=", name, "(", *arguments, ")", ";"]
    returned = [names[node] for node in results]
    seen = {*returned}
    for place in reversed(range(len(words))):
        if words[place].startswith("%") and words[place] not in seen:
            seen.add(words[place])
            words[place] += "!"
    return " ".join([*words, "return", *returned])


def _arguments(call: fx.Node, names: Mapping[fx.Node, str]) -> Iterator[str]:
    """Words of all arguments by the operator's schema: native code knows no defaults."""
    for place, argument in enumerate(call.target._schema.arguments):  # type: ignore[union-attr]
        if place < len(call.args):
            given = call.args[place]
        else:
            given = call.kwargs.get(argument.name, argument.default_value)
        if isinstance(argument.type, torch.OptionalType) and given is not None:
            yield "?"
        yield from argument_words(given, names)
