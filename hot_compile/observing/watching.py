"""A compiled graph whose gradients are compared with exact ones; the training gets its own.

A watched step is a usual one. Beside its backward, an exact twin of the graph runs forward and
backward on the same inputs, tangents and random state; its backward shows every layer's operands to
an observer, which is also told how far the usual gradients, with all that was rewritten and stored
compressed, are from the twin's. The twin runs before the usual backward where what that has stored
is less than the gradients it makes, else after it, when what it stored is freed: so both together
take no more memory than an exact step. Of the twin's gradients only sketches are kept. It is
compiled like any other graph, when it is first wanted. Whatever fails in it ends the watching of
this graph with one warning; the step gets its gradients all the same. They are replaced in one
case: where the step's are infinite or NaN, and exact ones are not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch.autograd.graph import Node

from hot_compile.again import (
    Again,
    apart,
    compiled_for,
    compiled_node,
    differentiable,
    hooked,
    samples_of,
)
from hot_compile.memory import saved_by, storage_bytes
from hot_compile.observing.eager import Eager
from hot_compile.observing.walk import TooLarge
from hot_compile.passes.measure.observe import Observation, Observer
from hot_compile.passes.measure.sketch import sketch

log = logging.getLogger("hot_compile")

_SHAPES = 4
"""The twin is compiled for static shapes; steps of more shapes than this are not watched."""
_OTHERS = 0.1
"""Gradients that differ by more than this, by median, are of other random numbers."""
_AS_NEAR = 2.0
"""So many times as far from exact outputs as exact code with autocast is a step may be."""
Compile = Callable[[fx.GraphModule, Sequence[Any], Observation], Callable[..., Any]]
"""(Dynamo's graph, example inputs, who is shown the layers) -> compiled function."""


class Exact(Protocol):
    """Code that computes a graph exactly, for the shapes of some inputs."""

    @property
    def mutated(self) -> frozenset[int]:
        """Places of the inputs that it changes."""

    def gradients(
        self, step: Again, tangents: Mapping[int, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """(how far its outputs are from the step's, sketches of gradients by parameter).

        Args:
            step: what is done again. tangents: gradients of the outputs at these places.
        """

    def whole(self, step: Again, tangents: Mapping[int, Tensor]) -> Mapping[str, Tensor]:
        """The gradients themselves, by parameter, as far as it can give them."""


class Miscompiled(RuntimeError):
    """Compiled exact code computes something else than the graph does, operator by operator."""


@dataclasses.dataclass(frozen=True)
class _Code:
    """An exact twin, compiled for the shapes of some inputs."""

    run: Callable[..., Any]
    mutated: frozenset[int]
    observation: Observation
    """Kept alive: its graph knows it by number only."""

    def gradients(
        self, step: Again, tangents: Mapping[int, Tensor], most: float | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """As :class:`Exact` has it.

        Raises:
            Miscompiled: its outputs are ``most`` or further from the step's.
        """
        self.observation.taken()
        inputs, outputs = step.run(self.run)
        deviation = step.deviation(samples_of(outputs))
        if most is not None and not float(deviation) < most:
            raise Miscompiled(f"its outputs differ by {float(deviation):.2g}")
        ends = [outputs[place] for place in tangents]
        del outputs
        leaves = [a for a in inputs if differentiable(a)]
        torch.autograd.grad(ends, leaves, list(tangents.values()), allow_unused=True)
        return deviation, self.observation.taken()

    def whole(self, step: Again, tangents: Mapping[int, Tensor]) -> Mapping[str, Tensor]:
        """None: its graph returns no gradients, but shows them one by one."""
        return {}


class Twin:
    """The exact twin of one of Dynamo's graphs, compiled for the inputs it is asked for."""

    def __init__(
        self,
        gm: fx.GraphModule,
        compile_graph: Compile,
        observer: Observer,
        room: Callable[[Sequence[Any]], None] | None = None,
    ) -> None:
        """``gm``: is kept, and must be nobody else's: compiling changes graphs in place.

        ``room`` raises where there is too little memory for it beside such inputs.
        """
        self._room = room
        self._gm = gm
        self._compile = compile_graph
        self._observer = observer
        self._codes: dict[tuple[bool, object], _Code] = {}

    def code(self, args: Sequence[Any]) -> _Code | None:
        """The twin for inputs such as ``args``; None if there are too many shapes to compile for.

        Another one where the observer wants to be shown what crosses, too.

        Raises whatever compiling it raises, and what ``room`` does.
        """
        if self._room:
            self._room(args)
        shapes = tuple(
            (a.shape, a.stride(), a.requires_grad) if isinstance(a, Tensor) else a for a in args
        )
        key = self._observer.wants_stored, shapes
        alike = [known for known in self._codes if known[0] == key[0]]
        if key not in self._codes and len(alike) < _SHAPES:
            self._codes[key] = self._compiled(args)
        return self._codes.get(key)

    def _compiled(self, args: Sequence[Any]) -> _Code:
        observation = Observation(self._observer)

        def compile_graph(gm: fx.GraphModule, fakes: Sequence[Any]) -> Callable[..., Any]:
            return self._compile(gm, fakes, observation)

        return _Code(*compiled_for(self._gm, args, compile_graph), observation)


class Doubled:
    """A twin that costs nothing to compile, and beside it, where there is a doubt, a thorough one.

    There is one if something is to blame, or if the former fails (functorch's transforms), or its
    outputs are not the step's: in bf16, what rounds between operators may be far from what rounds
    once a kernel. What both twins differ by is what no exact computation can tell.

    In bf16 or fp16 the same operators in fp32 tell that as well, and nothing is compiled for them:
    then the thorough twin only shows layers.
    """

    mutated: frozenset[int]
    """As of :class:`Exact`."""

    def __init__(
        self,
        quick: Eager,
        thorough: Sequence[Twin],
        observer: Observer,
        guesses: bool = False,
        shows: Sequence[Twin] = (),
    ) -> None:
        """``thorough``: the first that runs, and is right, counts. ``guesses``: the other may be
        mistaken in what random numbers a step draws; then it is not asked again. ``shows``:
        those that only show layers, where the step is done in fp32 as well."""
        self._quick = quick
        self._thorough = list(thorough)
        self._shows = list(shows)
        self._observer = observer
        self._guesses, self._mistaken = guesses, False
        self.mutated = quick.mutated

    def code(self, args: Sequence[Any]) -> Exact | None:
        """As :class:`Twin` has it."""
        return self

    def gradients(
        self, step: Again, tangents: Mapping[int, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """As :class:`Exact` has it."""
        wants_stored, doubts = self._observer.wants_stored, self._observer.doubts
        if self._mistaken:
            return self._surely(step, tangents, None, self._thorough)
        try:
            with step.random.again():
                deviation, other = self._quick.gradients(step, tangents)
        except (torch.OutOfMemoryError, TooLarge):
            raise
        except Exception:
            log.debug("hot: a graph does not run operator by operator", exc_info=True)
            self._mistaken = True
            return self._surely(step, tangents, None, self._thorough)
        off = float(deviation) >= self._observer.same  # rounded between its operators, perhaps
        self._mistaken = self._guesses and off
        finer = None
        if self._shows and (off or wants_stored or doubts):
            finer = self._in_full(step, tangents, other)
        if finer is None and not (off or wants_stored):
            return deviation, other
        if finer is not None:
            if wants_stored:
                with step.random.again():
                    self._surely(step, tangents, None, self._shows)
            return finer
        try:
            with step.random.again():
                most = None if off else self._observer.same
                thorough, exact = self._surely(step, tangents, most, self._thorough)
        except Miscompiled:
            log.debug("hot: no compiled twin computes what a step does", exc_info=True)
            return deviation, other
        differences = {name: other[name] - exact[name] for name in other.keys() & exact.keys()}
        self._mistaken |= self._guesses and _median(differences, exact) > _OTHERS
        if self._mistaken:
            log.debug("hot: an exact twin drew other random numbers than its step")
            return thorough, exact
        for name, difference in differences.items():
            self._observer.uncertain(name, difference)
        return thorough, exact

    def whole(self, step: Again, tangents: Mapping[int, Tensor]) -> Mapping[str, Tensor]:
        """As :class:`Exact` has it."""
        return {} if self._mistaken else self._quick.whole(step, tangents)

    def _in_full(
        self, step: Again, tangents: Mapping[int, Tensor], other: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]] | None:
        """As ``gradients``, in fp32; ``other``: as the step is. What both differ by is rounding.

        None where that cannot be done, or the step is not what they compute. Its outputs are if
        they are as near to these as those of ``other``.
        """
        rounded, same = self._quick.samples, self._observer.same
        try:
            with step.random.again(), step.in_full():
                off, exact = self._quick.gradients(step, tangents)
        except (torch.OutOfMemoryError, TooLarge) as error:
            log.debug("hot: no memory for a step in fp32: %s", error)
            return None
        except Exception:
            log.debug("hot: a graph does not run in fp32", exc_info=True)
            self._shows = []
            return None
        rounding = float(apart(rounded, self._quick.samples))
        if not float(off) < max(same, _AS_NEAR * rounding):
            log.debug("hot: a step in fp32 is %.3g off, rounding %.3g", off, rounding)
            return None
        for name in other.keys() & exact.keys():
            self._observer.uncertain(name, other[name] - exact[name])
        return torch.zeros_like(off), exact

    def _surely(
        self, step: Again, tangents: Mapping[int, Tensor], most: float | None, twins: list[Twin]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """By the first of ``twins`` that runs, and is less than ``most`` off.

        It may be miscompiled where the step is not: of other kernels.
        """
        self._quick.in_one_piece(step.args, step.coming)
        while True:
            try:
                with step.modes():  # it may be compiled here
                    code = twins[0].code(step.args)
                if code is None:
                    raise RuntimeError("steps are of too many shapes")
                return code.gradients(step, tangents, most)
            except torch.OutOfMemoryError:
                raise
            except Exception:
                if len(twins) == 1:
                    raise
                log.debug("hot: a twin does not run node by node", exc_info=True)
                twins.pop(0)


def _median(differences: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    """Of relative differences; 0 of none."""
    found = [float(d.norm()) / (float(exact[n].norm()) or 1.0) for n, d in differences.items()]
    return statistics.median(found) if found else 0.0


class Watch:
    """A compiled graph, each forward and backward of which is watched while nothing fails."""

    def __init__(
        self,
        usual: Callable[..., Any],
        exact: Twin | Eager | Doubled,
        names: Sequence[str | None],
        observer: Observer,
    ) -> None:
        """``names``: of the graph's inputs that are parameters."""
        self.usual = usual
        """The same, unwatched."""
        self._twin = exact
        self._names = names
        self._observer = observer
        self._deviations: list[Tensor] = []

    def __call__(self, *args: Any) -> Any:
        """One forward of the usual graph; what it returns is just what that does."""
        self.check_outputs()
        if self._observer.problem is not None:
            return self.usual(*args)
        look = None
        with self.telling("the exact twin of a graph could not be compiled"):
            code = self._twin.code(args)
            look = None if code is None else _Look(code, args)
        outputs = self.usual(*args)
        if look is None:
            return outputs
        with self.telling("a step could not be watched"):
            look.attach(outputs, self._names, self._rerun, self._compare)
        return outputs

    @contextlib.contextmanager
    def telling(self, what: str) -> Iterator[None]:
        """What is raised inside costs the look, or all looks, and no step."""
        try:
            yield
        except (torch.OutOfMemoryError, TooLarge) as error:
            self._observer.short(str(error))  # the error's frames hold tensors
        except Exception as error:
            self._observer.failed(what, error)

    def _rerun(self, look: _Look) -> None:
        """Run the twin; called before or after a usual backward."""
        with self.telling("the exact twin of a step could not be run"):
            look.rerun()

    def _compare(self, look: _Look, usual: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Tell the observer how far gradients are from the twin's; called after both backwards.

        Returns exact gradients, by parameter, where the usual ones are not finite and these are.
        """
        if look.deviation is None:
            return {}
        self._deviations.append(look.deviation)
        lost: dict[str, Tensor] = {}
        for name, want in look.exact.items():
            if name in usual:
                want = torch.where(look.deviation < self._observer.same, want, torch.nan)
                got = sketch(usual[name])
                self._observer.gradient(name, got, want)
                lost[name] = want.isfinite().all() & ~got.isfinite().all()
        with self.telling("exact gradients could not take the place of others"):
            return look.instead(lost)
        return {}

    def check_outputs(self) -> None:
        """Tell the observer if a twin's outputs were not the step's; waits for the device."""
        pending, self._deviations = self._deviations, []
        worst = max((float(deviation) for deviation in pending), default=0.0)
        if worst >= self._observer.same:
            self._observer.differs(worst)


class _Look:
    """One watched step: what the twin needs to do the same."""

    def __init__(self, code: Exact, args: Sequence[Any]) -> None:
        """Before the step's forward."""
        self._code = code
        self._step = Again(args, code.mutated)
        self._tangents: dict[int, Tensor | None] = {}
        self.deviation: Tensor | None = None
        """How far the twin's outputs are from the step's; None if the twin did not run."""
        self.exact: dict[str, Tensor] = {}
        """Sketches of the twin's gradients, by parameter."""

    def attach(
        self,
        outputs: Sequence[Any],
        names: Sequence[str | None],
        rerun: Callable[[_Look], None],
        compare: Callable[[_Look, Mapping[str, Tensor]], Mapping[str, Tensor]],
    ) -> None:
        """After the forward: both follow at the first backward, ``compare`` with its gradients.

        What ``compare`` returns takes their place.
        """
        args = self._step.args
        self._step.sample(outputs)
        node = compiled_node(outputs, args)
        if node is None:
            return
        storages = {_storage(a) for a in args if isinstance(a, Tensor)}
        for place, output in enumerate(outputs):
            if differentiable(output) and _storage(output) not in storages:
                output.register_hook(functools.partial(self._tangents.__setitem__, place))
        leaves = {id(a): place for place, a in enumerate(args) if differentiable(a)}
        owners = [leaves.get(id(getattr(n, "variable", None))) for n, _ in node.next_functions]
        named = dict(enumerate(names))
        known = [None if place is None else named.get(place) for place in owners]
        made = sum(a.nbytes for a in args if differentiable(a))
        # hooks' tensors may lie anywhere
        stored = 0 if hooked() else self._stored(node)
        early = stored < made
        self._step.coming = max(0, made - stored)  # that is freed when all gradients are there

        @torch.compiler.disable
        def begins(_: Any) -> None:
            before.remove()
            if early:
                rerun(self)

        @torch.compiler.disable
        def finished(gradients: Sequence[Tensor | None], _: Any) -> Any:
            after.remove()
            if not early:
                rerun(self)
            pairs = list(zip(known, gradients, strict=True))
            usual = {name: g for name, g in pairs if name is not None and g is not None}
            right = compare(self, usual)
            self._step.args, self._tangents, self.exact = [], {}, {}
            return tuple(right.get(name or "", g) for name, g in pairs) if right else None

        before, after = node.register_prehook(begins), node.register_hook(finished)

    def _stored(self, node: Node) -> int:
        """Bytes that the step holds for its backward alone."""
        given = {_storage(a) for a in self._step.args if isinstance(a, Tensor)}
        saved = {_storage(t): t for t in saved_by(node)}
        return storage_bytes(t for key, t in saved.items() if key not in given)

    def rerun(self) -> None:
        """Find ``deviation`` and ``exact``, unless the inputs are not what they were."""
        step = self._step
        if step.stale:
            return
        with step.random.again():
            self.deviation, self.exact = self._code.gradients(step, self._known_tangents)

    @property
    def _known_tangents(self) -> dict[int, Tensor]:
        """Of an output that nobody's loss depends on, hooks are told of no gradient."""
        return {place: t for place, t in self._tangents.items() if t is not None}

    def instead(self, lost: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Exact gradients of the parameters that are ``lost`` (bools); waits for the device."""
        flags = torch.stack(list(lost.values())).tolist() if lost else []
        names = {name for name, is_lost in zip(lost, flags, strict=True) if is_lost}
        if not names:
            return {}
        with self._step.random.again():
            exact = self._code.whole(self._step, self._known_tangents)
        right = {name: g for name, g in exact.items() if name in names}
        if right:
            log.warning(
                "hot: gradients of %d parameters (%s, ...) are not finite where exact ones are: in "
                "this step these take their place", len(right), next(iter(right)),
            )  # fmt: skip
        return right


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
