"""A crossing tensor, and the part of the backward up to the first gradients that it feeds.

That part is a small graph of its own. Run with the tensor as it is, and as each scheme restores it,
it tells what storing does to gradients: those of parameters, and those that other layers get. A
path ends at the first product with a gradient, where it joins another gradient, and at a result.
"""

from __future__ import annotations

import dataclasses
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set

import torch
from torch import Tensor, fx

from hot_compile.passes.base.emit import Emitter
from hot_compile.passes.base.graph import aten, made_of_tangents, makes_bool, module_path
from hot_compile.passes.base.schemes import Scheme
from hot_compile.passes.profile.profile import StorageMeasure
from hot_compile.passes.storage.crossers import Crosser
from hot_compile.passes.storage.pack import pack, unpack
from hot_compile.passes.storage.readers import is_product, is_result
from hot_compile.passes.storage.store import in_order

_MOST = 400
"""Operators between a tensor and the gradients it feeds; beyond, it is not measured."""
_NORMS, _NUDGED = "norms", ""
"""In the place of a scheme: norms, and the tensor as it is, but for its own dtype's rounding."""
_NOISE = 0.1
"""A gradient that this changes by as much, and that the finest scheme gets wholly wrong, is nothing
but rounding: of all that is rounded for it this is one."""
_QUIET = 1e-3
"""A vector's gradient does not count that is smaller than this share of its graph's largest: of a
bias in front of a norm it is nothing but rounding."""
_NO_STEP = 2.0**-23
"""Nor does a matrix's that is smaller than this share, which fp32 cannot add to the largest: where
all rows of attention are alike, queries and keys have such ones."""
LOST = 1e6
"""Error of what is infinite or far beyond all that rounding does to sums that cancel."""


@dataclasses.dataclass(frozen=True)
class Quiet:
    """Norms that a gradient must be above to count."""

    vectors: float = 0.0
    matrices: float = 0.0

    @classmethod
    def of(cls, norms: Iterable[float]) -> Quiet:
        """By the largest of a graph's gradients."""
        largest = max(norms, default=0.0)
        return cls(_QUIET * largest, _NO_STEP * largest)

    def least(self, vector: bool) -> float:
        """Of a vector, or of a matrix."""
        return self.vectors if vector else self.matrices


