"""Never fails where stock Inductor does not: what goes wrong in our part costs that part only.

A graph is compiled, and its first step run, in the first of several ways in which nothing fails: as
the options say, then without one part of what we do, then as stock. What fails costs one warning,
which names the cause and a folder with a reproduction. Code that fails when it is first run is
compiled again for the sizes at hand, and the step is done with that: a forward from its inputs, a
backward (which torch compiles when it is first wanted) by another forward and backward from the
same inputs and random state, which are kept until the first backward is through. What happens later
is passed on, and so is a lack of memory. Processes of one job go on in the same way (``together``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.exc import RestartAnalysis, SkipFrame
from torch._functorch import config as functorch_config
from torch._guards import TracingContext
from torch._inductor import config as inductor_config
from torch.autograd.graph import Node
from torch.utils.checkpoint import CheckpointError, _StopRecomputationError

from .again import (
    Again,
    compiled_for,
    compiled_node,
    mutated_places,
    only_once,
    samples_of,
    twin,
)
from .config import HotConfig
from .errors import HotError, OptionWarning
from .passes.cost.tuned import in_job
from .passes.measure.observe import SAME
from .record import GraphReport
from .reproduction import cause, write_reproduction
from .together import Together

log = logging.getLogger("hot_compile")

_PASSED_ON = (
    *(HotError, OptionWarning, torch.OutOfMemoryError, RestartAnalysis, SkipFrame),
    *(CheckpointError, _StopRecomputationError),
)
"""The user's mistakes, what stock may run into as well, Dynamo's own ways to begin anew, and how
``torch.utils.checkpoint`` ends what it computes again."""


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to compile a graph."""

    without: str
    """The part that is left out."""
    config: HotConfig
    stock: bool = False
    """As stock Inductor; of ``config`` only what is done around the graph counts."""
    patches: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Of Inductor's config."""
    used: Callable[[GraphReport], bool] = lambda report: True
    """The part did something to the graph."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of what we do, and the options that leave it out."""

    name: str
    without: Mapping[str, Any]
    used: Callable[[GraphReport], bool]
    """It did something to the graph."""


def stores(report: GraphReport) -> bool:
    """Something that crosses to the backward is compressed, or waits in host memory."""
    return any(c.scheme != "exact" or c.host_bytes for c in report.crossing)


PARTS = (
    Part("storage", {"memory": "off", "memory_budget": None, "peak_budget": None}, stores),
    Part("heads in chunks", {"head": "off"}, lambda r: any(h.chunked for h in r.plan.heads)),
    Part("an INT8 forward", {"forward": "exact"}, lambda r: any(f.int8 for f in r.plan.forwards)),
)
"""In the order in which they are left out."""


_TORCHS = {"triton.mix_order_reduction": False, "triton.coalesce_tiling_analysis": False}
"""Two optimisations of Inductor on a GPU that stop compiling some of our graphs in 2.11 to 2.14.
The fusion of a sum over rows with one over columns (``AssertionError: 256 v.s. 128``,
``MixOrderReduction.get_numel_rnumel``) does where two sums over rows of different lengths, split
alike, were fused before; the analysis of tiles (an assertion in ``get_pw_red_splits``) where sizes
are symbols and streams of tokens are joined."""


def _ways(config: HotConfig, on_gpu: bool) -> Iterator[Way]:
    """All there are, in the order in which they are tried; whatever is off already left out."""
    yield Way("", config)
    known = inductor_config.get_config_copy()
    torchs = {name: value for name, value in _TORCHS.items() if name in known}
    if on_gpu and torchs:
        yield Way("Inductor's mixed-order reductions and tile analysis", config, patches=torchs)
    for part in PARTS:
        other = config.changed(part.without)
        if other != config:
            yield Way(part.name, other, used=part.used)
    yield Way("everything", config, stock=True)


_ASKS = 16
"""A job's processes are that many forwards, at most, apart when they are through a first step. The
job's store is asked at powers of two up to that: each time the host waits for an answer, and a
model that DDP splits has a dozen graphs."""
_WHOLE = {"force_non_lazy_backward_lowering": True, "donated_buffer": False}
"""A graph with collectives is compiled with its backward, while processes can still agree. Buffers
are not given away then: nobody knows yet whether the graph will be kept."""

Compile = Callable[[fx.GraphModule, Sequence[Any], Way, list[GraphReport]], Callable[..., Any]]
"""(a graph of its own, example inputs, how, what was done to it so far) -> compiled function."""


