"""Logits that a loss's own operators read, taken apart into bodies (``facts.py``), and put back.

``Chunks`` says what of the graph one operator, or one in the forward and one in the backward, can
do by chunks; ``write_chunks`` puts these in its place.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable

import torch
from torch import fx

from hot_compile.passes.base.emit import Emitter
from hot_compile.passes.base.graph import aten, closure, made_of_tangents, untranspose, walk
from hot_compile.passes.base.site import hint
from hot_compile.passes.head.facts import Fact, Leaf, Reader, ancestors
from hot_compile.passes.head.operands import (
    NotUnderstood,
    Window,
    args_of,
    is_one,
    is_tensor,
    numel,
    shape_of,
)
from hot_compile.passes.head.proportional import ScalarTangent
from hot_compile.passes.head.rules import follow
from hot_compile.passes.head.sizes import as_arguments, minus, size_of
from hot_compile.runtime.head.bodies import Body

Swap = tuple[fx.Node, fx.Node]

_OF_SOFTMAX = {aten.amax.default, aten.logsumexp.default}


class Chunks:
    """What can be done by chunks of a product's results.

    Raises:
        NotUnderstood: they are needed whole.
    """

    def __init__(self, product: fx.Node) -> None:
        self.at = at = follow(product)
        self._graph = product.graph
        self.backward = made_of_tangents(product.graph)
        self.results = self._results()
        self._check(self.results, [n for n in self.results if n not in self.backward], at.behind)
        later = [n for n in self.results if n in self.backward]
        self._check(self.results, later, closure(later))

    @property
    def columns(self) -> int:
        """That exist at a time of each row: the products', and those of all gradients of theirs."""
        gradients = {reader.gradient for reader in self.at.readers.values()}
        widths = [shape_of(n)[1] for n in self.at.products] + [args_of(g)[1][1] for g in gradients]
        return sum(map(hint, widths))

    def is_softmax(self) -> bool:
        """Something of a softmax is made of the rows."""
        return any(node.target in _OF_SOFTMAX for node in self.at.body.nodes)

    def _results(self) -> dict[fx.Node, Fact | Reader]:
        """The nodes that take something small out of the body, and the logits the caller gets."""
        at = self.at
        ours = {n for n in at.facts if n not in at.given}
        core = {n for n in ours if any(map(at.is_wide, (n, *n.all_input_nodes)))}
        core = walk(core, lambda node: ours.intersection(node.all_input_nodes))
        inside = {*core, *at.readers, *at.sums, *at.sizes}
        read = [n for n in core if n.users.keys() - inside]
        wide = [n for n in read if at.is_wide(n)]
        if any(n in at.behind and not self._is_contiguous(n) for n in wide):
            raise NotUnderstood("the caller gets the logits in another form")
        found = {n: at.facts[n] for n in read if n in at.behind or n not in wide}
        return {n: found[n] for n in self._graph.nodes if n in found} | at.sums | at.readers

    def _is_contiguous(self, node: fx.Node) -> bool:
        place = self.at.facts[node].place
        last = place.axis == len(place.shape) - 1 and not place.window
        return last and node in self.at.returned and bool(node.meta["val"].is_contiguous())

    def _check(
        self, results: dict[fx.Node, Fact | Reader], wanted: Iterable[fx.Node], never: set[fx.Node]
    ) -> None:
        """What is read for ``wanted`` is known without any of ``never``."""
        for leaf in leaves_of(results[n] for n in wanted):
            given = leaf.node.all_input_nodes if leaf.kind == "product" else [leaf.node]
            if leaf.kind not in ("mask", "number") and any(n in never for n in given):
                raise NotUnderstood("the logits meet what is made of all rows of them")
        for node in wanted:
            read = results[node]
            if isinstance(read, Reader) and read.operand in never:
                raise NotUnderstood("the logits meet what is made of all rows of them")

    def tangent(self) -> ScalarTangent | None:
        """By which the gradients made in the forward are multiplied later; None: there are none.

        Raises:
            NotUnderstood: they have to be made in the backward.
        """
        later = [n for n in self.results if n in self.backward]
        self._check(self.results, later, self.at.behind)
        return ScalarTangent(self._graph, later) if later else None


