"""What a user can choose, as one frozen value. Recipes are named configs, laid over by options."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from enum import Enum
from fnmatch import fnmatchcase
from typing import Any

from . import parsers
from .errors import OptionError
from .sizes import memory_bytes


class Strategy(str, Enum):
    """How a layer's backward is computed (docs/strategies.md, passes/layers/strategies.py)."""

    HLA8 = "hla8"
    """g_x by HQ; g_w from the low-pass half of transformed rows, in INT8."""
    INT8 = "int8"
    """g_x by HQ; g_w full rank in INT8; with ``recompute=False`` x is kept as INT8 per column."""
    GX_ONLY = "gx-only"
    """g_x by HQ, nothing else touched: what frozen weights get (no g_w, no use for x)."""
    GW_ONLY = "gw-only"
    """g_w full rank in INT8; g_x exact."""
    EXACT = "exact"
    """Untouched: whatever Inductor does."""
    INT4_NAIVE = "int4-naive"
    """Baseline for comparison: INT4 per tensor, no transform, both products."""
    LUQ = "luq"
    """Baseline for comparison: logarithmic unbiased 4-bit g_y, INT4 x and W."""
    LBP_WHT = "lbp-wht"
    """Baseline for comparison: both products on the low-pass rows only, in floating point."""

    def __str__(self) -> str:
        return self.value


UNCOMPRESSED = 32
"""Bits of a tensor that stays as it is, whatever its dtype; ``"exact"`` in options."""

AROUND = ("around6", "around8", "around12")
"""In so many bits, around the batch's mean at each position; as it is where that cannot be."""

BASELINES = frozenset({Strategy.INT4_NAIVE, Strategy.LUQ, Strategy.LBP_WHT})
"""Other papers' methods, fake-quantised, for comparing accuracy (passes/layers/baselines.py)."""


class Rows(str, Enum):
    """Which 16 rows one Hadamard block of HLA takes."""

    BATCH = "batch"
    """The same token of 16 samples: what HLA drops averages out over shuffled batches."""
    CONSECUTIVE = "consecutive"
    """Neighbouring rows, as in the paper."""

    def __str__(self) -> str:
        return self.value


class Memory(str, Enum):
    """Which tensors are stored compressed between forward and backward."""

    AUTO = "auto"
    """As ``ALL``, but the dearest stay exact where all of them are predicted to take more than 3 %
    of the step beyond what layers win (``passes/storage/step_time.py``). On a CPU ``min_gain=0``,
    which takes layers that lose time, is without that limit."""
    ALL = "all"
    """Every large one whose readers tolerate it, layers' inputs or not."""
    PAPER = "paper"
    """Only what a layer's product reads, as the paper's ABC."""
    FREE = "free"
    """What costs no time: in order of bytes saved per predicted second, for as long as the time
    that layers' products win pays for it."""
    OFF = "off"
    """None. With ``recompute=False``, what strategies keep of x is still theirs."""

    def __str__(self) -> str:
        return self.value


def _strategies(names: str) -> tuple[Strategy, ...]:
    return tuple(Strategy(n) for n in names.split())


