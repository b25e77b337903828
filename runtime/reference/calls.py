"""Definition of the operator that makes several calls of operators in one.

Which calls is text, so that a graph, a dump and a profile show it and a compile cache sees it::

    %2 %3 = hot::quantize_rows ( %0! 8 True True False None ) ; ... ; return %9 %8

Words are apart by one space. ``%n`` is a tensor: the operands come first, in order; then what calls
make (``_``: nothing reads it). Where it is read for the last time it is ``%n!``: it is let go then.
``$n`` is one of the sizes. The rest are constants: ``8``, ``True``, ``None``, ``bfloat16``, a list
``[ 2 $0 ]``. ``?`` stands before what is given for an optional argument: native code does not see
the operator's schema. Operators have no overloads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.bool),
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64),
)
CONSTANTS: dict[str, Any] = {str(dtype).removeprefix("torch."): dtype for dtype in _DTYPES}
"""By their words; whole numbers besides."""
CONSTANTS |= {"True": True, "False": False, "None": None}


def layer_calls(operands: Sequence[Tensor], sizes: Sequence[int], calls: str) -> list[Tensor]:
    """What the operators of ``calls`` make of ``operands``, called in order.

    A tensor that a call makes is let go as soon as its last reader is done.

    Raises:
        ValueError: ``calls`` is no list of calls, or reads what it is not given.
    """
    words = iter(calls.split(" "))
    known = CONSTANTS | {f"%{n}": tensor for n, tensor in enumerate(operands)}
    known |= {f"${n}": size for n, size in enumerate(sizes)}
    try:
        while (word := next(words)) != "return":
            results = [word, *iter(words.__next__, "=")]
            space, _, name = next(words).partition("::")
            operator = getattr(getattr(torch.ops, space), name).default
            _expect(words, "(")
            made = operator(*_arguments(words, known, ")"))
            _expect(words, ";")
            parts = made if isinstance(made, (tuple, list)) else (made,)
            known |= {n: p for n, p in zip(results, parts, strict=True) if n != "_"}
            del made, parts
        returned = [known[word] for word in words]
    except (AttributeError, KeyError, StopIteration, ValueError) as error:
        expected = "calls, and 'return' with what exists"
        raise ValueError(f"got {calls!r}; expected {expected} ({error!r})") from error
    if not returned:
        raise ValueError(f"got {calls!r}; expected 'return %n' at its end")
    return returned


def _expect(words: Iterator[str], word: str) -> None:
    if (got := next(words)) != word:
        raise ValueError(f"{got} is no {word}")


def _arguments(words: Iterator[str], known: dict[str, Any], end: str) -> Iterator[Any]:
    while (word := next(words, end)) != end:
        if word == "[":
            yield list(_arguments(words, known, "]"))
        elif word.endswith("!"):
            yield known.pop(word.removesuffix("!"))
        elif word != "?":
            yield known[word] if word in known else int(word)


def argument_words(value: Any, names: Mapping[Any, str]) -> Iterator[str]:
    """The words for an argument; ``names``: of tensors and sizes.

    Raises:
        TypeError: there are none for it.
    """
    if isinstance(value, (list, tuple)):
        yield "["
        for item in value:
            yield from argument_words(item, names)
        yield "]"
        return
    word = names.get(value) or str(value).removeprefix("torch.")
    if word not in CONSTANTS and type(value) is not int and value not in names:
        expected = "a tensor, a whole number, a dtype, None or a list"
        raise TypeError(f"got {value!r}; expected {expected}")
    yield word