def leaves_of(results: Iterable[Fact | Reader]) -> list[Leaf]:
    """What of the joint graph is read for these, products first."""
    values = [r.gradient if isinstance(r, Reader) else r.value for r in results]
    found = [node.meta["leaf"] for node in ancestors(values) if "leaf" in node.meta]
    return sorted(found, key=lambda leaf: leaf.kind != "product")


def write_chunks(chunks: Chunks, in_forward: bool) -> list[Swap]:
    """(node, what takes its place) for all of ``chunks.results``."""
    graph, product = chunks.at.products[0].graph, chunks.at.products[0]
    later = [n for n in chunks.results if n in chunks.backward]
    now = [n for n in chunks.results if n not in chunks.backward]
    forward = Emitter(graph, graph.output_node(), product)
    backward = Emitter(graph, graph.output_node(), (later or now)[0])
    tangent = chunks.tangent() if in_forward else None
    if tangent is None and not later:
        made = Writer(chunks, forward).made(now)
    elif tangent is not None:
        made = Writer(chunks, forward, tangent.units(forward)).made([*now, *later])
        for node in later:
            made[node] = backward(aten.mul.Tensor, made[node], tangent.node)
    else:
        made = Writer(chunks, forward).made(now) if now else {}
        made |= Writer(chunks, backward).made(later)
    return as_swaps(chunks, made, forward, backward)


def as_swaps(
    chunks: Chunks, made: dict[fx.Node, fx.Node], forward: Emitter, backward: Emitter
) -> list[Swap]:
    """``made`` in the form of the nodes whose places they take, and sizes of what is gone."""
    swaps = [
        (node, _like(backward if node in chunks.backward else forward, made[node], node, result))
        for node, result in chunks.results.items()
    ]
    for node in chunks.at.sizes:
        (size,) = as_arguments(forward, [size_of(node)])
        assert isinstance(size, fx.Node)
        swaps.append((node, size))
    return swaps


def _like(emit: Emitter, made: fx.Node, node: fx.Node, result: Fact | Reader) -> fx.Node:
    """What the operator returned, in the form of the node whose place it takes."""
    if isinstance(result, Fact):
        made = _narrowed(emit, made, result.place.window)
        if result.then is not None:
            op, dims = result.then
            made = emit(aten.reshape.default, made, as_arguments(emit, result.place.shape))
            made = emit(op, made, list(dims))
    elif result.flipped:
        made = emit.permute(made, [1, 0])
    value = node.meta["val"]
    made = emit.cast(made, value.dtype)
    if isinstance(result, Reader) and result.kind != "columns":
        return made
    return emit(aten.reshape.default, made, as_arguments(emit, map(size_of, value.shape)))


def _narrowed(emit: Emitter, value: fx.Node, window: Window) -> fx.Node:
    """[rows of ``window``, columns] of ``value`` [L, columns]."""
    columns = value.meta["val"].shape[1]
    for cut in window:
        lead, ends = (as_arguments(emit, sizes) for sizes in (cut.lead, (cut.start, cut.stop)))
        value = emit(aten.reshape.default, value, [*lead, columns])
        value = emit(aten.slice.Tensor, value, cut.dim, *ends)
        value = emit(aten.reshape.default, value, [-1, columns])
    return value


def _widened(emit: Emitter, value: fx.Node, window: Window) -> fx.Node:
    """[L, columns] of ``value`` [rows of ``window``, columns]: zero where there is none."""
    columns = value.meta["val"].shape[1]
    for cut in reversed(window):
        left = as_arguments(emit, cut.left)
        ends = as_arguments(emit, [cut.start, minus(cut.lead[cut.dim], cut.stop)])
        pads = [0] * (2 * (len(left) - cut.dim)) + ends
        value = emit(aten.reshape.default, value, [*left, columns])
        value = emit(aten.constant_pad_nd.default, value, pads, 0)
        value = emit(aten.reshape.default, value, [-1, columns])
    return value