@dataclasses.dataclass(frozen=True)
class HotConfig:
    """Everything that steers the planner. Build one with :meth:`from_options`.

    ``options={"recipe": ..., ...}`` of ``torch.compile`` takes these fields as keys, bare or with
    the prefix ``hot.``; every other key goes to Inductor.
    """

    recipe: str = "hot"
    """Name of the base recipe: one of ``RECIPES``."""
    strategies: tuple[Strategy, ...] = _strategies("int8")
    """Strategies a layer may be given, preferred first; the first that its facts allow is taken."""
    gx_bits: int | None = None
    """Bits of both operands of g_x, 4 or 8; None: 4 where the device multiplies INT4 faster than
    INT8, else 8, which then costs nothing (docs/adr/0001)."""
    per_channel: bool = True
    """Scales per row of g_y and column of W and x (they fold into the epilogue), or per tensor."""
    per_token: bool | None = None
    """With scales per tensor: those of g_y per row for g_x after all, everywhere (True) or nowhere
    (False); None: where the profile says so, by the paper's LQS."""
    rank: int = 8
    """Rows kept of every 16 by ``hla8``: 1, 2, 4, 8 or 16."""
    rows: Rows = Rows.BATCH
    """Which rows ``hla8`` groups."""
    include: tuple[str, ...] = ("*",)
    """Globs on the layer's module path: only these are considered."""
    exclude: tuple[str, ...] = ()
    """Globs on the layer's module path: these stay exact."""
    override: tuple[tuple[str, Strategy], ...] = ()
    """(glob, strategy) pairs; the last match decides the layer's strategy, cost model or not."""
    recompute: bool = True
    """Let min-cut recompute an x that is a cheap function of what is saved anyway (the output of a
    norm or activation) instead of saving it, even compressed (docs/adr/0004). False: x is quantised
    in the forward and the result is what crosses, as in the paper's ABC."""
    memory: Memory = Memory.AUTO
    """Which of the tensors that cross to the backward are stored compressed (docs/memory.md)."""
    memory_bits: int | None = None
    """Fewest bits, 4, 6 or 8, such a tensor is stored in; for norms, convolutions and attention not
    below 8 unless measured. None: 6, norms and images 8, or as a profile says (docs/adr/0022)."""
    memory_override: tuple[tuple[str, int | str], ...] = ()
    """(glob, bits) pairs: fewest bits, 6, 8, 12 or ``UNCOMPRESSED``, of what a module makes
    (``blocks.3.mlp.fc1``), or of one tensor by its name in a profile (``blocks.3.mlp.fc1:addmm``);
    the last match counts. It asks for more than ``memory_bits``, never for less. Or ``AROUND``."""
    memory_budget: float | int | None = None
    """Held bytes per compiled graph (int), or a fraction (float) of what the graph would hold
    uncompressed: tensors are compressed in order of error per byte until it is met. None: all."""
    peak_budget: str | None = None
    """The highest that the device's memory may rise to in a step, weights and all, e.g. "16GiB":
    what does not fit is recomputed, stored, or waits in host memory (docs/adr/0023)."""
    memory_min_bytes: int = 2**16
    """Smaller tensors are not worth a kernel and stay exact."""
    keep_head: bool = True
    """Leave the classifier head exact, as the paper does."""
    exact_forms: bool = True
    """Give what stays exact a faster form that is as exact (docs/adr/0011, 0013)."""
    head: str = "chunked"
    """"chunked": a wide head and its loss go through rows in chunks, so that neither the logits nor
    their gradient exist as a whole (docs/adr/0014); exact all the same. "int8": so, and both
    products of their gradient on INT8 where that is predicted faster (docs/adr/0033). "off": as
    Inductor does them."""
    head_min_bytes: int = 2**25
    """Logits of fewer bytes are not worth it."""
    min_gain: float = 1.05
    """Rewrite a layer only if its backward is predicted this many times faster; 0: always."""
    prices: str = "measured"
    """"measured": by rates that ``hot-compile tune`` measured on this very device. Where it did
    not, and with "table", by the built-in table's of devices of its kind (docs/adr/0028)."""
    rates: tuple[tuple[str, float], ...] = ()
    """Overrides of the device's rates that price strategies, e.g. ``{"integer": 3e12}``."""
    profile: str | None = None
    """File made by ``calibrate(...).save(path)``: strategies are chosen by what it measured."""
    lqs: str = "off"
    """"auto": start without HLA, observe the first steps, then recompile with what they told. The
    profile is kept in ``profile``, or in the user's cache, for the next process. "off": choose by
    ``profile`` if there is one, else take the strategies on trust."""
    lqs_warm_up: int = 200
    """Forwards before ``lqs="auto"`` observes: gradients at initialisation mislead."""
    lqs_batches: int = 2
    """Forwards and backwards that ``lqs="auto"`` observes each time."""
    lqs_rechecks: int = 2
    """How often ``lqs="auto"`` looks again, 4, 16, ... times ``lqs_warm_up`` forwards later."""
    error_budget: float | None = 0.2
    """With a profile: largest relative error of a layer's g_x and g_w; storing one tensor may take
    a part of it (docs/adr/0022). None: whatever was measured (``paper``)."""
    forward: str = "exact"
    """"int8": layers' forward products on INT8 wherever that is predicted faster (docs/forward.md);
    gradients pass straight through the rounding. "exact": as Inductor does them."""
    forward_exact: tuple[str, ...] = ()
    """Globs on the layer's module path: the forward of these stays exact with "int8", too."""
    forward_budget: float | None = 0.05
    """With a profile: largest error of a layer's output, relative to how far that varies over the
    rows, that an INT8 forward may have; None: whatever was measured."""
    accept: str = "auto"
    """"auto": compare the gradients of some steps with exact ones, repair what is off, remember it
    (docs/acceptance.md). "free": so, and looks may take all memory that is free. "remembered":
    only what earlier processes found. "off": neither."""
    strict: bool = False
    """Raise what goes wrong in our part, instead of going on without it (docs/guarantee.md)."""
    dump: str | None = None
    """Folder for graphs, plan and crossing tensors of every compiled graph (also: HOT_DUMP)."""

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> HotConfig:
        """The recipe named in ``options`` with its other keys laid over it.

        Raises:
            OptionError: unknown key or a value the field cannot take; the message lists valid ones.
        """
        options = {key.removeprefix("hot."): value for key, value in options.items()}
        unknown = options.keys() - option_names() - OBJECTS
        if unknown:
            raise OptionError.unknown(unknown, option_names() | OBJECTS)
        options = {key: value for key, value in options.items() if key not in OBJECTS}
        recipe = options.pop("recipe", "hot")
        if not isinstance(recipe, str) or recipe not in RECIPES:
            raise OptionError.value("recipe", recipe, f"one of {sorted(RECIPES)}")
        if options.get("profile") is not None:  # what was calibrated is used as it is
            options.setdefault("lqs", "off")
        config = RECIPES[recipe].changed(options)
        budgets = [name for name in _BUDGETS if getattr(config, name) is not None]
        if budgets and (config.memory is Memory.FREE or len(budgets) > 1):
            other = "memory='free', which has a budget of its own, of time"
            other = other if config.memory is Memory.FREE else f"{budgets[1]}, another budget"
            wanted = f"None beside {other}"
            raise OptionError.value(budgets[0], getattr(config, budgets[0]), wanted)
        return config

    def changed(self, options: Mapping[str, Any]) -> HotConfig:
        """With these options laid over it, by their bare names. Raises OptionError as above."""
        fields = {name: _PARSERS[name](name, value) for name, value in options.items()}
        return dataclasses.replace(self, **fields)

    @property
    def peak(self) -> int | None:
        """Bytes of ``peak_budget``."""
        return None if self.peak_budget is None else memory_bytes(self.peak_budget)

    @property
    def has_budget(self) -> bool:
        """The user said how much memory may be used: storing is not limited by its time."""
        return self.memory_budget is not None or self.peak_budget is not None

    def overridden(self, name: str) -> Strategy | None:
        """What ``override`` gives a layer of this name: the last glob that matches counts."""
        chosen = (s for glob, s in reversed(self.override) if fnmatchcase(name, glob))
        return next(chosen, None)

    def asked_of(self, tensor: str) -> int | str | None:
        """What ``memory_override`` asks of a tensor of this name; None: nothing."""
        module = tensor.split(":")[0]
        for glob, asked in reversed(self.memory_override):
            if fnmatchcase(tensor, glob) or fnmatchcase(module, glob):
                return asked
        return None

    def to_json(self) -> dict[str, Any]:
        """The config as JSON-ready values."""
        return json.loads(json.dumps(dataclasses.asdict(self), default=str))

    def stable_hash(self) -> str:
        """Hex digest of every field, the same in every process."""
        text = json.dumps(self.to_json(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def _baseline(name: str) -> HotConfig:
    """One of ``BASELINES`` for every layer, whatever it costs."""
    strategies = _strategies(name)
    return HotConfig(
        recipe=name, strategies=strategies, min_gain=0, error_budget=None, memory=Memory.OFF
    )


RECIPES: dict[str, HotConfig] = {
    # Same memory as the paper's ABC, near lossless (docs/adr/0001): the default.
    "hot": HotConfig(),
    # Half-length g_w product where the rows can be grouped across the batch, and where that was
    # measured to be harmless: HLA is not taken on trust.
    "fast": HotConfig(
        recipe="fast", strategies=_strategies("hla8 int8"), error_budget=0.3, lqs="auto"
    ),
    # 8-bit everywhere: the closest to exact that is still integer.
    "int8": HotConfig(recipe="int8", strategies=_strategies("int8"), gx_bits=8, memory_bits=8),
    # The default's backward, and layers' forward products on INT8 as well.
    "int8-forward": HotConfig(recipe="int8-forward", forward="int8"),
    # The paper's text, verbatim: per-tensor scales, HLA(8) by LP_L1 on consecutive rows.
    "paper": HotConfig(
        recipe="paper",
        strategies=_strategies("hla8"),
        gx_bits=4,
        per_channel=False,
        rows=Rows.CONSECUTIVE,
        recompute=False,
        error_budget=None,
        memory=Memory.PAPER,
    ),
    # Other papers' methods, in fake-quantised arithmetic: for comparing accuracy only.
    **{str(baseline): _baseline(str(baseline)) for baseline in sorted(BASELINES)},
    "exact": HotConfig(
        recipe="exact",
        strategies=_strategies("exact"),
        error_budget=None,
        memory=Memory.OFF,
        exact_forms=False,
        head="off",
    ),
}


_BUDGETS = ("memory_budget", "peak_budget")
OBJECTS = frozenset({"monitor"})
"""Options that hold an object of the user's, which changes no code and is no part of the config."""


def option_names() -> frozenset[str]:
    """Every key of ours that ``options`` may hold (each also with the prefix ``hot.``)."""
    return frozenset(field.name for field in dataclasses.fields(HotConfig))


def split_options(options: Mapping[str, Any] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """(ours, Inductor's): keys that are ours or carry our prefix, and the rest.

    Raises:
        OptionError: a key is no string.
    """
    ours: dict[str, Any] = {}
    theirs: dict[str, Any] = {}
    for key, value in (options or {}).items():
        if not isinstance(key, str):
            expected = "expected names of options, which are strings"
            raise OptionError(f"got {key!r} as a key of options; {expected}. Remove it.")
        mine = key.startswith("hot.") or key in option_names() or key in OBJECTS
        (ours if mine else theirs)[key] = value
    return ours, theirs


def refuse_misplaced(arguments: Mapping[str, object]) -> None:
    """Options that were given as arguments of the backend: there they would do nothing.

    Raises:
        OptionError: one of ``arguments`` has an option's name. Others may be a later Dynamo's.
    """
    for name in arguments:
        if name in option_names() or name in OBJECTS:
            expected = "options are given to torch.compile, or to the backend, as options={...}"
            text = f"got {name!r} as an argument of the backend; {expected}."
            raise OptionError(f"{text} Write options={{{name!r}: {arguments[name]!r}}}.")


def _strategy_list(name: str, value: object) -> tuple[Strategy, ...]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, (list, tuple)) or not values:
        valid = [member.value for member in Strategy]
        raise OptionError.value(name, value, f"a list of strategies out of {valid}")
    return tuple(parsers.choice(Strategy)(name, v) for v in values)


def _overrides(name: str, value: object) -> tuple[tuple[str, Strategy], ...]:
    if not isinstance(value, Mapping) or not all(isinstance(k, str) for k in value):
        raise OptionError.value(name, value, "a dict {glob: strategy}")
    return tuple((glob, parsers.choice(Strategy)(name, v)) for glob, v in value.items())


def _bits_by_glob(name: str, value: object) -> tuple[tuple[str, int | str], ...]:
    bits: dict[Any, Any] = {6: 6, 8: 8, 12: 12, "exact": UNCOMPRESSED, **{w: w for w in AROUND}}
    if not isinstance(value, Mapping) or not all(isinstance(k, str) for k in value):
        raise OptionError.value(name, value, f"a dict {{glob: one of {list(bits)}}}")
    return tuple((glob, bits[parsers.one_of(*bits)(name, v)]) for glob, v in value.items())


_PARSERS: dict[str, Any] = {
    "strategies": _strategy_list,
    "gx_bits": parsers.one_of(4, 8, None),
    "per_channel": parsers.one_of(True, False),
    "per_token": parsers.one_of(True, False, None),
    "rank": parsers.one_of(1, 2, 4, 8, 16),
    "rows": parsers.choice(Rows),
    "include": parsers.globs,
    "exclude": parsers.globs,
    "override": _overrides,
    "recompute": parsers.one_of(True, False),
    "memory": parsers.choice(Memory),
    "memory_bits": parsers.one_of(4, 6, 8, None),
    "memory_override": _bits_by_glob,
    "memory_budget": parsers.memory_budget,
    "peak_budget": parsers.peak_budget,
    "memory_min_bytes": parsers.bytes_of,
    "keep_head": parsers.one_of(True, False),
    "exact_forms": parsers.one_of(True, False),
    "head": parsers.one_of("chunked", "int8", "off"),
    "head_min_bytes": parsers.bytes_of,
    "min_gain": parsers.gain,
    "prices": parsers.one_of("measured", "table"),
    "rates": parsers.rates,
    "profile": parsers.path,
    "lqs": parsers.one_of("auto", "off"),
    "lqs_warm_up": parsers.at_least(0),
    "lqs_batches": parsers.at_least(1),
    "lqs_rechecks": parsers.at_least(0),
    "error_budget": parsers.error_budget,
    "forward": parsers.one_of("exact", "int8"),
    "forward_exact": parsers.globs,
    "forward_budget": parsers.error_budget,
    "accept": parsers.one_of("auto", "free", "remembered", "off"),
    "strict": parsers.one_of(True, False),
    "dump": parsers.path,
}
