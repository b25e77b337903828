"""Joint graph -> the same graph, exact, with layers' operands and parameters' gradients shown.

The backward products stay what they are. Before them goes one operator, ``hot::observe``, that
looks at x, W and g_y, and that no compiler may remove because it says that it writes to something.
So observed graphs are compiled like any other. The operator finds whom to tell by a number: graphs
hold no Python objects. A parameter's gradient is not returned but looked at where it is made, by
``hot::observe_gradient``: all of them at once would take as much memory as the step's own.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, fx

import hot_compile.runtime.ops  # noqa: F401  (defines the namespace this adds an operator to)
from hot_compile.passes.base.emit import Emitter
from hot_compile.passes.base.graph import aten, is_tangent, named_inputs, placeholders, returned
from hot_compile.passes.base.site import ConvNodes, Site, SiteNodes, hint
from hot_compile.passes.forward.choose import ForwardDecision
from hot_compile.passes.layers.decision import Decision, batch_problem
from hot_compile.passes.measure.sketch import sketch
from hot_compile.passes.measure.stored import Fed

log = logging.getLogger("hot_compile")

SAME = 0.05
"""Relative difference of an output's values up to which it is the same: more than what bf16 loses
where kernels fuse otherwise, less than what other random draws make."""


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
    forward: ForwardDecision | None = None
    """What the plan would do to its forward, if that is on INT8."""

    @property
    def convolves(self) -> bool:
        """It is a convolution."""
        return self.site is not None and self.site.conv is not None


class Observer:
    """Shown every layer's operands in a backward, and what became of the gradients.

    What is raised here stops no training: the graph is not observed any more, with one warning.
    """

    problem: str | None = None
    """Why it is shown nothing more of some graph."""
    wants_stored: bool = False
    """It is shown what crosses to the backward, too."""
    doubts: bool = False
    """It wants to know what exact code of two kinds differs by."""

    def __call__(self, layer: Layer, g: Tensor, weight: Tensor | None, x: Tensor | None) -> None:
        """Look at g_y [L, O], W [O, I] and x [L, I]; None where the backward has no use for it.

        Of a convolution (``layer.convolves``) all three come, in their own shapes. None of them may
        be kept or changed.
        """

    def stored(self, fed: Fed, operands: Sequence[Tensor]) -> None:
        """Look at a tensor that crosses, the first of ``operands``; none may be kept or changed."""

    def planned(self, decisions: Sequence[Decision]) -> None:
        """Take what an observed graph's plan says of every layer, before anything is shown."""

    def gradient(self, name: str, got: Tensor, want: Tensor) -> None:
        """Take sketches of a parameter's gradient, as the step has it and as it is exactly.

        Both fp32, on the device; ``want`` is not finite where nothing can be said.
        """

    def uncertain(self, name: str, difference: Tensor) -> None:
        """Take a sketch: by what a parameter's gradients by exact code of two kinds differ."""

    @property
    def same(self) -> float:
        """Relative difference up to which a step's outputs are those of its exact twin."""
        return SAME

    def differs(self, worst: float) -> None:
        """Outputs are further than ``same`` from the twin's, which by default is not trusted."""
        error = RuntimeError(f"its outputs differ by {worst:.2g} from the watched step's")
        self.failed("an exact twin computed something else", error)

    def short(self, why: str) -> None:
        """Memory was too short for this look; the next one may have more."""

    def failed(self, what: str, error: object) -> None:
        """Say once that ``what`` went wrong; training goes on as it would without observing."""
        if self.problem is None:
            self.problem = f"{what}: {type(error).__name__}: {error}"
            log.warning("hot: not observed any more, training goes on as usual: %s", self.problem)