class Writer:
    """One operator and what it is given; ``known``: stands in for what of the graph it reads."""

    def __init__(
        self, chunks: Chunks, emit: Emitter, known: Callable[[fx.Node], fx.Node] = lambda n: n
    ) -> None:
        self._chunks, self._emit, self._known = chunks, emit, known
        self._given: dict[str, list[fx.Node]] = {"rows": [], "shared": []}
        self._places: dict[Leaf, tuple[str, int]] = {}

    def made(self, nodes: list[fx.Node]) -> dict[fx.Node, fx.Node]:
        """The operator's result for each of ``nodes``."""
        results = [(n, self._chunks.results[n]) for n in nodes]
        facts = [(n, r) for n, r in results if isinstance(r, Fact)]
        readers = [(n, r) for n, r in results if isinstance(r, Reader)]
        gradients = list(dict.fromkeys(r.gradient for _, r in readers))
        leaves = leaves_of(r for _, r in results)
        products = [self._product(leaf) for leaf in leaves if leaf.kind == "product"]
        for leaf in leaves:
            if leaf.kind != "product":
                self._places[leaf] = self._leaf(leaf)
        read = [(r.kind, gradients.index(r.gradient), self._operand(r)) for _, r in readers]
        values = [r.value for _, r in facts] + gradients
        body = Body(
            self._code(values),
            tuple(products),
            tuple((self._columns(r), _dtype(n)) for n, r in facts),
            tuple(args_of(g)[1][1] for g in gradients),
            tuple(read),
        )
        made = self._emit(torch.ops.hot.head_rows.default, body.text(), *self._given.values())
        ordered = [n for n, _ in facts] + [n for n, _ in readers]
        return dict(zip(ordered, self._emit.parts(made), strict=True))

    def _columns(self, fact: Fact) -> int:
        return int(fact.place.width)

    def _code(self, values: list[fx.Node]) -> str:
        """The part of the body that ``values`` need."""
        graph, copies = fx.Graph(), {}
        inputs = {
            (kind, number): graph.placeholder(f"{kind}_{number}")
            for kind, count in (
                ("product", sum(kind == "product" for kind, _ in self._places.values())),
                *((kind, len(given)) for kind, given in self._given.items()),
            )
            for number in range(count)
        }
        wanted = ancestors(values)
        device = next(iter(self._chunks.results)).meta["val"].device
        for node in self._chunks.at.body.nodes:
            if node in wanted and node.op == "placeholder":
                copies[node] = inputs[self._places[node.meta["leaf"]]]
            elif node in wanted and _to_one_column(node):
                copies[node] = _chosen(graph, node, copies, device)
            elif node in wanted:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[value] for value in values))
        return graph.python_code("self").src

    def _put(self, kind: str, node: fx.Node) -> int:
        """Place of ``node`` among what is given."""
        given = self._given[kind]
        if node not in given:
            given.append(node)
        return given.index(node)

    def product(self, node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None]:
        """x, weight [O, I] and bias of a product."""
        *bias, x, right = node.args
        base, transposed = untranspose(right)  # type: ignore[arg-type]
        weight = base if transposed else self._emit.permute(right, [1, 0])  # type: ignore[arg-type]
        return x, weight, bias[0] if bias else None  # type: ignore[return-value]

    def _product(self, leaf: Leaf) -> tuple[int, int, int]:
        self._places[leaf] = "product", len(self._places)
        x, weight, bias = self.product(leaf.node)
        x = _widened(self._emit, x, leaf.place.window)
        return (
            self._put("rows", x),
            self._put("shared", weight),
            -1 if bias is None else self._put("shared", bias),
        )

    def row(self, leaf: Leaf) -> fx.Node:
        """A leaf as a node of the graph: [L, columns], or what all rows share."""
        kind, place = self._leaf(leaf)
        return self._given[kind][place]

    def _operand(self, reader: Reader) -> int:
        node = reader.operand
        if node is None:
            return -1
        base, transposed = untranspose(node)
        if transposed == reader.flipped:
            node = base
        elif reader.flipped:
            node = self._emit.permute(node, [1, 0])
        return self._put("shared" if reader.kind == "rows" else "rows", node)

    def _leaf(self, leaf: Leaf) -> tuple[str, int]:
        emit, place = self._emit, leaf.place
        if leaf.kind in ("mask", "number"):
            node = self._rows_in(leaf)
        else:
            node = self._known(leaf.node)
            if not is_tensor(node):
                node = self._size(node)
            elif leaf.kind == "all rows":
                node = emit(aten.reshape.default, node, [-1, place.width])
            elif leaf.kind == "shared" and place.shape:
                node = emit(aten.reshape.default, node, [1, -1])
            elif leaf.kind == "rows" and place.axis is None and numel(node) == 1:
                return "shared", self._put("shared", emit(aten.reshape.default, node, [1, 1]))
            elif leaf.kind == "rows":
                if place.axis is None:
                    node = emit(aten.expand.default, node, as_arguments(emit, place.shape))
                node = emit(aten.reshape.default, node, [-1, place.width])
                node = _widened(emit, node, place.window)
        kind = "shared" if leaf.kind in ("shared", "all rows") else "rows"
        return kind, self._put(kind, node)

    def _size(self, node: fx.Node) -> fx.Node:
        """A number that is no tensor as one without dimensions, which changes no dtype."""
        whole = isinstance(node.meta["val"], int | torch.SymInt)
        kind = {"dtype": torch.int64 if whole else torch.float64, "pin_memory": False}
        device = self._chunks.at.products[0].meta["val"].device
        return self._emit(aten.full.default, [], node, device=device, **kind)

    def _rows_in(self, leaf: Leaf) -> fx.Node:
        """Which rows lie in a window, or the how manieth of them each row is."""
        emit, window = self._emit, leaf.place.window
        kind = {"device": leaf.node.meta["val"].device, "pin_memory": False}
        left = as_arguments(emit, window[-1].left)
        if leaf.kind == "mask":
            node = emit(aten.full.default, left, True, dtype=torch.bool, **kind)
        else:
            count = functools.reduce(lambda a, b: emit(operator.mul, a, b), left)
            node = emit.numbers(count, kind["device"])
        return _widened(emit, emit(aten.reshape.default, node, [-1, 1]), window)


