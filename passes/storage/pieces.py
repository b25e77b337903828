"""Values that are worked out in the kernels that pack, and joined in those that restore.

A group whose elements share bytes is packed in pieces (``pack.py``), another order of loops than
that of an activation of the same tensor: on a GPU that were two kernels, each of which reads it.
Worked out in the same pieces both are one. Only there: a CPU's caches hold what was just read.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, fx

from hot_compile.passes.base.emit import Emitter
from hot_compile.passes.base.graph import IMAGE_DIMS, aten, strip, through_views, walk
from hot_compile.passes.base.operators import CASTS, RESHAPES, SPLITS, VIEWS, is_pointwise
from hot_compile.passes.base.schemes import Scheme, Unit
from hot_compile.passes.base.site import elements_of
from hot_compile.passes.storage.layout import Layout, layout_of
from hot_compile.passes.storage.pack import in_pieces
from hot_compile.passes.storage.prices import fuses
from hot_compile.runtime import pieces
from hot_compile.runtime.planes import RESTORING

SIDE_BY_SIDE = torch.ops.hot.side_by_side.default
_MOST_OPERATIONS = 24
"""Elementwise operators of a result: it is worked out once a piece, in one kernel."""
_FOLLOWED = VIEWS | CASTS
RESHAPED = RESHAPES | {aten.alias.default}
_READ = VIEWS | {
    aten.cat.default,
    aten.constant_pad_nd.default,
    aten.select_scatter.default,
    aten.slice_scatter.default,
}
_DECODED = RESTORING - {torch.ops.hot.restored_bits.default}
"""A mask's bit is found in two instructions."""
_SPREAD = 4
"""Times that it takes as long to restore an element as to write and read it."""
_READ_AS = VIEWS | SPLITS.keys() | {operator.getitem}


def work_out_in_pieces(forward: fx.Graph, stored: Mapping[fx.Node, Scheme]) -> int:
    """Rewrite what is made of ``stored`` tensors, by their schemes; returns how many results."""
    count = 0
    kinds: dict[tuple[Any, ...], list[fx.Node]] = {}
    for node, scheme in stored.items():
        if kind := _kind(node, scheme):
            kinds.setdefault(kind, []).append(node)
    for (scheme, *_), alike in kinds.items():
        region = _region(forward, alike)
        for result in _results(region, set(alike)):
            pieces.lowered()
            _rewrite(forward, result, region, alike, scheme)
            count += 1
    if count:
        forward.eliminate_dead_code()
    return count


def join_part_by_part(backward: fx.Graph) -> int:
    """Write each part of what is joined, and made of the same tensors, on its own; returns how many
    are.

    The gradient of a GLU's halves (``x, gate = y.chunk(2, -1)``). Inductor goes over it as a whole,
    and reads or restores for each element what either half needs: 186 instructions an element of a
    Phi-3's. Part by part it does so once, and what else is made of the same, as the input of the
    product behind the GLU, goes into the same kernel.
    """
    count = 0
    for cat in backward.find_nodes(op="call_function", target=aten.cat.default):
        parts, dim = cat.args[0], cat.args[1] if len(cat.args) > 1 else 0
        whole = cat.meta["val"]
        alike = {(part.meta["val"].dtype, part.meta["val"].dim()) for part in parts}
        plain = alike == {(whole.dtype, whole.dim())} and len(set(parts)) == len(parts) > 1
        if whole.is_cuda and plain and _made_of_the_same(cat, parts):
            pieces.lowered()
            joined = Emitter(backward, cat.next, cat)(SIDE_BY_SIDE, list(parts), dim)
            cat.replace_all_uses_with(joined)
            backward.erase_node(cat)
            count += 1
    return count


def restore_once_where_read_apart(backward: fx.Graph) -> int:
    """Write to memory what is restored and then read several times an element, or in an order that
    is not its own; returns how many.

    Several times: by a broadcast along another tensor's dimension, or as a part that is put into a
    whole. Inductor restores it in the kernel that reads it, for each element of the whole: of a
    scan's 32 steps all were restored for the gradient of each one (Falcon-Mamba: 1.4 ms for stock's
    0.18 of a kernel). In another order: each plane is read a byte or two from every line of memory,
    where it is written out one tensor is (gMLP: 4.1 ms for stock's 1.6).
    """
    count = 0
    for node in list(backward.nodes):
        if node.target not in _DECODED:
            continue
        value = _as_read(node)
        kept = value.meta["val"]
        if kept.is_cuda and known(kept) and kept.is_contiguous() and _is_read_apart(value):
            readers = list(value.users)
            read = Emitter(backward, value.next, value).from_memory(value)
            for reader in readers:
                reader.replace_input_with(value, read)
            count += 1
    return count


def known(value: Tensor) -> bool:
    """Its sizes are, as it is compiled."""
    return all(isinstance(size, int) for size in value.shape)


def _as_read(restored: fx.Node) -> fx.Node:
    """In the dtype in which it is read: its cast, if there is just one."""
    node = restored
    while len(node.users) == 1:
        (node,) = node.users
        if node.target in CASTS:
            return node
        if node.target not in RESHAPED:
            break
    return restored


def _is_read_apart(value: fx.Node) -> bool:
    """Something that Inductor fuses with it has several elements for each of its own, or goes over
    them in another order."""
    size = value.meta["val"].numel()

    def readers(node: fx.Node) -> Iterator[fx.Node]:
        if size < 2 * node.meta["val"].numel() <= 2 * size:  # what a product was padded by is cut
            yield from filter(_reads_element_by_element, node.users)

    reached = walk([value], readers)
    spread = any(node.meta["val"].numel() >= _SPREAD * size for node in reached)
    return spread or any(is_pointwise(node) and _turns(node, reached) for node in reached)


