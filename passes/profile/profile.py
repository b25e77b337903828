"""What calibration measured of each layer: a JSON file, versioned, validated, diffable."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hot_compile.config import HotConfig, Rows, Strategy
from hot_compile.errors import ProfileFormatError, ProfileMismatchError
from hot_compile.passes.base.schemes import Scheme
from hot_compile.passes.base.site import Site, hint

PROFILE_VERSION = 5
_READ = (1, 2, 3, 4, 5)
"""Version 1 had no ``gradients``, version 2 no ``forward``, version 3 no ``storage``; until
version 4 there were ``stats`` of every layer's operands, which nothing read."""
_FORMAT = "hot-compile profile"
SIDES = ("grad_input", "grad_weight", "forward")
"""Of a layer: its products, whose variants are measured."""
ROTATED, PLAIN = "rotated", "plain"
"""An 8-bit forward with operands transformed along I, or as they are."""
_LISTED = 20
"""An error about a profile of another model names this many layers."""


@dataclasses.dataclass(frozen=True)
class Measure:
    """How far a quantised gradient is from the exact one."""

    error: float
    """Norm of the difference over the norm of the exact gradient."""
    cosine: float


@dataclasses.dataclass(frozen=True)
class LayerProfile:
    """One layer: its shape, and what was measured, averaged over batches."""

    outputs: int
    inputs: int
    rows: int
    """L of the calibration batches; may differ from training's."""
    dtype: str
    batches: int
    """Batches with finite, non-zero gradients."""
    grad_input: Mapping[str, Measure]
    """By ``gx_variant``."""
    grad_weight: Mapping[str, Measure]
    """By ``gw_variant``."""
    token_error: float | None
    """Relative L2 error of g_y, as g_w reads it, with one INT8 scale per token (row)."""
    tensor_error: float | None
    """The same with one scale per tensor."""
    forward: Mapping[str, Measure] = dataclasses.field(default_factory=dict)
    """Of y with both operands in 8 bits, as far as it varies over the rows: ``ROTATED``, ``PLAIN``.
    Empty where the backward does not read both x and W, or the file is an old one."""


@dataclasses.dataclass(frozen=True)
class StorageMeasure:
    """What storing one tensor in one way does to the gradients it feeds: relative errors."""

    error: float
    """The worst of parameters' gradients; 0 if it feeds none at first hand."""
    passed: float
    """The worst of gradients that other layers get."""