def _to_one_column(node: fx.Node) -> bool:
    """Whether a node of a body gives one column a row another value."""
    if node.target not in (aten.scatter.value, aten.scatter.src, aten.scatter_add.default):
        return False
    base, _, index = args_of(node)[:3]
    return is_one(args_of(index)[1][1]) and isinstance(args_of(base)[1][1], int)


def _chosen(
    graph: fx.Graph, node: fx.Node, copies: dict[fx.Node, fx.Node], device: torch.device
) -> fx.Node:
    """A scatter to one column as a choice, which takes no memory in generated code.

    There, on CUDA, torch 2.11 loses what is scattered where a ``slice_scatter`` reads it.
    """
    base, _, index, source = args_of(node)[:4]
    emit = graph.call_function
    columns = emit(aten.arange.default, (args_of(base)[1][1],), {"device": device})
    there = emit(aten.eq.Tensor, (columns, copies[index]))
    value = copies.get(source, source)
    if node.target is aten.scatter_add.default:
        value = emit(aten.add.Tensor, (copies[base], value))
    op = aten.where.self if isinstance(value, fx.Node) else aten.where.ScalarSelf
    return emit(op, (there, value, copies[base]))


def _dtype(node: fx.Node) -> str:
    value = node.meta["val"].dtype
    return str(value).removeprefix("torch.")
