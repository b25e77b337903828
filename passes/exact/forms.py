"""Forms of exact operators that are as exact and faster: which there are, where they apply.

Finding is read-only, choosing is ``plan``'s, and replacing does what the plan says.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from hot_compile.passes.base.emit import prims
from hot_compile.passes.base.graph import aten, module_path, value_of
from hot_compile.passes.exact import (
    few_rows,
    grouped,
    patches,
    permutations,
    pools,
    stems,
    weighted_rows,
)

log = logging.getLogger("hot_compile")


@dataclasses.dataclass(frozen=True)
class ExactForm:
    """One entry of ``EXACT_FORMS``."""

    name: str
    """What the operator becomes, for a reader of ``explain``."""
    target: Callable[[], Any]
    """The operator that has this form, or None where this torch has no such operator."""
    applies: Callable[[fx.Node], bool]
    """Whether a call of it can take the form. Read-only."""
    pays: Callable[[torch.Tensor, bool], str]
    """(what the call reads, whether fp32 products may use TF32) -> why the form is not faster or
    not as precise there; '' if it pays."""
    replace: Callable[[fx.Graph, fx.Node], bool]
    """Give the call its form, in place; False if nothing was there to replace after all."""
    saves: Callable[[fx.Node], float]
    """Seconds of a step an element of what the call reads, as measured on an H200 in bf16, or as
    timed on the call's own device; 0: it is not taken."""


def _measured_on_cuda(reads: torch.Tensor, tf32: bool) -> str:
    """'' where it was measured to be faster; else where it was not."""
    kind = reads.device.type
    return "" if kind == "cuda" else f"measured to be faster on CUDA only, not on {kind}"


EXACT_FORMS: tuple[ExactForm, ...] = (
    ExactForm(
        name="product over patches",
        target=lambda: aten.convolution.default,
        applies=patches.applies,
        pays=patches.pays,
        replace=patches.replace,
        saves=lambda _: 71e-12,
    ),
    ExactForm(
        name="dense convolution over blocks",
        target=lambda: aten.convolution.default,
        applies=stems.applies,
        pays=stems.pays,
        replace=stems.replace,
        saves=lambda _: 34e-12,
    ),
    ExactForm(
        name="grouped convolution by a gradient's kernel",
        target=lambda: aten.convolution.default,
        applies=grouped.applies,
        pays=_measured_on_cuda,
        replace=grouped.replace,
        saves=grouped.saves,
    ),
    ExactForm(
        name="pool's gradient gathered",
        # Inductor's operator, which is there once Inductor is, and may go; pools then stay.
        target=lambda: getattr(prims, "_low_memory_max_pool_offsets_to_indices", None),
        applies=pools.applies,
        pays=_measured_on_cuda,
        replace=pools.replace,
        saves=pools.saves,
    ),
    ExactForm(
        name="rows' weights by their layer's input",
        target=lambda: aten._grouped_mm.default,
        applies=weighted_rows.applies,
        pays=_measured_on_cuda,
        replace=weighted_rows.replace,
        saves=weighted_rows.saves,
    ),
    ExactForm(
        name="permutation's gradient gathered",
        target=lambda: aten.index_put.default,
        applies=permutations.applies,
        pays=_measured_on_cuda,
        replace=permutations.replace,
        saves=permutations.saves,
    ),
    ExactForm(
        name="sum of a few rows written out",
        target=lambda: aten.sum.dim_IntList,
        applies=few_rows.applies,
        pays=_measured_on_cuda,
        replace=few_rows.replace,
        saves=lambda _: 2e-12,
    ),
)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A call that can take an exact form."""

    form: ExactForm
    layer: str
    """Module path."""
    node: fx.Node
    reads: torch.Tensor
    """Fake value of what it reads."""
    tf32: bool
    """fp32 products may use TF32."""


@dataclasses.dataclass(frozen=True)
class FormDecision:
    """Whether a call gets its exact form, and why or why not."""

    layer: str
    form: str
    taken: bool
    reason: str
    seconds_won: float = 0.0
    """Of a step, as predicted."""


def candidates(graph: fx.Graph) -> list[Candidate]:
    """Every call of the joint graph that can take an exact form."""
    tf32 = torch.get_float32_matmul_precision() != "highest"
    found = []
    for form in EXACT_FORMS:
        packet = form.target()
        target = getattr(packet, "default", packet)
        nodes = graph.find_nodes(op="call_function", target=target) if target else ()
        for node in filter(form.applies, nodes):
            reads = value_of(node.args[0])
            found.append(Candidate(form, module_path(node) or node.name, node, reads, tf32))
    return found


def take(
    graph: fx.Graph, found: Iterable[Candidate], chosen: Iterable[FormDecision]
) -> tuple[FormDecision, ...]:
    """Give those of ``found`` their forms that ``chosen``, one for each, says; in place.

    Returns the decisions as carried out: what could not be built stays as it is, with the error as
    its reason.
    """
    done = tuple(_take(graph, c, d) for c, d in zip(found, chosen, strict=True))
    if any(decision.taken for decision in done):
        graph.eliminate_dead_code()
        graph.lint()
    return done


def _take(graph: fx.Graph, candidate: Candidate, decision: FormDecision) -> FormDecision:
    if not decision.taken:
        return decision
    try:
        if candidate.form.replace(graph, candidate.node):
            return decision
        reason = "its gradient is not computed in a known way"
    except Exception as error:  # what was built so far is right, or used by nobody
        log.warning("hot: %s stays as it is", decision.layer, exc_info=True)
        reason = f"could not be built: {type(error).__name__}: {error}"
    return dataclasses.replace(decision, taken=False, reason=reason)