@dataclasses.dataclass(frozen=True)
class Profile:
    """Everything ``calibrate`` measured of one model."""

    rank: int
    """HLA rank that was measured."""
    layers: Mapping[str, LayerProfile]
    """By module path, as the plan names them."""
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Versions and device it was measured with; not part of the content."""
    graphs: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """How often option ``lqs="auto"`` observed each graph, by digest; not part of the content."""
    gradients: Mapping[str, Measure] = dataclasses.field(default_factory=dict)
    """By parameter: its gradient as the whole step had it when this was measured, rewritten layers
    and compressed activations together, against exact. No choice is made by it: not part of the
    content."""

    storage: Mapping[str, Mapping[str, StorageMeasure]] = dataclasses.field(default_factory=dict)
    """By tensor that crosses to the backward (``storage_names``), and by ``Scheme``. Empty if the
    file is an old one."""

    def to_json(self) -> dict[str, Any]:
        """JSON-ready form; :meth:`from_json` is its inverse."""
        layers = {name: dataclasses.asdict(self.layers[name]) for name in sorted(self.layers)}
        return {
            "format": _FORMAT,
            "version": PROFILE_VERSION,
            "environment": dict(self.environment),
            "graphs": dict(sorted(self.graphs.items())),
            "rank": self.rank,
            "layers": layers,
            "gradients": {k: dataclasses.asdict(v) for k, v in sorted(self.gradients.items())},
            "storage": {k: _entries(v) for k, v in sorted(self.storage.items())},
        }

    @classmethod
    def from_json(cls, data: Any) -> Profile:
        """Read what :meth:`to_json` wrote.

        Raises:
            ProfileFormatError: not a profile, another version, or entries that do not fit.
        """
        if not isinstance(data, dict) or data.get("format") != _FORMAT:
            raise ProfileFormatError(
                "got JSON that is no profile; expected what Profile.save wrote."
            )
        if data.get("version") not in _READ:
            raise ProfileFormatError(
                f"got a profile of version {data.get('version')!r}; this hot-compile reads "
                f"{_READ}. Make it again with hot_compile.calibrate(...)."
            )
        try:
            layers = {name: _layer(entry) for name, entry in data["layers"].items()}
            graphs = {digest: _whole(digest, n) for digest, n in data.get("graphs", {}).items()}
            whole = {k: _numbers(Measure, v) for k, v in data.get("gradients", {}).items()}
            storage = {k: _storage(v) for k, v in data.get("storage", {}).items()}
            rank = _whole("rank", data["rank"])
            return cls(rank, layers, dict(data.get("environment", {})), graphs, whole, storage)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise ProfileFormatError(
                f"got a profile whose entries do not fit ({error!r}); expected what Profile.save "
                "wrote. Make it again with hot_compile.calibrate(...)."
            ) from error

    def save(self, path: str | Path) -> None:
        """Write the JSON file: sorted, one value a line, so that two of them can be diffed."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.partial")
        partial.write_text(json.dumps(self.to_json(), indent=1, sort_keys=True) + "\n")
        partial.replace(path)  # whole or not at all: other ranks may be reading

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a file that :meth:`save` wrote.

        Raises:
            ProfileFormatError: no such file, no JSON, or no profile of this version.
        """
        try:
            return cls.from_json(json.loads(Path(path).read_text()))
        except ProfileFormatError as error:
            raise ProfileFormatError(f"{path}: {error}") from error
        except (OSError, ValueError, RecursionError) as error:  # no text, no JSON, or too deep
            raise ProfileFormatError(
                f"got profile={str(path)!r}, which cannot be read ({error}); expected a JSON file "
                "made by hot_compile.calibrate(...).save(path)."
            ) from error

    def content_hash(self) -> str:
        """Hex digest of what was measured, for cache keys."""
        data = self.to_json()
        content = {name: data[name] for name in ("rank", "layers", "storage")}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def merged(self, other: Profile) -> Profile:
        """This profile with what ``other`` measured added or replaced."""
        return dataclasses.replace(
            self,
            layers={**self.layers, **other.layers},
            graphs={**self.graphs, **other.graphs},
            gradients={**self.gradients, **other.gradients},
            storage={**self.storage, **other.storage},
        )

    def of_graph(self, digest: str, looks: int) -> Profile:
        """The same, marked as made by observing this graph for the ``looks``-th time."""
        return dataclasses.replace(self, graphs={digest: looks})

    def misfits(self, sites: Iterable[Site]) -> list[str]:
        """What of these layers the profile does not know, one line each."""
        found = []
        for site in sites:
            shape = (hint(site.outputs), hint(site.inputs))
            layer = self.layers.get(site.name)
            if site.refusal is not None:
                continue
            if layer is None:
                found.append(f"{site.name} ({shape[0]} x {shape[1]}): not in the profile")
            elif (layer.outputs, layer.inputs) != shape:
                got = f"{layer.outputs} x {layer.inputs}"
                found.append(f"{site.name}: {shape[0]} x {shape[1]}, in the profile {got}")
        return found

    def check(self, sites: Iterable[Site], rank: int) -> None:
        """Refuse a profile of another model.

        Raises:
            ProfileMismatchError: layers unknown or of another shape, or another HLA rank.
        """
        found = self.misfits(sites)
        if self.rank != rank:
            found.append(f"measured with rank={self.rank}, asked to train with rank={rank}")
        if found:
            more = [f"... and {len(found) - _LISTED} more"] if len(found) > _LISTED else []
            lines = "\n  ".join(found[:_LISTED] + more)
            raise ProfileMismatchError(
                f"got a profile that does not fit this model; expected one made of it:\n  {lines}\n"
                "Make it again with hot_compile.calibrate(...), or remove option 'profile'."
            )


def gx_variant(bits: int, per_channel: bool) -> str:
    """Name of one way to quantise g_x's operands, e.g. ``int4`` or ``int8/tensor``."""
    return f"int{bits}" + ("" if per_channel else "/tensor")


def gw_variant(strategy: Strategy, rows: Rows, per_channel: bool) -> str:
    """Name of one way to compute g_w, e.g. ``int8`` or ``hla8/consecutive/tensor``."""
    grouped = f"/{rows}" if strategy is Strategy.HLA8 else ""
    return f"{strategy}{grouped}" + ("" if per_channel else "/tensor")


def config_variant(strategy: Strategy, config: HotConfig) -> str:
    """``gw_variant`` as this configuration would run ``strategy``."""
    return gw_variant(strategy, config.rows, config.per_channel)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a finite number")
    return value


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise ValueError(f"{name} is {value!r}, no whole number >= 0")
    return value


def _numbers(kind: Any, entry: Any) -> Any:
    return kind(**{name: _number(value) for name, value in entry.items()})


def _entries(measures: Mapping[str, Any]) -> dict[str, Any]:
    return {name: dataclasses.asdict(measures[name]) for name in sorted(measures)}


def _storage(entry: dict[str, Any]) -> dict[str, StorageMeasure]:
    return {str(Scheme(name)): _numbers(StorageMeasure, value) for name, value in entry.items()}


def _layer(entry: dict[str, Any]) -> LayerProfile:
    fixed = {
        "grad_input": {k: _numbers(Measure, v) for k, v in entry["grad_input"].items()},
        "grad_weight": {k: _numbers(Measure, v) for k, v in entry["grad_weight"].items()},
    }
    if "forward" in entry:
        fixed["forward"] = {k: _numbers(Measure, v) for k, v in entry["forward"].items()}
    for name in ("outputs", "inputs", "rows", "batches"):
        _whole(name, entry[name])
    for name in ("token_error", "tensor_error"):
        if entry[name] is not None:
            _number(entry[name])
    known = {name: value for name, value in entry.items() if name != "stats"}
    return LayerProfile(**{**known, **fixed})
