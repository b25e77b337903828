"""The pipeline: which steps there are and in which order. ``hooks.py`` runs them in Inductor.

A step is timed, counted and traced: ``TORCH_LOGS=hot_compile`` says in one line what each graph's
steps did, ``+hot_compile`` in one line a step, and with ``TORCH_TRACE`` tlparse shows every graph
that a step changed, the plan and what crosses.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Container, Mapping
from functools import cache
from pathlib import Path

from hot_compile.config import Memory
from hot_compile.passes.base.graph import value_of
from hot_compile.passes.base.schemes import Scheme
from hot_compile.passes.base.site import bytes_of
from hot_compile.passes.base.steps import Step
from hot_compile.passes.exact.attention import lay_out_alike
from hot_compile.passes.exact.casts import cast_together, count_together
from hot_compile.passes.exact.forms import candidates, take
from hot_compile.passes.exact.functions import shorten_functions
from hot_compile.passes.exact.image_gradients import lay_as_images
from hot_compile.passes.exact.kernels import keep_themselves
from hot_compile.passes.exact.pool_layout import lay_pools
from hot_compile.passes.exact.scalars import scale_behind
from hot_compile.passes.exact.signals import as_images
from hot_compile.passes.forward.rewrite import rewrite_forwards
from hot_compile.passes.head.rewrite import chunk_heads
from hot_compile.passes.layers.match import match
from hot_compile.passes.layers.rewrite import rewrite
from hot_compile.passes.layers.sums import add_as_made
from hot_compile.passes.measure.observe import observe, observe_gradients
from hot_compile.passes.measure.stored import storage_names
from hot_compile.passes.option_warnings import (
    idle_forward,
    idle_globs,
    idle_overrides,
    tell,
    unfit_heads,
)
from hot_compile.passes.plan import plan
from hot_compile.passes.profile.lqs import storage_verdict
from hot_compile.passes.profile.profile import StorageMeasure
from hot_compile.passes.stages import Joint, Partitioned
from hot_compile.passes.storage.advance import advance
from hot_compile.passes.storage.allowed import seconds_allowed
from hot_compile.passes.storage.choose import (
    Asked,
    Within,
    plan_storage,
    plan_within,
    usual_bits,
    worth_it,
)
from hot_compile.passes.storage.copies import copies_first, drop_ones, merge_copies
from hot_compile.passes.storage.crossers import Crosser, base, crossers, saved_pairs
from hot_compile.passes.storage.fit_budget import BudgetReport, Fit
from hot_compile.passes.storage.flat import work_out_flat
from hot_compile.passes.storage.kept_inputs import keep_inputs
from hot_compile.passes.storage.layout import all_lie_channels_last, lay_images
from hot_compile.passes.storage.offers import EXACT
from hot_compile.passes.storage.pieces import (
    join_part_by_part,
    restore_once_where_read_apart,
    work_out_in_pieces,
)
from hot_compile.passes.storage.predicted_peak import Rise, Room
from hot_compile.passes.storage.prices import StoragePrice
from hot_compile.passes.storage.probabilities import keep_as_multiplied
from hot_compile.passes.storage.step_time import step_time
from hot_compile.passes.storage.store import store
from hot_compile.passes.storage.take_back import take_back

log = logging.getLogger("hot_compile")

TOO_DEAR = "memory='auto': storing it would slow the step down; 'all' stores it"


@cache
def sources_hash() -> str:
    """Digest of this package's own source, so that an upgrade never hits an old cache entry."""
    digest = hashlib.sha256()
    root = Path(__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()


def _duration(joint: Joint) -> int:
    context, config = joint.context, joint.context.config
    if config.memory is Memory.AUTO and not config.has_budget:
        forced = config.min_gain == 0
        joint.step = step_time(joint.graph, context.rates, context.captured, forced)
        if context.timed is not None and not context.timed.waits_for_host:
            joint.step = context.timed
    return 0


def _heads(joint: Joint) -> int:
    context = joint.context
    observed = context.observation is not None
    joint.heads = chunk_heads(joint.graph, context.config, context.pricing, observed)
    return sum(head.chunked for head in joint.heads)


def _match(joint: Joint) -> int:
    joint.sites = match(joint.graph, joint.context.inputs)
    return len(joint.sites) + len(joint.heads)


def _candidates(joint: Joint) -> int:
    joint.found = candidates(joint.graph)
    return len(joint.found)


def _price(joint: Joint) -> int:
    devices = {site.device for site in joint.sites}
    joint.prices = {device: joint.context.pricing(device) for device in devices}
    timed = joint.context.timed
    if timed is not None and timed.waits_for_host:
        known = ((d, rates) for d, rates in joint.prices.items() if not isinstance(rates, str))
        joint.prices |= {device: rates.by_launch() for device, rates in known}
    return len(devices)


def _plan(joint: Joint) -> int:
    context = joint.context
    room = Room(joint.graph, context.config.memory is not Memory.OFF)
    args = (joint.sites, context.config, joint.prices, context.profile, joint.found, room)
    # reports say what was measured, also where storing does not heed it
    step = joint.step and (context.timed or joint.step)
    joint.plan = dataclasses.replace(plan(*args), heads=joint.heads, step=step, known=context.known)
    return len(joint.plan.rewritten)


def _warn_of_plan(joint: Joint) -> int:
    """Tell what the user's options ask of layers and cannot have."""
    asked = joint.context.asked or joint.context.config
    texts = [
        *idle_globs(joint.sites, asked, joint.heads),
        *idle_overrides(joint.sites, asked, joint.plan),
        *idle_forward(joint.sites, joint.plan),
        *unfit_heads(joint.heads),
    ]
    tell(texts)
    return len(texts)


def _rewrite(joint: Joint) -> int:
    pin = not joint.context.config.recompute
    done = rewrite(joint.graph, joint.sites, joint.plan.decisions, pin)
    joint.plan = dataclasses.replace(joint.plan, decisions=done)
    return len(joint.plan.rewritten)


def _forwards(joint: Joint) -> int:
    forwards = rewrite_forwards(joint.graph, joint.sites, joint.plan.forwards)
    joint.plan = dataclasses.replace(joint.plan, forwards=forwards)
    return sum(forward.int8 for forward in forwards)


def _exact_forms(joint: Joint) -> int:
    forms = take(joint.graph, joint.found, joint.plan.exact_forms)
    joint.plan = dataclasses.replace(joint.plan, exact_forms=forms)
    return sum(form.taken for form in forms)


def _signals(joint: Joint) -> int:
    if not joint.context.config.exact_forms:
        return 0
    return as_images(joint.graph, joint.context.rates)


def _copies(joint: Joint) -> int:
    if joint.context.config.memory is Memory.OFF:
        return 0
    return sum(f(joint.graph) for f in (merge_copies, drop_ones, copies_first))


def _observe(joint: Joint) -> int:
    assert joint.context.observation is not None
    plan, observation = joint.plan, joint.context.observation
    observe(joint.graph, joint.sites, observation, plan, plan.forwards)
    observe_gradients(joint.graph, joint.context.inputs.parameters, joint.context.observation)
    return len(joint.sites)


def _layouts(cut: Partitioned) -> int:
    halves = cut.forward, cut.backward
    return lay_images(*halves, cut.num_fwd_outputs, cut.context.rates, cut.forms)


def _inputs(cut: Partitioned) -> int:
    """Where min-cut was free to make layers' inputs again."""
    if cut.by_user or cut.step is None or not (cut.stores and cut.context.config.recompute):
        return 0
    most = _allowed(cut) - cut.spent
    kept, again = keep_inputs(*cut.graphs, cut.num_fwd_outputs, cut.context.rates, most)
    cut.spent += again
    return kept


def _allowed(cut: Partitioned) -> float:
    """Seconds that making again and storing may take a step in all."""
    assert cut.plan is not None
    assert cut.step is not None
    won = cut.plan.seconds_won, cut.plan.seconds_won_by_forms
    graphs = cut.graphs if cut.context.config.exact_forms else ()
    return seconds_allowed(cut.step, *won, graphs, cut.context.rates)


def _advance(cut: Partitioned) -> int:
    config = cut.context.config
    if not cut.stores or cut.fits:
        return 0
    given = (*cut.graphs, cut.num_fwd_outputs)
    judge = cut.judge()
    kept = 0 if config.has_budget else keep_as_multiplied(*given, judge)
    judge = cut.judge() if kept else judge  # of the graphs as they are now
    cut.before = frozenset(saved.name for saved, _ in saved_pairs(*given))
    only_stored = config.has_budget or config.memory is Memory.PAPER or cut.by_user
    cut.advanced = advance(*given, judge, wider=not only_stored)
    return kept + len(cut.advanced)


def _take_back(cut: Partitioned) -> int:
    if cut.fit is not None or cut.by_user or not cut.advanced:
        return 0
    given = (*cut.graphs, cut.num_fwd_outputs)
    stored = {crosser.saved for crosser in (*cut.chosen, *cut.hosted)}
    known = {crosser.saved for crosser in cut.found}
    before = frozenset[str]() if cut.context.config.has_budget else cut.before  # it counts bytes
    taken = take_back(*given, cut.advanced.keys(), stored, before)
    cut.found = [crosser for crosser in cut.found if crosser.saved not in taken]
    judge = cut.judge()  # of the graphs as they are now
    again = [judge(*pair) for pair in saved_pairs(*given) if pair[0] not in known]
    cut.found += (dataclasses.replace(c, schemes=EXACT, reason=c.reason or TOO_DEAR) for c in again)
    return len(taken)


def _crossers(cut: Partitioned) -> int:
    found = crossers(*cut.graphs, cut.num_fwd_outputs, cut.judge())
    saved = {crosser.name for crosser in found}
    before = (node for node in cut.forward.graph.nodes if node.name in cut.before)
    whole = {node.name: bytes_of(value_of(node)) for node in before}
    otherwise = {n: whole[name] for n, name in cut.advanced.items() if name not in saved}
    cut.found = [dataclasses.replace(c, otherwise=otherwise.get(c.name)) for c in found]
    return len(cut.found)


def _plan_storage(cut: Partitioned) -> int:
    if cut.plan is not None and (cut.stores or cut.fit is not None):
        by_launch = cut.step is not None and cut.step.waits_for_host
        config, price = cut.context.config, cut.context.storage_prices(cut.found, by_launch)
        cut.names = _names(cut)
        measured = _measured(cut)
        cut.asked = _asked(cut, measured)
        won = cut.plan.seconds_won
        if cut.fit is None:
            every = plan_storage(cut.found, config, price, won, measured, cut.asked)
            cut.chosen = every
            if cut.step is not None:
                cut.chosen = worth_it(every, price, _allowed(cut) - cut.spent)
            cut.too_dear = every.keys() - cut.chosen.keys()
        else:
            _within(cut, cut.fit, price, measured)
        cut.verdicts = {c: _why(cut, c, measured.get(c)) for c in cut.names}
        cut.verdicts |= dict.fromkeys(cut.too_dear, TOO_DEAR)
        exact = cut.asked.keys() - cut.chosen.keys()
        alone = {base(c.saved) for c in cut.found if c.reason or c in exact}
        beside = [c for c in cut.found if base(c.saved) in alone and not (c.reason or c in exact)]
        cut.verdicts |= dict.fromkeys(beside, "shares memory with what stays exact")
        cut.seconds = {c: price(c, scheme) for c, scheme in cut.chosen.items()}
        away = cut.context.host_prices(cut.found)
        for c in cut.hosted:
            way = away(c, cut.chosen.get(c, Scheme.EXACT))
            cut.seconds[c] = (cut.seconds.get(c) or 0.0) + (way or 0.0)
    return len(cut.seconds)


def _within(
    cut: Partitioned,
    fit: Fit,
    price: StoragePrice,
    measured: Mapping[Crosser, Mapping[str, StorageMeasure]],
) -> None:
    """What to store so that the step stays within its budget; says how that is met."""
    context, may = cut.context, cut.context.allowance
    assert may is not None
    rise = Rise(*cut.graphs, cut.num_fwd_outputs, context.restores(cut.found))
    within = Within({}, fit.rise, fit.above)
    if fit.stores:
        counted = rise.held if may.between else rise
        others = price, measured, cut.asked, context.host_prices(cut.found)
        within = plan_within(cut.found, context.config, counted, may.rise, *others)
    cut.chosen, cut.hosted = within.chosen, within.hosted
    cut.met = BudgetReport(
        asked=may.asked,
        standing=may.standing,
        to_come=may.to_come,
        rise=rise(cut.chosen, cut.hosted),
        held=rise.held(cut.chosen, cut.hosted),
        most=fit.most,
        above=max(within.above, fit.above) if within.above == within.rise else within.above,
        least=within.least,
        recomputed=fit.recomputed,
        stored=len(cut.chosen),
        hosted=len(cut.hosted),
        between=may.between,
    )


def _names(cut: Partitioned) -> dict[Crosser, str]:
    """What profiles and options call the tensors that cross, if there are any."""
    context = cut.context
    if not (context.config.memory_override or (context.profile and context.profile.storage)):
        return {}
    names = storage_names(cut.forward.graph)
    return {c: names[c.saved] for c in cut.found if c.saved in names}


def _measured(cut: Partitioned) -> dict[Crosser, Mapping[str, StorageMeasure]]:
    """What the profile knows of the tensors that cross."""
    known = cut.context.profile.storage if cut.context.profile else {}
    return {c: known[name] for c, name in cut.names.items() if known.get(name)}


def _asked(cut: Partitioned, measured: Container[Crosser]) -> dict[Crosser, Asked]:
    """What options, or a monitor, ask of tensors that might be stored otherwise."""
    config, found = cut.context.config, dict[Crosser, Asked]()
    for crosser, name in cut.names.items():
        asked, usual = config.asked_of(name) or 0, usual_bits(config, crosser in measured)
        lossy = [s for s in crosser.measurable if s not in (Scheme.EXACT, Scheme.BITS)]
        if isinstance(asked, str):
            found |= {crosser: Scheme(asked)} if lossy else {}
        elif any(usual <= s.spec.bits < asked for s in lossy if not s.spec.around):
            found[crosser] = asked
    return found


def _why(cut: Partitioned, crosser: Crosser, measured: Mapping[str, StorageMeasure] | None) -> str:
    """What was measured of a tensor, and who asked for its bits; '' if nothing and nobody."""
    scheme, config = cut.chosen.get(crosser, Scheme.EXACT).plain, cut.context.config
    texts = [storage_verdict(scheme, measured, config)] if measured else []
    if crosser in cut.asked:
        raised = cut.context.raised.get(cut.names[crosser])
        texts.append(f"monitor: {raised}" if raised else "memory_override")
    return "; ".join(filter(None, texts))


def _store(cut: Partitioned) -> int:
    cut.stored = store(*cut.graphs, cut.num_fwd_outputs, cut.chosen, cut.hosted)
    return len(cut.stored)


def _functions(cut: Partitioned) -> int:
    """Where something is stored: functions are worked out in each kernel that restores it."""
    if not (cut.stores and cut.context.config.exact_forms):
        return 0
    return sum(map(shorten_functions, cut.graphs))


def _pieces(cut: Partitioned) -> int:
    """On a GPU, where it saves reading a tensor twice; a CPU's caches hold what was just read."""
    schemes = {c.saved: s for c, (s, _) in cut.stored.items() if c.saved.meta["val"].is_cuda}
    ahead = work_out_in_pieces(cut.forward.graph, schemes)
    back = join_part_by_part, restore_once_where_read_apart, work_out_flat
    return ahead + sum(work(cut.backward.graph) for work in back)


def _casts(cut: Partitioned) -> int:
    if not cut.forms:
        return 0
    return sum(map(cast_together, cut.graphs)) + count_together(cut.forward.graph)


def _scalars(cut: Partitioned) -> int:
    if not cut.forms:
        return 0
    return scale_behind(cut.backward.graph, cut.context.rates)


def _gradients(cut: Partitioned) -> int:
    last = cut.forms and all_lie_channels_last(cut.forward.graph)
    laid = lay_as_images(cut.backward.graph) if last else 0
    return laid + lay_pools(cut.backward.graph, last)


def _kernels(cut: Partitioned) -> int:
    return 0 if cut.plan is None else keep_themselves(cut.forward.graph)


HEADS: tuple[Step[Joint], ...] = (Step("duration", _duration), Step("heads", _heads))
"""On the joint graph, before anything else: a head that goes in chunks is no layer any more."""

JOINT: tuple[Step[Joint], ...] = (
    Step("match", _match, needed=True),
    Step("candidates", _candidates),
    Step("price", _price),
    Step("plan", _plan),
    Step("warn", _warn_of_plan),
    Step("rewrite", _rewrite, changes=True),
    Step("forwards", _forwards, changes=True),
    Step("exact_forms", _exact_forms, changes=True),
    Step("signals", _signals, changes=True),
    Step("copies", _copies, changes=True),
)
"""On the joint graph of forward and backward. What is not ``changes`` only reads it."""

OBSERVED: tuple[Step[Joint], ...] = (
    Step("match", _match, needed=True),
    Step("price", _price),
    Step("plan", _plan),
    Step("warn", _warn_of_plan),
    Step("observe", _observe, changes=True),
)
"""The same where calibration or a monitor looks on: the graph stays exact."""

PARTITIONED: tuple[Step[Partitioned], ...] = (
    Step("layouts", _layouts),
    Step("inputs", _inputs, changes=True),
    Step("advance", _advance, changes=True),
    Step("crossers", _crossers),
    Step("plan_storage", _plan_storage),
    Step("take_back", _take_back, changes=True),
    Step("store", _store, changes=True),
    Step("functions", _functions, changes=True),
    Step("pieces", _pieces, changes=True),
    Step("sums", lambda cut: add_as_made(cut.backward.graph), changes=True),
    Step("casts", _casts, changes=True),
    Step("scalars", _scalars, changes=True),
    Step("gradients", _gradients, changes=True),
    Step("attention", lambda cut: lay_out_alike(cut.backward.graph), changes=True),
    Step("kernels", _kernels, changes=True),
)
"""On the forward and the backward that min-cut made."""

CROSSING = PARTITIONED[:5]
"""Those of them that find out what crosses, and how it is to be stored."""