class Observation:
    """One observed graph: its layers, and who is shown them while this object lives."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._layers: list[tuple[Layer, bool]] = []
        self._stored: list[Fed] = []
        self._parameters: list[str] = []
        self._sketches: dict[str, Tensor] = {}
        self.number = next(_NUMBERS)
        _LIVE[self.number] = self

    def planned(self, decisions: Sequence[Decision]) -> None:
        """Tell the observer what the plan says."""
        self._observer.planned(decisions)

    def add(self, layer: Layer, weight_is_io: bool) -> int:
        """The layer's place, by which :meth:`show` knows it."""
        self._layers.append((layer, weight_is_io))
        return len(self._layers) - 1

    @property
    def wants_stored(self) -> bool:
        """The observer is shown what crosses, too."""
        return self._observer.wants_stored

    def add_stored(self, fed: Fed) -> int:
        """The place of a tensor that crosses, by which :meth:`show_stored` knows it."""
        self._stored.append(fed)
        return len(self._stored) - 1

    def add_gradient(self, name: str) -> int:
        """The place of a parameter's gradient, by which :meth:`keep` knows it."""
        self._parameters.append(name)
        return len(self._parameters) - 1

    def keep(self, place: int, gradient: Tensor) -> None:
        """Keep one parameter's gradient as its sketch, until :meth:`taken`."""
        self._sketches[self._parameters[place]] = sketch(gradient)

    def taken(self) -> dict[str, Tensor]:
        """Sketches of the gradients made since the last call, by parameter."""
        found, self._sketches = self._sketches, {}
        return found

    def show(self, place: int, g: Tensor, weight: Tensor | None, x: Tensor | None) -> None:
        """Hand one layer's operands on; never raises."""
        layer, weight_is_io = self._layers[place]
        if weight is not None and weight_is_io:
            weight = weight.t()
        self._tell(f"layer {layer.name!r}", lambda: self._observer(layer, g, weight, x))

    def show_stored(self, place: int, operands: Sequence[Tensor]) -> None:
        """Hand a tensor that crosses on, with what its gradients are made of; never raises."""
        fed = self._stored[place]
        self._tell(f"stored tensor {fed.name!r}", lambda: self._observer.stored(fed, operands))

    def _tell(self, what: str, tell: Callable[[], None]) -> None:
        if self._observer.problem is not None:
            return
        try:
            with torch.no_grad():
                tell()
        except Exception as error:
            self._observer.failed(f"{what} could not be measured", error)


_NUMBERS = itertools.count()
_LIVE: WeakValueDictionary[int, Observation] = WeakValueDictionary()
"""By number, because that is all a graph can hold; an entry lives as long as the compiled graph."""


def _teller(tell: Callable[..., None]) -> Callable[..., None]:
    def told(seen: Tensor, *given: Any) -> None:
        *operands, number, place = given
        observation = _LIVE.get(number)
        if observation is not None:
            tell(observation, place, *operands)

    return told


_LIBRARY = torch.library.Library("hot", "FRAGMENT")
for _name, _given, _tell in (
    ("observe", "Tensor grad_output, Tensor? weight, Tensor? x", Observation.show),
    ("observe_gradient", "Tensor gradient", Observation.keep),
    ("observe_stored", "Tensor[] operands", Observation.show_stored),
):
    _LIBRARY.define(f"{_name}(Tensor(a!) seen, {_given}, int observation, int place) -> ()")
    _LIBRARY.impl(_name, _teller(_tell), "CompositeExplicitAutograd")
    torch.library.register_fake(f"hot::{_name}", lambda *_: None, lib=_LIBRARY)


def observe(
    graph: fx.Graph,
    sites: Sequence[Site],
    observation: Observation,
    plan: Iterable[Decision] = (),
    forwards: Iterable[ForwardDecision] = (),
) -> None:
    """Show the operands of every understood Site's backward to ``observation``, in place."""
    decisions = {decision.site: decision for decision in plan}
    rounded = {forward.site: forward for forward in forwards if forward.int8}
    observation.planned(tuple(decisions.values()))
    for site in sites:
        if site.nodes is None:
            continue
        weight_is_io = isinstance(site.nodes, SiteNodes) and site.nodes.weight_is_io
        layer = _layer(site, decisions.get(site.name), rounded.get(site.name))
        place = observation.add(layer, weight_is_io)
        before, operands = _operands(site.nodes)
        emit = Emitter(graph, before, before)
        seen = emit(aten.full.default, [], 0, dtype=torch.int32, device=site.device)
        emit(torch.ops.hot.observe.default, seen, *operands, observation.number, place)
    graph.lint()