class Guaranteed:
    """One of Dynamo's graphs, compiled in the first way in which nothing fails."""

    def __init__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        config: HotConfig,
        compile_graph: Compile,
        asked: Mapping[str, Any],
    ) -> None:
        """``asked``: the user's ``mode`` and ``options``, for the reproduction.

        Raises what stock does if that fails as well, and what is passed on.
        """
        self._gm = twin(gm)
        self._examples = example_inputs
        self._compile = compile_graph
        self._asked = asked
        self._ways = tuple(_ways(config, _on_gpu(example_inputs)))
        self._at = 0
        self._reports: list[GraphReport] = []
        self._failure: tuple[str, Exception | None] | None = None
        """The first that was not told of yet, and where it was; None: in another process."""
        self._job = Together(gm, example_inputs, config.stable_hash())
        self._told: set[tuple[str, int]] = set()
        """Stages and ways of which other processes know how they ended."""
        self._once = bool(only_once(gm, example_inputs))
        self._settled_for = 0 if in_job() and not self._once else _ASKS
        """Forwards since a backward was through; from ``_ASKS`` on nobody is asked any more."""
        self.settled = self._once
        """A backward is through, or none could be done again."""
        self._run = self._compiled(gm)
        self._mutated = mutated_places(TracingContext.try_get(), example_inputs)

    def __call__(self, *args: Any) -> Any:
        """One forward; the first is done again in another way if it fails, here or elsewhere."""
        self._follows()
        step = None if self.settled else self._begun(args)
        if step is None:
            return self._run(*args)
        while True:
            run, at, done = self._run, self._at, False
            with self._stage("forward", at):
                try:
                    outputs = run(*args)
                    done = True
                except Exception as error:
                    if not self._replaced(run, "a first forward", error, step):
                        raise
            if done and not self._left("forward", at):
                break
            step.put_back()
        self._tell()
        try:
            step.sample(outputs)
            node: Any = compiled_node(outputs, args)
            if node is not None:
                node._forward_cls = _FirstBackward(node._forward_cls, self, step, run)
        except Exception:
            log.debug("hot: a first backward is not guarded", exc_info=True)
        return outputs

    def _follows(self) -> None:
        """Another process may have failed since this one was through with that."""
        if self._settled_for >= _ASKS:
            return
        # forwards without gradients never settle
        self._settled_for += self.settled or not torch.is_grad_enabled()
        if self._settled_for & (self._settled_for - 1) == 0:
            self._moves("a first step", self._job.left(self._at))
            self._tell()

    def _stage(self, name: str, at: int) -> contextlib.AbstractContextManager[None]:
        """Others wait for the first run of a code only."""
        if (name, at) in self._told:
            return contextlib.nullcontext()
        return self._job.stage(name, at)

    def _left(self, name: str, at: int) -> bool:
        """After a stage went well here: whether it failed elsewhere, and other code runs now."""
        if (name, at) in self._told:
            return False
        self._told.add((name, at))
        return self._moves(f"a first {name}", self._job.outcome(name, at))

    def _moves(self, where: str, at: int | None) -> bool:
        """To the way on which processes agreed, if there is one."""
        if at is None:
            return False
        self._failure = self._failure or (where, None)
        self._at = at
        self._run = _BySizes(self._gm, self._compile, self._way, self._reports)
        return True

    def _begun(self, args: Sequence[Any]) -> Again | None:
        try:
            return Again(args, self._mutated)
        except Exception:
            log.debug("hot: a first step is not guarded", exc_info=True)
            return None

    def backward(
        self,
        node: Node,
        step: Again,
        run: Callable[..., Any],
        gradients: tuple[Any, ...],
        usual: Callable[[], Any],
    ) -> Any:
        """What a first backward gives: ``usual()``, of the code ``run``, or that of other code if
        that fails here or elsewhere."""

        def again() -> Any:
            return self._again(node, step, gradients)

        attempt = usual if run is self._run or step.stale else again  # given up since that forward
        while True:
            run, at = run if attempt is usual else self._run, self._at
            with self._stage("backward", at):
                try:
                    found = attempt()
                except Exception as error:
                    if not self._replaced(run, "a first backward", error, step):
                        raise
                    attempt = again
                    continue
            if not self._left("backward", at) or step.stale:
                break
            attempt = again
        self.settled = True
        self._tell()
        return found

    def _again(self, node: Node, step: Again, gradients: tuple[Any, ...]) -> Any:
        """The gradients of a node's inputs by another forward and backward."""
        with step.random.again():
            inputs, outputs = step.run(self._run)
            other: Any = compiled_node(outputs, inputs)
            if not (_alike(node, other) and step.deviation(samples_of(outputs)) < SAME):
                raise RuntimeError("a forward that is done again computes something else")
            return other.apply(*gradients)

    @property
    def _way(self) -> Way:
        return self._ways[self._at]

    def _compiled(self, gm: fx.GraphModule) -> Callable[..., Any]:
        whole = _WHOLE if self._job.members else {}
        while True:
            way, at, run = self._way, self._at, None
            if way.stock:  # and nothing of ours around it either
                way = dataclasses.replace(way, config=dataclasses.replace(way.config, head="off"))
            with self._job.stage("compiling", at):
                try:
                    with functorch_config.patch(whole):
                        run = self._compile(gm, self._examples, way, self._reports)
                except Exception as error:
                    if not self._goes_on("compiling", error):
                        raise
            other = None if run is None else self._job.outcome("compiling", at)
            if run is not None and other is None:
                self._tell()
                return run
            if other is not None:
                self._failure, self._at = self._failure or ("compiling", None), other
            gm = twin(self._gm)

    def _goes_on(self, where: str, error: Exception) -> bool:
        """Whether there is another way; it is the next one then, in all processes."""
        if _passed_on(error):
            return False
        self._failure = self._failure or (where, error)
        for place, way in enumerate(self._ways[self._at + 1 :], self._at + 1):
            if not self._reports or any(map(way.used, self._reports)):
                self._at = self._job.failed(self._at, place)
                return True
        return False

    def _replaced(self, run: Callable[..., Any], where: str, error: Exception, step: Again) -> bool:
        """Whether the step can be done by other code than ``run``, which failed."""
        if run is self._run:
            if not self._goes_on(where, error):
                return False
            self._run = _BySizes(self._gm, self._compile, self._way, self._reports)
        if step.stale:
            log.warning("hot: %s failed and cannot be done again: an input has changed", where)
        return not step.stale

    def _tell(self) -> None:
        """The one warning, if something failed since the last."""
        if self._failure is None:
            return
        where, error = self._failure
        self._failure = None
        way = "without " + self._way.without
        if self._way.stock:
            way = "as stock Inductor compiles it"
        if error is None:
            log.warning("hot: %s failed in another process; the graph goes on %s.", where, way)
            return
        log.warning(
            "hot: %s failed (%s); the graph goes on %s. %s. options={'strict': True} raises the "
            "error instead.",
            *(where, cause(error), way),
            write_reproduction(self._gm, self._examples, self._asked, error),
        )


