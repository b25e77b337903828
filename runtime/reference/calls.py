"""Definition of the operator that makes several calls of operators in one, and its list of them.

The list is text, so that a graph, a dump and a profile show it and a compile cache sees it::

    %2 %3 = hot::quantize_rows(%0, 8, True, True, False); ...; return %9 %8

``%n`` is a tensor: the operands come first, in order; then what calls make (``_``: nothing reads
it). ``$n`` is one of the sizes. The rest are constants: ``8``, ``0.5``, ``True``, ``None``,
``bfloat16``, a list ``[2, $0]``. ``?`` stands before what is given for an optional argument:
native code does not see the operator's schema.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import math
import re
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.bool),
        *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64),
    )
}
"""By the name that a list of calls has for it."""

_CALL = re.compile(r"((?:(?:%\d+|_) )+)= (\w+::\w+)(?:\.(\w+))?\((.*)\)")
_RETURN = re.compile(r"return((?: %\d+)+)")
_ARGUMENT = re.compile(r"\??\[[^\]]*\]|[^,\s]+")


@dataclasses.dataclass(frozen=True)
class _Numbered:
    """What a list of calls names by a sign and a number."""

    sign: ClassVar[str]
    number: int

    def __str__(self) -> str:
        return f"{self.sign}{self.number}"


class Value(_Numbered):
    """One of the tensors."""

    sign = "%"


class Size(_Numbered):
    """One of the sizes."""

    sign = "$"


@dataclasses.dataclass(frozen=True)
class Optional:
    """A given argument of an optional type."""

    given: Any

    def __str__(self) -> str:
        return f"?{argument_text(self.given)}"


@dataclasses.dataclass(frozen=True)
class Call:
    """One call: what it makes, by number (None: nothing reads it), the operator, its arguments."""

    results: tuple[int | None, ...]
    operator: str
    """``namespace::name``, or with its overload ``namespace::name.overload``."""
    arguments: tuple[Any, ...]

    def __str__(self) -> str:
        made = " ".join("_" if n is None else f"%{n}" for n in self.results)
        return f"{made} = {self.operator}({', '.join(map(argument_text, self.arguments))})"


@dataclasses.dataclass(frozen=True)
class Calls:
    """Calls in order, and the numbers of the tensors that are handed back."""

    calls: tuple[Call, ...]
    returned: tuple[int, ...]

    def __str__(self) -> str:
        given = " ".join(f"%{number}" for number in self.returned)
        return "; ".join([*map(str, self.calls), f"return {given}"])


def argument_text(value: Any) -> str:
    """An argument as a list of calls has it. Raises TypeError for what it has no form for."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(argument_text, value))}]"
    if isinstance(value, torch.dtype) and value in DTYPES.values():
        return str(value).removeprefix("torch.")
    if isinstance(value, float) and math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (bool, int, _Numbered, Optional)):
        return str(value)
    raise TypeError(f"got {value!r}; expected a tensor, a number, a dtype, None or a list")


@functools.lru_cache(maxsize=256)
def parse(text: str) -> Calls:
    """The inverse of ``str``. Raises ValueError that says what was got."""
    *statements, last = text.split("; ")
    calls = tuple(map(_call, statements))
    found = _RETURN.fullmatch(last)
    if not found:
        raise ValueError(f"got {last!r} at the end of calls; expected 'return %n ...'")
    return Calls(calls, tuple(_number(word) for word in found[1].split()))


def _call(text: str) -> Call:
    found = _CALL.fullmatch(text)
    if not found:
        raise ValueError(f"got the call {text!r}; expected '%n ... = space::name(...)'")
    made, name, overload, arguments = found.groups()
    results = tuple(None if word == "_" else _number(word) for word in made.split())
    operator = f"{name}.{overload}" if overload else name
    return Call(results, operator, tuple(map(_argument, _ARGUMENT.findall(arguments))))


def _number(word: str) -> int:
    return int(word.removeprefix("%"))


def _argument(word: str) -> Any:
    if word.startswith("["):
        return [_argument(item) for item in _ARGUMENT.findall(word[1:-1])]
    if word.startswith("?"):
        return Optional(_argument(word[1:]))
    for kind in (Value, Size):
        if word[0] == kind.sign and word[1:].isdigit():
            return kind(int(word[1:]))
    if word in DTYPES:
        return DTYPES[word]
    try:
        return ast.literal_eval(word)
    except (ValueError, SyntaxError):
        raise ValueError(
            f"got the argument {word!r} in calls; expected %n, $n, a number, True, False, None or "
            f"one of {', '.join(DTYPES)}"
        ) from None


def layer_calls(operands: Sequence[Tensor], sizes: Sequence[int], calls: str) -> list[Tensor]:
    """What the operators of ``calls`` make of ``operands``, called in order.

    A tensor that a call makes is let go as soon as its last reader is done.

    Raises:
        ValueError: ``calls`` is no list of calls, or reads what it is not given.
    """
    listed = parse(calls)
    values: dict[int, Tensor] = dict(enumerate(operands))
    last = _last_readers(listed)
    for place, call in enumerate(listed.calls):
        values |= _made(call, values, sizes)
        for number in [number for number in values if last.get(number, -1) <= place]:
            del values[number]
    return [_given(Value(number), values, sizes, "return") for number in listed.returned]


def _made(call: Call, values: dict[int, Tensor], sizes: Sequence[int]) -> dict[int, Tensor]:
    """What one call makes that is read, by number."""
    made = _overload(call.operator)(*(_given(a, values, sizes, call) for a in call.arguments))
    results = made if isinstance(made, (tuple, list)) else (made,)
    if len(results) != len(call.results):
        raise ValueError(f"got {call}; expected {len(results)} results of {call.operator}")
    return {n: r for n, r in zip(call.results, results, strict=True) if n is not None}


def _last_readers(listed: Calls) -> dict[int, int]:
    """By tensor: the place of the call that reads it last; past all calls if it is returned."""
    last = {}
    for place, call in enumerate(listed.calls):
        for given in call.arguments:
            given = given.given if isinstance(given, Optional) else given
            if isinstance(given, Value):
                last[given.number] = place
    return last | dict.fromkeys(listed.returned, len(listed.calls))


def _given(argument: Any, values: dict[int, Tensor], sizes: Sequence[int], where: object) -> Any:
    if isinstance(argument, Optional):
        argument = argument.given
    if isinstance(argument, list):
        return [_given(item, values, sizes, where) for item in argument]
    if isinstance(argument, Value):
        if argument.number not in values:
            raise ValueError(f"got {argument} in {where}; expected a tensor that exists there")
        return values[argument.number]
    if isinstance(argument, Size):
        if argument.number >= len(sizes):
            raise ValueError(f"got {argument} in {where}; expected one of {len(sizes)} sizes")
        return sizes[argument.number]
    return argument


def _overload(operator: str) -> Any:
    """``aten::slice.Tensor`` -> ``torch.ops.aten.slice.Tensor``."""
    space, _, name = operator.partition("::")
    name, _, overload = name.partition(".")
    return getattr(getattr(getattr(torch.ops, space), name), overload or "default")