@dataclasses.dataclass(frozen=True)
class Fed:
    """What a crossing tensor does to the gradients that it feeds."""

    name: str
    """As ``storage_names`` has it."""
    ends: fx.GraphModule
    """(the tensor, other operands) -> the gradients, as a tuple."""
    own: tuple[bool, ...]
    """Of each: it is a parameter's, and not one that other layers get."""
    vectors: tuple[bool, ...]
    """Of each: it is one of a gain, a bias, or a single number."""
    trips: Mapping[str, fx.GraphModule]
    """By scheme, finest first: the tensor -> as it is restored."""
    scheme: str = str(Scheme.EXACT)
    """What a usual step stores it as."""
    held: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Bytes that each of ``trips`` takes."""

    def errors(self, operands: Sequence[Tensor]) -> dict[str, Tensor]:
        """By scheme: relative error of each gradient, [gradients] fp32; the tensor comes first.

        Beside the schemes stand the gradients' norms, and what the tensor's own rounding does.
        """
        saved, *others = operands
        want = self.ends(saved, *others)
        found = {_NORMS: torch.stack([each.float().norm() for each in want])}
        trips = dict[str, Callable[[Tensor], Tensor]]({_NUDGED: _nudged, **self.trips})
        for scheme, trip in trips.items():
            got = self.ends(trip(saved), *others)
            found[scheme] = torch.stack([_error(*pair) for pair in zip(got, want, strict=True)])
        return found

    def measures(
        self, errors: Mapping[str, Tensor], quiet: Quiet = Quiet()
    ) -> dict[str, StorageMeasure]:
        """By scheme: the worst of :meth:`errors`; empty if there are none, or they are not finite.

        A gradient that is zero but for rounding, such as that of a bias in front of a norm, does
        not count, nor a parameter's that is too ``quiet``. Waits for the device.
        """
        norms, nudged, *rest = (row.cpu() for row in errors.values())
        table = torch.stack(rest)  # [schemes, gradients]
        finest, own = table.amin(0), torch.tensor(self.own, device="cpu")
        real = (finest < 1) | (nudged < _NOISE) | (finest == LOST)
        least = list(map(quiet.least, self.vectors))
        real &= ~(own & (norms < torch.tensor(least, device="cpu")))
        table, own = table[:, real], own[real]
        if not table.numel() or not table.isfinite().all():
            return {}
        sides = (torch.where(own, table, 0.0), torch.where(own, 0.0, table))
        worst = (side.amax(1).tolist() for side in sides)
        measures = (StorageMeasure(*pair) for pair in zip(*worst, strict=True))
        return dict(zip(self.trips, measures, strict=True))


def _nudged(saved: Tensor) -> Tensor:
    """Each value off by a rounding of its dtype, up or down by chance."""
    chance = torch.Generator(saved.device).manual_seed(0)
    up = torch.randint(2, saved.shape, generator=chance, dtype=saved.dtype, device=saved.device)
    return saved * up.mul_(2).sub_(1).mul_(torch.finfo(saved.dtype).eps).add_(1)


def _error(got: Tensor, want: Tensor) -> Tensor:
    distance, norm = torch.dist(got.float(), want.float()), want.float().norm()
    error = torch.where(distance == 0, distance, distance / norm)
    return torch.where(norm > 0, error.nan_to_num(LOST, LOST).clamp(max=LOST), error)


def is_vector(parameter: Tensor) -> bool:
    """A gain, a bias, or a weight of one number a channel: one dimension is not 1, or none.

    Of a size that is not known yet nothing is asked: it counts as more than 1.
    """
    return sum(not (isinstance(size, int) and size == 1) for size in parameter.shape) <= 1


def storage_names(forward: fx.Graph) -> dict[fx.Node, str]:
    """What a profile calls each tensor: module path and operator, numbered where that is several.

    Unlike nodes' names it does not depend on the rest of the model.
    """
    counts: Counter[tuple[str, str]] = Counter()
    names = {}
    for node in forward.nodes:
        if node.op != "call_function":
            continue
        kind = module_path(node) or "", getattr(node.target, "__name__", "").split(".")[0]
        number = counts[kind]
        counts[kind] += 1
        names[node] = ":".join(kind) + (f":{number}" if number else "")
    return names


def fed_by(
    graph: fx.Graph,
    found: Iterable[Crosser],
    chosen: Mapping[Crosser, Scheme],
    forward: fx.Graph,
    backward: fx.Graph,
) -> list[tuple[Fed, tuple[fx.Node, ...]]]:
    """What of ``graph`` tells the errors of storing each of ``found``, with the operands it reads.

    Args:
        graph: a joint graph, exact, as it was partitioned.
        found: tensors that cross. chosen: how a usual step stores them.
        forward, backward: what it was partitioned into.
    """
    nodes = {node.name: node for node in graph.nodes}
    names = storage_names(forward)
    recomputed = {n.name for n in backward.nodes if n.op == "call_function"}
    gradients = made_of_tangents(graph)
    result = []
    for crosser in found:
        saved = nodes.get(crosser.name)
        rounded = [s for s in crosser.measurable if s not in (Scheme.EXACT, Scheme.BITS)]
        if saved is None or not rounded or crosser.saved not in names:
            continue
        part = _Part(saved, recomputed, gradients)
        if part.ends and part.operands is not None:
            masked = crosser.own_mask is not None
            trips = {str(s): _round_trip(crosser, s.masked if masked else s) for s in rounded}
            scheme = str(chosen.get(crosser, Scheme.EXACT).plain)
            held = {str(s): crosser.held(s) for s in rounded}
            given = part.module(), part.own, part.vectors
            fed = Fed(names[crosser.saved], *given, trips, scheme, held)
            result.append((fed, (saved, *part.operands)))
    return result


class _Part:
    """The nodes between a tensor and the first gradients that it feeds."""

    def __init__(self, saved: fx.Node, recomputed: Set[str], gradients: Set[fx.Node]) -> None:
        self._saved, self._recomputed, self._gradients = saved, recomputed, gradients
        self._live = {saved}
        self._members: dict[fx.Node, None] = {}
        self._ends: dict[fx.Node, None] = {}
        self._results: dict[fx.Node, None] = {}
        """Of them: what the backward returns, whatever else reads it; that has ends of its own."""
        node = saved.next
        while node.op != "root" and len(self._members) <= _MOST:
            if any(given in self._live for given in node.all_input_nodes):
                self._visit(node)
            node = node.next

    def _visit(self, node: fx.Node) -> None:
        """``node`` reads something made of the tensor."""
        if node.op == "output":
            self._results = dict.fromkeys(n for n in node.all_input_nodes if n in self._live)
            self._end(self._results)
        elif node not in self._gradients:
            if node.name in self._recomputed and not makes_bool(node):  # masks cross without loss
                self._follow(node)
        elif self._joins(node):
            self._end(n for n in node.all_input_nodes if n in self._live)
        else:
            self._follow(node)
            product = node.args[0] if node.target is operator.getitem else node
            if _is_product(product) and isinstance(node.meta.get("val"), Tensor):
                self._end([node])
                self._live.discard(node)

    def _follow(self, node: fx.Node) -> None:
        self._members[node] = None
        self._live.add(node)

    def _end(self, nodes: Iterable[fx.Node]) -> None:
        self._ends.update(dict.fromkeys(n for n in nodes if n in self._gradients))

    def _joins(self, node: fx.Node) -> bool:
        """``node`` adds a gradient that has nothing to do with the tensor."""
        return node.target is aten.add.Tensor and any(
            n in self._gradients and n not in self._live for n in node.all_input_nodes
        )

    @property
    def ends(self) -> list[fx.Node]:
        """The gradients, if the part is small enough to be run."""
        few = len(self._members) <= _MOST
        return [n for n in self._ends if isinstance(n.meta.get("val"), Tensor)] if few else []

    @property
    def own(self) -> tuple[bool, ...]:
        """Of each end: it is a parameter's gradient."""
        return tuple(end in self._results or is_result(end) for end in self.ends)

    @property
    def vectors(self) -> tuple[bool, ...]:
        """Of each end: it is no matrix."""
        return tuple(is_vector(end.meta["val"]) for end in self.ends)

    @property
    def operands(self) -> list[fx.Node] | None:
        """What the part reads besides the tensor; None if some of it is no tensor."""
        known = {self._saved, *self._members}
        read = dict.fromkeys(g for n in self._members for g in n.all_input_nodes if g not in known)
        return list(read) if all(isinstance(n.meta.get("val"), Tensor) for n in read) else None

    def module(self) -> fx.GraphModule:
        """(the tensor, operands) -> the ends."""
        graph = fx.Graph()
        given = [self._saved, *(self.operands or ())]
        same = {node: graph.placeholder(node.name) for node in given}
        for node in self._members:
            same[node] = graph.node_copy(node, same.__getitem__)
        graph.output(tuple(same[end] for end in self.ends))
        return _runnable(graph)


def _round_trip(crosser: Crosser, scheme: Scheme) -> fx.GraphModule:
    """(a tensor as ``crosser`` saves it) -> as ``scheme`` restores it."""
    graph = fx.Graph()
    saved = graph.placeholder("saved")
    saved.meta = dict(crosser.saved.meta)
    output = graph.output(())
    emit = Emitter(graph, output, saved)
    stored = in_order(emit, saved)
    mask = None if scheme is scheme.plain else emit(aten.gt.Scalar, stored, 0)
    parts = pack(emit, stored, scheme, mask, sample=crosser.sample or ())
    output.args = (unpack(emit, parts, stored.meta["val"], scheme),)
    return _runnable(graph)


def _runnable(graph: fx.Graph) -> fx.GraphModule:
    """What arrives may have other strides than promised: a view may have to copy."""
    for node in graph.find_nodes(op="call_function", target=aten.view.default):
        node.target = aten.reshape.default
    graph.eliminate_dead_code()
    return fx.GraphModule({}, graph)


def _is_product(node: object) -> bool:
    if not isinstance(node, fx.Node):
        return False
    name = getattr(node.target, "__name__", "")
    attention = "attention" in name and "backward" in name
    return attention or is_product(node)