class _BySizes:
    """A graph whose code failed, compiled in another way for the sizes at hand.

    Dynamo is not compiling when it is called: it cannot guard what is found out of sizes then.
    """

    def __init__(
        self, gm: fx.GraphModule, compile_graph: Compile, way: Way, reports: list[GraphReport]
    ) -> None:
        def compile_once(gm: fx.GraphModule, fakes: Sequence[Any]) -> Callable[..., Any]:
            return compile_graph(gm, fakes, way, reports)

        self._gm = gm
        self._compile = compile_once
        self._codes: dict[tuple[int, ...], Callable[..., Any]] = {}

    def __call__(self, *args: Any) -> Any:
        """One forward."""
        sizes = tuple(a for a in args if isinstance(a, int))
        if sizes not in self._codes:
            self._codes[sizes], _ = compiled_for(self._gm, args, self._compile)
        return self._codes[sizes](*args)


class _FirstBackward:
    """In the place of an autograd node's function, whose backward is run for the first time."""

    def __init__(
        self, function: Any, owner: Guaranteed, step: Again, run: Callable[..., Any]
    ) -> None:
        self._function = function
        self._owner = owner
        self._kept: tuple[Again, Callable[..., Any]] | None = (step, run)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)

    @torch.compiler.disable  # a step that calls backward() may be compiled as a whole
    def backward(self, node: Any, *gradients: Any) -> Any:
        """The gradients of the node's inputs. ``gradients`` may be one list, which is emptied."""
        kept, self._kept = self._kept, None
        if kept is None:
            return self._function.backward(node, *gradients)
        boxed = len(gradients) == 1 and isinstance(gradients[0], list)
        given = tuple(gradients[0]) if boxed else gradients

        def usual() -> Any:
            return self._function.backward(node, *gradients)

        return self._owner.backward(node, *kept, given, usual)


def _passed_on(error: BaseException | None) -> bool:
    """It is the user's mistake, or what stock may run into as well, or Dynamo begins anew."""
    if error is None or isinstance(error, _PASSED_ON):
        return error is not None
    return _passed_on(getattr(error, "inner_exception", None) or error.__cause__)


def _alike(node: Any, other: Any) -> bool:
    """Two compiled graphs take the same gradients, and give those of the same inputs."""
    if other is None or len(node.next_functions) != len(other.next_functions):
        return False
    mine, theirs = ([m.shape for m in n._input_metadata] for n in (node, other))
    return mine == theirs


def _on_gpu(example_inputs: Sequence[Any]) -> bool:
    return any(isinstance(x, torch.Tensor) and x.is_cuda for x in example_inputs)
