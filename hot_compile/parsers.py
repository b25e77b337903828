"""What options' values may be: each function reads one as the user gave it, or says what is valid.

All take (the option's name, its value), or give such a function, and raise ``OptionError``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from .errors import OptionError
from .sizes import memory_bytes


def choice(enum: type[Enum]) -> Any:
    """One of an enum's values."""

    def parse(name: str, value: object) -> Enum:
        try:
            return enum(value)
        except ValueError:
            valid = [member.value for member in enum]
            raise OptionError.value(name, value, f"one of {valid}") from None

    return parse


def one_of(*valid: object) -> Any:
    """One of these values and of its type: 8.0 is not 8, which names an operator's bits."""

    def parse(name: str, value: object) -> object:
        for each in valid:
            if type(value) is type(each) and value == each:
                return value
        raise OptionError.value(name, value, f"one of {list(valid)}{_meant(value, valid)}")

    return parse


def _meant(value: object, valid: Sequence[object]) -> str:
    """What to write instead of a float that equals a valid whole number."""
    whole = value in valid if isinstance(value, float) else False
    return f", whole numbers: {int(value)} for {value}" if whole else ""  # type: ignore[call-overload]


def globs(name: str, value: object) -> tuple[str, ...]:
    """A glob, or a list of them."""
    value = [value] if isinstance(value, str) else value
    if isinstance(value, (list, tuple)) and all(isinstance(v, str) for v in value):
        return tuple(value)
    raise OptionError.value(name, value, "a glob or a list of globs such as ['head*', '*.qkv']")


def _number(least: float, expected: str, whole: bool = False, above: bool = False) -> Any:
    """A number of at least this, or ``above`` it."""

    def parse(name: str, value: object) -> float:
        number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
        if number and (value > least or (value == least and not above)):  # type: ignore[operator]
            return value if whole else float(value)  # type: ignore[return-value, arg-type]
        raise OptionError.value(name, value, expected)

    return parse


gain = _number(0, "a number >= 0 (0: rewrite always; 1.05: the default)")
bytes_of = _number(0, "a number of bytes, an int >= 0", whole=True)
_error = _number(0, "a relative error > 0 such as 0.2, or None", above=True)


def at_least(least: int, or_else: str = "") -> Any:
    """A whole number of at least this; ``or_else``: what else is valid, which is read elsewhere."""
    other = f" or {or_else!r}" if or_else else ""
    return _number(least, f"a whole number >= {least}{other}", whole=True)


def error_budget(name: str, value: object) -> float | None:
    """A relative error, or none."""
    return None if value is None else _error(name, value)


def memory_budget(name: str, value: object) -> float | int | None:
    """Bytes, a fraction, or none."""
    fraction = isinstance(value, float) and 0 <= value <= 1
    size = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if value is None or fraction or size:
        return value  # type: ignore[return-value]
    expected = "bytes that a graph holds (an int >= 0), a fraction of them (0.0 to 1.0) or None"
    peak = value if isinstance(value, str) else "16GiB"
    raise OptionError.value(name, value, f"{expected}; of a step's peak: peak_budget={peak!r}")


def peak_budget(name: str, value: object) -> str | None:
    """A size, or none."""
    if value is None or (isinstance(value, str) and memory_bytes(value, name)):
        return value
    raise OptionError.value(name, value, "a size such as '16GiB', or None")


RATE_NAMES = (
    *("float32", "bfloat16", "float16", "integer", "int4"),
    *("transform", "launch", "copy", "packing", "coding", "power", "host_copy"),
)
"""What ``rates`` may override: FLOP/s by dtype, OP/s, bytes/s, elements/s (``coding``), seconds per
call, a share (``power``)."""


def rates(name: str, value: object) -> tuple[tuple[str, float], ...]:
    """Overrides of a device's rates."""
    valid = isinstance(value, Mapping) and all(
        key in RATE_NAMES and isinstance(rate, (int, float)) and rate > 0
        for key, rate in value.items()
    )
    if not valid:
        raise OptionError.value(name, value, f"a dict of positive numbers by {list(RATE_NAMES)}")
    return tuple((key, float(rate)) for key, rate in value.items())  # type: ignore[attr-defined]


def path(name: str, value: object) -> str | None:
    """A path, or none."""
    if value is None or isinstance(value, (str, os.PathLike)):
        return None if value is None else os.fspath(value)
    raise OptionError.value(name, value, "a path, or None")
