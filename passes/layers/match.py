"""Joint graph -> Sites: finds the backward of every Linear. Read-only; refuses what it cannot pair.

A forward product and its two backward products are shortlisted by autograd's ``seq_nr`` and
confirmed by identity: g_w = g_y^T x reads the very x that the forward read, g_x = g_y W the same W.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from hot_compile.passes.base.graph import (
    aten,
    clean_path,
    closure,
    is_tangent,
    module_path,
    named_inputs,
    placeholders,
    rank_of,
    reaches,
    strip,
    untranspose,
)
from hot_compile.passes.base.operators import (
    BATCHED_PRODUCTS,
    CASTS,
    FLOATS,
    MATRIX_PRODUCTS,
    PADS,
    RESHAPES,
    VIEWS,
)
from hot_compile.passes.base.site import Site, SiteNodes
from hot_compile.passes.layers.bias import grad_bias
from hot_compile.passes.layers.match_conv import CONVOLUTION_BACKWARD, match_convolution

_LOSS = {aten._log_softmax.default, aten.logsumexp.default, aten._softmax.default}
_REORDERED: set[object] = VIEWS | CASTS | PADS | {aten.clone.default}
_FLATTENING = RESHAPES | CASTS | {aten.clone.default}


@dataclasses.dataclass(frozen=True)
class GraphInputs:
    """What the backend knows of the graph's placeholders before tracing.

    ``parameters``: for each position of Dynamo's graph, the parameter's or buffer's dotted name, or
    None for a user input; all None where the graph has no parameter. Empty only when unknown (a
    graph without Dynamo's record): weights are then recognised by shape and position.
    """

    parameters: tuple[str | None, ...] = ()
    made: tuple[str | None, ...] = ()
    """Likewise: a name for each input that another graph made, with a gradient."""


def graph_inputs(gm: fx.GraphModule) -> GraphInputs:
    """Which of the graph's inputs are parameters or buffers, by Dynamo's own record.

    Unknown only where there is no record at all: a graph made by hand.
    """
    given = [node for node in gm.graph.nodes if node.op == "placeholder"]
    sources = [getattr(node.meta.get("grapharg"), "source", None) for node in given]
    if not any(sources):
        return GraphInputs()
    values = [node.meta.get("example_value") for node in given]
    made = (isinstance(v, torch.Tensor) and v.requires_grad and not v.is_leaf for v in values)
    names = tuple(node.name if is_made else None for node, is_made in zip(given, made, strict=True))
    texts = list(map(_parameter_source, sources, values))
    paths = [text and (clean_path(text) or text) for text in texts]  # an argument has no path
    seen = Counter(paths)
    own = (p if seen[p] == 1 else t and _whole_path(t) for p, t in zip(paths, texts, strict=True))
    return GraphInputs(tuple(own), names)


def _parameter_source(source: Any, value: Any) -> str | None:
    if source is None:
        return None
    text: str = source.name if isinstance(source.name, str) else source.name()
    held = "_parameters[" in text or "_buffers[" in text
    return text if held or isinstance(value, torch.nn.Parameter) else None


def _whole_path(text: str) -> str:
    """With the variable that holds the module: a function may use two that are alike."""
    root = re.match(r"[LG]\[['\"](\w+)['\"]\]", text)
    return f"{root[1]}.{clean_path(text)}" if root else text


def match(graph: fx.Graph, inputs: GraphInputs = GraphInputs()) -> list[Site]:
    """Every matrix product of the backward as a Site, in forward order, refused ones last.

    A graph without tangents (inference, no_grad) has none.
    """
    tangents = [node for node in graph.nodes if is_tangent(node)]
    if not tangents:
        return []
    context = _Context(graph, tangents, inputs)
    placed = [(node, site) for node in context.forward_products for site in context.pair(node)]
    placed += context.convolutions()
    order = {node: place for place, node in enumerate(graph.nodes)}
    sites = [site for _, site in sorted(placed, key=lambda pair: order[pair[0]])]
    return _unique_names(_mark_heads(sites) + context.alone() + context.leftovers())


class _Context:
    """The facts of one graph, gathered once."""

    def __init__(self, graph: fx.Graph, tangents: list[fx.Node], inputs: GraphInputs) -> None:
        self.backward = closure(tangents)
        self.names = named_inputs(graph, inputs.parameters)
        users = [n for n in placeholders(graph) if _is_user_tensor(n) and n not in self.names]
        self.activations = closure(users) if inputs.parameters else set()
        self.known_inputs = bool(inputs.parameters)
        self.batch_sizes = [n.meta["val"].shape[0] for n in users if rank_of(n) >= 1]
        products = [node for node in graph.nodes if node.target in MATRIX_PRODUCTS]
        self.forward_products = [n for n in products if n not in self.backward]
        self.pending = dict.fromkeys(n for n in products if n in self.backward)
        backward = [n for n in reversed(graph.nodes) if n in self.backward]
        self.batched = [n for n in backward if n.target in BATCHED_PRODUCTS]
        self.convolution_backwards = [n for n in backward if n.target is CONVOLUTION_BACKWARD]

    def pair(self, forward: fx.Node) -> Iterator[Site]:
        """The Site of one forward product, if the backward differentiates it."""
        x, right = _operands(forward)
        found = self._find(forward, x, right)
        if found is None:
            return
        for node in (found.grad_input, found.grad_weight):
            if node is not None:
                self.pending.pop(node, None)
        yield self._site(forward, x, found, self._refusal(forward, x, found))

    def _find(self, forward: fx.Node, x: fx.Node, right: fx.Node) -> SiteNodes | None:
        (x_base, x_flip), (w_base, w_flip) = untranspose(x), untranspose(right)
        grad_input = grad_weight = grad_output = None
        is_io = False
        for node in self._candidates(forward):
            p, q = _operands(node)
            (p_base, p_flip), (q_base, q_flip) = untranspose(p), untranspose(q)
            if (q_base, q_flip) == (w_base, not w_flip) and _shape(node) == _shape(x):
                grad_input, grad_output = grad_input or node, p
            elif (q_base, q_flip) == (x_base, x_flip) and _is_transposed(p, grad_output):
                grad_weight, is_io = grad_weight or node, False
                grad_output = grad_output or _transposed_operand(p)
            elif (p_base, p_flip) == (x_base, not x_flip) and (grad_output in (None, q)):
                grad_weight, is_io = grad_weight or node, True
                grad_output = q
        if grad_output is None or not isinstance(grad_output, fx.Node):
            return None
        return SiteNodes(
            x=x,
            weight=w_base,
            weight_is_io=not w_flip,
            grad_output=grad_output,
            grad_input=grad_input,
            grad_weight=grad_weight,
            grad_weight_is_io=is_io,
            forward=forward,
            grad_bias=grad_bias(grad_output),
        )

    def _candidates(self, forward: fx.Node) -> list[fx.Node]:
        """Unpaired backward products that autograd numbered like the forward, g_x's form first."""
        number = forward.meta.get("seq_nr")
        same = [n for n in self.pending if number is None or n.meta.get("seq_nr") == number]
        return [n for n in same if n.target is aten.mm.default]

    def _refusal(self, forward: fx.Node, x: fx.Node, nodes: SiteNodes) -> str | None:
        dtype = nodes.grad_output.meta["val"].dtype
        if dtype not in FLOATS:
            return f"products of {dtype} are not quantised"
        if forward.target is aten.addmm.default and (
            forward.kwargs.get("beta", 1) != 1 or forward.kwargs.get("alpha", 1) != 1
        ):
            return "addmm with alpha or beta other than 1"
        if self.known_inputs and nodes.weight in self.activations:
            x_is_weight = strip(untranspose(x)[0], VIEWS | CASTS) in self.names
            if x_is_weight:
                return "the weight is the left operand (W @ x)"
            return "both operands are activations (as in attention): left alone, as in the paper"
        if not self.known_inputs and not _looks_like_weight(nodes.weight):
            return "no operand is known to be a weight"
        return None

    def _site(self, forward: fx.Node, x: fx.Node, nodes: SiteNodes, refusal: str | None) -> Site:
        rows, width = x.meta["val"].shape
        lead = _lead(x)
        scores = reaches(forward, _REORDERED, _normalises)
        return Site(
            name=module_path(forward) or self._weight_name(nodes.weight) or forward.name,
            rows=rows,
            outputs=forward.meta["val"].shape[1],
            inputs=width,
            dtype=nodes.grad_output.meta["val"].dtype,
            device=nodes.grad_output.meta["val"].device,
            lead=lead,
            batched=self._is_batch(lead[0]),
            head=scores or _is_head(forward),
            refusal=refusal,
            nodes=None if refusal else nodes,
            scores=scores,
            first=nodes.grad_input is None and self._is_input(x),
        )

    def _is_batch(self, size: Any) -> bool:
        return any(_same(size, batch) for batch in self.batch_sizes)

    def _is_input(self, x: fx.Node) -> bool:
        """``x`` is no more than another form of what the user passes in."""
        base = strip(x, _REORDERED)
        return base.op == "placeholder" and base not in self.names

    def _weight_name(self, weight: fx.Node) -> str | None:
        name = self.names.get(strip(weight, VIEWS | CASTS))
        return name.removesuffix(".weight") if name else None

    def convolutions(self) -> list[tuple[fx.Node, Site]]:
        """(forward, Site) of every convolution; those that stay exact carry the reason."""
        found = []
        for backward in self.convolution_backwards:
            forward, site = match_convolution(backward)
            weight: fx.Node = backward.args[2]  # type: ignore[assignment]
            if site.nodes is not None and self.known_inputs and weight in self.activations:
                why = "both operands are activations: left alone, as in the paper"
                site = dataclasses.replace(site, refusal=why, nodes=None)
            first = self._is_input(backward.args[1])  # type: ignore[arg-type]
            name = module_path(forward) or self._weight_name(weight) or backward.name
            scores = reaches(forward, _REORDERED, _normalises)
            head = scores or _is_head(forward)
            site = dataclasses.replace(site, name=name, first=first, scores=scores, head=head)
            found.append((forward, site))
        return found

    def alone(self) -> list[Site]:
        """g_x = g W of which no forward product is known: W is made of parameters, by whatever.

        A base of 4 bits is one: the forward is the library's own operator, the backward restores W.
        """
        if not self.known_inputs:
            return []
        made = self.activations | self.backward
        products = [n for n in reversed(self.pending) if n.target is aten.mm.default]
        weights = (n for n in products if _operands(n)[1] not in made)
        found = [n for n in weights if n.meta["val"].dtype in FLOATS]
        for node in found:
            self.pending.pop(node)
        return [self._grad_input_alone(node) for node in found]

    def _grad_input_alone(self, node: fx.Node) -> Site:
        grad_output, right = _operands(node)
        weight, is_io = untranspose(right)
        nodes = SiteNodes(
            x=None,
            weight=weight,
            weight_is_io=is_io,
            grad_output=grad_output,
            grad_input=node,
            grad_weight=None,
            grad_weight_is_io=False,
            forward=None,
        )
        lead = _lead(grad_output)
        batched = self._is_batch(lead[0])
        return dataclasses.replace(_bare(node), nodes=nodes, lead=lead, batched=batched)

    def leftovers(self) -> list[Site]:
        """Backward products no forward product claimed, each with the reason it is left alone."""
        unpaired = (
            "not paired with a forward product (a product of activations, or one with a single row "
            "or column, which is decomposed into pointwise operations)"
        )
        sites = [_bare(node, unpaired) for node in reversed(self.pending)]
        reason = "batched product (attention, einsum): left alone, as in the paper"
        return sites + [_bare(node, reason) for node in self.batched]


def _bare(node: fx.Node, refusal: str | None = None) -> Site:
    """A Site for a product of which no more is known than its operands' shapes."""
    tensors = [a for a in node.args if isinstance(a, fx.Node) and rank_of(a) >= 2]
    first, second = (a.meta["val"] for a in tensors[:2])
    return Site(
        name=module_path(node) or node.name,
        rows=first.shape[0] if first.dim() == 2 else first.numel() // first.shape[1],
        outputs=first.shape[1],
        inputs=second.shape[1],
        dtype=first.dtype,
        device=first.device,
        lead=tuple(first.shape[:1]),
        batched=False,
        head=False,
        refusal=refusal,
    )


def _is_user_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor) and not is_tangent(node)