def _turns(node: fx.Node, reached: Set[fx.Node]) -> bool:
    """It reads what is ``reached`` transposed, beside a tensor that is not.

    Of images fakes do not tell in what order they lie.
    """
    whole = node.meta["val"]
    if not 0 < whole.dim() < IMAGE_DIMS:
        return False
    read = {n: n.meta.get("val") for n in node.all_input_nodes}
    full = {n: v for n, v in read.items() if isinstance(v, Tensor) and v.shape == whole.shape}
    turned = [n for n, v in full.items() if v.shape[-1] > 1 and v.stride(-1) > 1]
    return any(n in reached for n in turned) and any(v.is_contiguous() for v in full.values())


def _reads_element_by_element(node: fx.Node) -> bool:
    value = node.meta.get("val")
    fuses_it = is_pointwise(node) or node.target in _READ
    return fuses_it and isinstance(value, Tensor) and known(value)


def _made_of_the_same(cat: fx.Node, parts: Sequence[fx.Node]) -> bool:
    """By elementwise operators: of what is restored, or, where no kernel of Inductor's reads them
    joined, of one tensor."""
    sources = list(map(_sources, parts))
    if all(any(n.target in RESTORING for n in read) for read in sources):
        return True
    alike = len({elements_of(part.meta["val"]) for part in parts}) == 1
    written = not any(map(_fused, through_views(cat)))
    return alike and written and bool(set.intersection(*sources))


def _sources(part: fx.Node) -> set[fx.Node]:
    """Tensors, at least as large, that ``part`` is worked out of element by element; none where it
    is not."""
    made = strip(part, _FOLLOWED)
    if not is_pointwise(made):
        return set()
    size = elements_of(made.meta["val"])
    reached = walk([made], lambda n: n.all_input_nodes if _goes_on(n) else ())
    ends = (n for n in reached if not (_goes_on(n) or _is_number(n)))
    return {n for n in ends if elements_of(n.meta["val"]) >= size}


def _goes_on(node: fx.Node) -> bool:
    return node.target in _READ_AS or is_pointwise(node)


def in_groups(scheme: Scheme) -> bool:
    """Groups of the tensor itself are packed, whole or in pieces."""
    return scheme.spec.unit is Unit.GROUP and scheme is scheme.plain and not scheme.spec.around


def _kind(node: fx.Node, scheme: Scheme) -> tuple[Any, ...] | None:
    """What tensors that are packed by one kernel have in common; None: not in pieces of memory."""
    value = node.meta["val"]
    if not in_groups(scheme) or fuses(node):
        return None
    layout = _layout(node, scheme)
    plain = value.is_contiguous() and layout.cut[2] == 1
    return (scheme, tuple(value.shape), value.device) if plain and known(value) else None


def _layout(node: fx.Node, scheme: Scheme) -> Layout:
    layout = layout_of(node.meta["val"], scheme)
    assert isinstance(layout, Layout), layout
    return layout


def _region(graph: fx.Graph, given: list[fx.Node]) -> dict[fx.Node, int]:
    """All that is worked out element by element of ``given`` and of single numbers, with how many
    operators it takes."""
    size = given[0].meta["val"].numel()
    found = dict.fromkeys(given, 0)
    for node in graph.nodes:
        sources = [n for n in node.all_input_nodes if not _is_number(n)]
        if node in found or not sources or not all(n in found for n in sources):
            continue
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or value.numel() != size:
            continue
        if node.target in RESHAPED:
            found[node] = found[sources[0]]
        elif is_pointwise(node) and value.is_contiguous():
            found[node] = 1 + sum(found[n] for n in sources)
    return found


def _is_number(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return not isinstance(value, Tensor) or value.dim() == 0


def _results(region: Mapping[fx.Node, int], given: Set[fx.Node]) -> Iterator[fx.Node]:
    """What libraries read of the region, and nothing else does."""
    for node, operators in list(region.items()):
        if node in given or node.target in RESHAPED or not 0 < operators <= _MOST_OPERATIONS:
            continue
        readers = set(through_views(node))
        if readers and not any(reader in region or _fused(reader) for reader in readers):
            yield node


def _fused(reader: fx.Node) -> bool:
    return reader.op == "output" or fuses(reader)


def _rewrite(
    graph: fx.Graph,
    result: fx.Node,
    region: Mapping[fx.Node, int],
    given: Sequence[fx.Node],
    scheme: Scheme,
) -> None:
    """Work out ``result`` in as many pieces as ``given`` are packed in by ``scheme``."""
    emit, count = Emitter(graph, result.next, result), scheme.spec.pieces
    needed = walk(
        [result], lambda n: () if n in given else (m for m in n.all_input_nodes if m in region)
    )
    cut = {n: in_pieces(emit, n, _layout(n, scheme), scheme) for n in given if n in needed}
    done = []
    for place in range(count):
        own = {node: parts[place] for node, parts in cut.items()}
        for node in region:
            if node not in needed or node in own:
                continue
            if node.target in RESHAPED:
                own[node] = own[node.all_input_nodes[0]]
            else:
                args, kwargs = fx.map_arg((node.args, node.kwargs), _among(own))
                own[node] = emit(node.target, *args, **kwargs)
        done.append(own[result])
    whole = done[0] if count == 1 else emit(SIDE_BY_SIDE, done, -2)
    shape = list(result.meta["val"].shape)
    result.replace_all_uses_with(emit(aten.view.default, whole, shape))


def _among(own: Mapping[fx.Node, fx.Node]) -> Callable[[fx.Node], fx.Node]:
    """What takes a node's place: its own, or the node itself."""
    return lambda node: own.get(node, node)
