"""Joint graph -> the same graph, exact, with every layer's operands shown to an observer.

The two backward products of a layer become one call that computes them exactly as before and hands
x, W and g_y on; so does a convolution's backward. Such graphs are run node by node (they hold
Python objects), never lowered.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, fx

from hot_compile.passes.emit import describe
from hot_compile.passes.graph import aten
from hot_compile.passes.plan import Decision, batch_problem
from hot_compile.passes.site import ConvNodes, Site, SiteNodes, hint


@dataclasses.dataclass(frozen=True)
class Layer:
    """What an observer is told of a layer besides its tensors."""

    name: str
    outputs: int
    inputs: int
    dtype: str
    tokens: int | None
    """Rows of one sample, or None where rows cannot be grouped across the batch."""
    decision: Decision | None = None
    """What the plan would do to the layer."""
    site: Site | None = None
    """The layer as matched, for planning it anew."""

    @property
    def convolves(self) -> bool:
        """It is a convolution."""
        return self.site is not None and self.site.conv is not None


Observer = Callable[[Layer, Tensor, "Tensor | None", "Tensor | None"], None]
"""Called in each backward with (layer, g_y [L, O], W [O, I] or None, x [L, I] or None); None where
the layer's backward has no use for the operand. Of a convolution (``layer.convolves``) all three
come, in their own shapes. It must not keep or change them.
"""


def observe(
    graph: fx.Graph, sites: Sequence[Site], observer: Observer, plan: Iterable[Decision] = ()
) -> None:
    """Route the backward products of every understood Site through ``observer``, in place."""
    decisions = {decision.site: decision for decision in plan}
    for site in sites:
        layer = _layer(site, decisions.get(site.name))
        if isinstance(site.nodes, SiteNodes):
            _route(graph, site, site.nodes, layer, observer)
        elif isinstance(site.nodes, ConvNodes):
            _route_convolution(graph, site.nodes, layer, observer)
    graph.eliminate_dead_code()
    graph.lint()


class _Products:
    """The call a layer's backward products become: (g_y, W, x) -> (g_x, g_w), None if absent."""

    __name__ = "observed_products"
    __module__ = __name__

    def __init__(self, layer: Layer, observer: Observer, nodes: SiteNodes) -> None:
        self._layer = layer
        self._observer = observer
        self._weight_is_io = nodes.weight_is_io
        self._grad_weight_is_io = nodes.grad_weight_is_io

    def __call__(
        self, g: Tensor, weight: Tensor | None, x: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        if weight is not None and self._weight_is_io:
            weight = weight.t()
        self._observer(self._layer, g, weight, x)
        grad_weight = None
        if x is not None:
            grad_weight = x.t() @ g if self._grad_weight_is_io else g.t() @ x
        return None if weight is None else g @ weight, grad_weight


class _Convolution:
    """The call a ``convolution_backward`` becomes: the same results of the same arguments."""

    __name__ = "observed_convolution"
    __module__ = __name__

    def __init__(self, layer: Layer, observer: Observer) -> None:
        self._layer = layer
        self._observer = observer

    def __call__(self, g: Tensor, x: Tensor, weight: Tensor, *settings: Any) -> tuple[Any, ...]:
        self._observer(self._layer, g, weight, x)
        return aten.convolution_backward.default(g, x, weight, *settings)


def _layer(site: Site, decision: Decision | None) -> Layer:
    grouped = site.conv is None and batch_problem(site) is None
    return Layer(
        name=site.name,
        outputs=hint(site.outputs),
        inputs=hint(site.inputs),
        dtype=str(site.dtype).removeprefix("torch."),
        tokens=math.prod(map(int, site.lead[1:])) if grouped else None,
        decision=decision,
        site=site,
    )


def _route_convolution(graph: fx.Graph, nodes: ConvNodes, layer: Layer, observer: Observer) -> None:
    old = nodes.backward
    with graph.inserting_before(old):
        call = graph.call_function(_Convolution(layer, observer), old.args)
    call.meta = {**describe(old), "val": old.meta["val"]}
    old.replace_all_uses_with(call)


def _route(graph: fx.Graph, site: Site, nodes: SiteNodes, layer: Layer, observer: Observer) -> None:
    products = (nodes.grad_input, nodes.grad_weight)
    first = min(node for node in products if node is not None)
    weight = nodes.weight if nodes.grad_input is not None else None
    x = nodes.x if nodes.grad_weight is not None else None
    with graph.inserting_before(first):
        operands = (nodes.grad_output, weight, x)
        call = graph.call_function(_Products(layer, observer, nodes), operands)
    call.meta = describe(first)
    call.meta["val"] = tuple(None if node is None else node.meta["val"] for node in products)
    for index, old in enumerate(products):
        if old is None:
            continue
        with graph.inserting_after(call):
            part = graph.call_function(operator.getitem, (call, index))
        part.meta = {**describe(old), "val": old.meta["val"]}
        old.replace_all_uses_with(part)