def _operands(product: fx.Node) -> tuple[fx.Node, fx.Node]:
    place = MATRIX_PRODUCTS[product.target]
    first, second = product.args[place : place + 2]
    return first, second  # type: ignore[return-value]


def _shape(node: Any) -> tuple[Any, ...]:
    return tuple(node.meta["val"].shape)


def _same(a: Any, b: Any) -> bool:
    """Equal sizes, without adding a guard when either is symbolic."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return str(a) == str(b)


def _transposed_operand(node: fx.Node) -> fx.Node | None:
    """g_y of ``permute(g_y)``."""
    return node.args[0] if untranspose(node)[1] else None  # type: ignore[return-value]


def _is_transposed(node: fx.Node, of: fx.Node | None) -> bool:
    """``node`` is the transpose of ``of`` (of anything, when ``of`` is None)."""
    base, flip = untranspose(node)
    return flip if of is None else (base, not flip) == untranspose(of)


def _looks_like_weight(node: fx.Node) -> bool:
    base = strip(node, VIEWS | CASTS)
    return base.op == "placeholder" and rank_of(base) == 2


def _lead(x: fx.Node) -> tuple[Any, ...]:
    """Leading dimensions of the layer's input, seen through the view that flattens it."""
    source = x
    while source.target in _FLATTENING:
        before: fx.Node = source.args[0]  # type: ignore[assignment]
        if not _shape(before) or not _same(_shape(before)[-1], _shape(x)[-1]):
            break
        source = before
    return _shape(source)[:-1] or _shape(x)[:1]


def _is_head(forward: fx.Node) -> bool:
    """The layer's output leaves the graph through views and casts only."""
    return reaches(forward, VIEWS | CASTS, lambda user: user.op == "output")


def _normalises(user: fx.Node) -> bool:
    """A softmax begins here, whole or in parts."""
    if user.target in _LOSS:
        return True
    shifts = (n for n in user.users if n.target is aten.sub.Tensor and n.args[1] is user)
    return user.target is aten.amax.default and any(shifts)


def _mark_heads(sites: list[Site]) -> list[Site]:
    """A head is the last of several layers; a graph of one layer has none."""
    matched = [site for site in sites if site.nodes is not None]
    last = matched[-1] if len(matched) > 1 else None
    return [dataclasses.replace(s, head=s.head and s is last) for s in sites]


def _unique_names(sites: list[Site]) -> list[Site]:
    """The second call of a shared module becomes ``name#2``."""
    seen: Counter[str] = Counter()
    named = []
    for site in sites:
        seen[site.name] += 1
        count = seen[site.name]
        named.append(dataclasses.replace(site, name=f"{site.name}#{count}") if count > 1 else site)
    return named
