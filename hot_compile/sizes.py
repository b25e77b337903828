"""Sizes of memory, and times, as people write them."""

from __future__ import annotations

import re

from .errors import OptionError

_UNITS = {"GiB": 2**30, "MiB": 2**20, "GB": 10**9, "MB": 10**6}


def memory_bytes(text: str, option: str = "memory") -> int:
    """``24GiB`` as bytes.

    Args:
        text: a number with a unit.
        option: what it was given for.

    Raises:
        OptionError: no number with a unit.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    if match is None or match[2] not in _UNITS:
        expected = f"a number with {', '.join(_UNITS)}, e.g. 24GiB"
        raise OptionError.value(option, text, expected)
    return int(float(match[1]) * _UNITS[match[2]])


def memory_text(count: int) -> str:
    """``count`` bytes as text, in the unit that suits them."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def time_text(seconds: float) -> str:
    """``seconds`` as text of three digits, in the unit that suits them."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