def observe_gradients(
    graph: fx.Graph, names: Sequence[str | None], observation: Observation
) -> None:
    """Show the gradients of the graph's inputs that ``names`` calls parameters, in place.

    They are returned no more: None stands for them.
    """
    inputs = [node for node in placeholders(graph) if not is_tangent(node)]
    results, first = returned(graph), _first_gradient(graph)
    output = graph.output_node()
    known = named_inputs(graph, names)
    for place, node in enumerate(inputs, first):
        gradient, name = results[place], known.get(node)
        if name is None or not isinstance(gradient, fx.Node) or gradient in results[:first]:
            continue
        emit = Emitter(graph, gradient.next, gradient, stays=True)  # here, not when all are there
        seen = emit(aten.full.default, [], 0, dtype=torch.int32, device=node.meta["val"].device)
        where = observation.number, observation.add_gradient(name)
        emit(torch.ops.hot.observe_gradient.default, seen, gradient, *where)
        results[place] = None
    output.args = (tuple(results),)
    graph.lint()


def observe_stored(
    graph: fx.Graph,
    crossing: Iterable[tuple[Fed, tuple[fx.Node, ...]]],
    observation: Observation,
) -> None:
    """Show tensors that will cross, with the operands of what they feed, in place.

    ``crossing``: with operands of a copy of ``graph``, whose names are its own.
    """
    nodes = {node.name: node for node in graph.nodes}
    for fed, names in crossing:
        operands = [nodes[node.name] for node in names if node.name in nodes]
        if len(operands) < len(names):
            continue
        last = max(operands)
        emit = Emitter(graph, last.next, last, stays=True)
        device = operands[0].meta["val"].device
        seen = emit(aten.full.default, [], 0, dtype=torch.int32, device=device)
        where = observation.number, observation.add_stored(fed)
        emit(torch.ops.hot.observe_stored.default, seen, operands, *where)
    graph.lint()


def unobserved(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of a joint graph that shows nothing: gradients shown are among its results again."""
    graph, same = fx.Graph(), dict[fx.Node, fx.Node]()
    results = list(graph.graph_copy(gm.graph, same))  # type: ignore[arg-type]
    shown = graph.find_nodes(op="call_function", target=torch.ops.hot.observe_gradient.default)
    first = _first_gradient(gm.graph)  # a forward may return None, too
    free = [place for place, value in enumerate(results) if value is None and place >= first]
    for place, node in zip(free, shown, strict=False):
        results[place] = node.args[1]
    output = graph.output(tuple(results))
    output.meta = dict(gm.graph.output_node().meta)
    observers = graph.find_nodes(op="call_function", target=torch.ops.hot.observe.default)
    for node in (*observers, *shown):
        graph.erase_node(node)
    return fx.GraphModule(gm, graph)


def _first_gradient(graph: fx.Graph) -> int:
    """Its place among a joint graph's results: gradients of all inputs come last."""
    inputs = sum(not is_tangent(node) for node in placeholders(graph))
    return len(returned(graph)) - inputs


def _operands(nodes: SiteNodes | ConvNodes) -> tuple[fx.Node, tuple[Any, ...]]:
    """(the first product, (g_y, W or None, x or None))."""
    if isinstance(nodes, ConvNodes):
        g, x, weight, *_ = nodes.backward.args
        return nodes.backward, (g, weight, x)
    first = min(node for node in (nodes.grad_input, nodes.grad_weight) if node is not None)
    weight = nodes.weight if nodes.grad_input is not None else None
    x = nodes.x if nodes.grad_weight is not None else None
    return first, (nodes.grad_output, weight, x)


def _layer(site: Site, decision: Decision | None, forward: ForwardDecision | None) -> Layer:
    grouped = site.conv is None and batch_problem(site) is None
    return Layer(
        name=site.name,
        outputs=hint(site.outputs),
        inputs=hint(site.inputs),
        dtype=str(site.dtype).removeprefix("torch."),
        tokens=math.prod(map(int, site.lead[1:])) if grouped else None,
        decision=decision,
        site=site,
        forward=forward,
    )
