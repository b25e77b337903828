"""Elementwise operators that Inductor writes into its kernels, by formulas that use a value often.

Written as nodes, such a formula would cost time to compile: Inductor evaluates a node once for
every use, and so do those below it, down to what was stored. In one operator it does so once.

* ``hot::restored``: numbers from the whole codes that ``passes/storage/pack.py`` makes.
* ``hot::fourth_power``: the same of codes none of which says that it is not finite, unscaled.
* ``hot::short_function``: functions in fewer instructions than a GPU's library takes for fp32;
  ``passes/exact/functions.py`` says where they may stand.

Each formula serves as the definition, by torch's functions, and as a kernel's code, by Inductor's
``ops``. Importing this registers the operators.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Number = Callable[[float], Any]

WHOLE, WHOLE_WORD = 1.5 * 2.0**23, 0x4B400000
"""fp32's numbers from here on are whole, and the last bits of a sum with this one are the other
summand; and this number's bits."""

_LOG2_E = 1.4426950408889634
_ERF_SLOPE = 0.3275911
_ERF = (-1.061405429, 1.453152027, -1.421413741, 0.284496736, -0.254829592)

_LIBRARY = torch.library.Library("hot", "FRAGMENT")
for _schema in (
    "restored(Tensor code, Tensor scale, int levels, bool root) -> Tensor",
    "fourth_power(Tensor code) -> Tensor",
    "short_function(Tensor x, str name) -> Tensor",
):
    _LIBRARY.define(_schema, tags=(torch.Tag.pointwise,))


def decoded(code: Any, scale: Any, do: Any, number: Number, levels: int, root: bool) -> Any:
    """``code`` (whole, fp32) over ``levels``, if ``root`` its fourth power with its sign, times
    ``scale``, which so comes back as it was: 1 - t² of a saturated tanh is 0.

    Codes beyond ``levels`` say infinity, -levels - 2 says NaN.
    """
    share = do.mul(code, number(1.0 / levels))
    value = do.mul(_fourth(share, do) if root else share, scale)
    nan = do.le(code, number(-levels - 2.0))
    special = do.where(nan, number(math.nan), do.mul(code, number(math.inf)))
    return do.where(do.le(do.abs(code), number(float(levels))), value, special)


def _fourth(x: Any, do: Any) -> Any:
    """The fourth power of ``x`` with its sign."""
    return do.mul(do.mul(x, do.abs(x)), do.mul(x, x))


def _over(do: Any, divisor: Any) -> Any:
    """1 / ``divisor``, which is at least 1: a GPU has an instruction for its root."""
    root = do.rsqrt(divisor)
    return do.mul(root, root)


def _exp(x: Any, do: Any, number: Number, factor: float = 1.0) -> Any:
    """e to the ``factor * x``."""
    return do.exp2(do.mul(x, number(factor * _LOG2_E)))


def _erf(x: Any, do: Any, number: Number) -> Any:
    """Abramowitz and Stegun, Handbook of Mathematical Functions, formula 7.1.26."""
    one = number(1.0)
    t = _over(do, do.add(do.mul(do.abs(x), number(_ERF_SLOPE)), one))
    first, *rest = map(number, _ERF)
    total = do.mul(t, first)
    for factor in rest:
        total = do.mul(do.add(total, factor), t)
    tail = do.mul(total, _exp(do.mul(x, x), do, number, -1.0))
    return do.copysign(do.add(tail, one), x)


def _tanh(x: Any, do: Any, number: Number) -> Any:
    share = _over(do, do.add(_exp(x, do, number, 2.0), number(1.0)))
    return do.add(do.mul(share, number(-2.0)), number(1.0))


def _sigmoid(x: Any, do: Any, number: Number) -> Any:
    return _over(do, do.add(_exp(x, do, number, -1.0), number(1.0)))


FORMS: dict[str, Callable[[Any, Any, Number], Any]] = {
    "erf": _erf,
    "tanh": _tanh,
    "sigmoid": _sigmoid,
    "exp": _exp,
}


def _restored(code: Tensor, scale: Tensor, levels: int, root: bool) -> Tensor:
    """fp32 numbers from whole ``code`` and what ``scale`` (fp32) broadcasts to it."""
    return decoded(code.float(), scale, torch, float, levels, root)


def _fourth_power(code: Tensor) -> Tensor:
    """The fourth power of whole ``code`` with its sign, fp32."""
    return _fourth(code.float(), torch)


def _short_function(x: Tensor, name: str) -> Tensor:
    """``name`` of fp32 ``x``, elementwise."""
    return FORMS[name](x, torch, float)


for _device in ("CPU", "CUDA"):
    _LIBRARY.impl("restored", _restored, _device)
    _LIBRARY.impl("fourth_power", _fourth_power, _device)
    _LIBRARY.impl("short_function", _short_function, _device)
torch.library.register_fake("hot::restored")(lambda code, scale, levels, root: code * scale)
torch.library.register_fake("hot::fourth_power")(lambda code: code.float())
torch.library.register_fake("hot::short_function")(lambda x, name: x.abs())


def taught(register: Callable[[], None]) -> Callable[[], bool]:
    """``register``, run once: it teaches Inductor operators; the result says whether it could.

    Lowerings are no stable API. Where they are not found, Inductor calls the operators as they
    are: as right, and slower.
    """

    @functools.cache
    def lowered() -> bool:
        try:
            register()
        except (ImportError, AttributeError):
            return False
        return True

    return lowered


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    """Inductor does not count what is done here.

    It writes a value to memory that takes more than 30 operations and has several readers. What
    restoring or a short function takes is no reason for that: it would be written in fp32, in more
    bytes than storing it saves. All else is written as ever: gathering a gradient out of a rotary
    embedding's parts in the kernel that turns it round took a GPT-NeoX 9 % of its step (H100).
    """
    from torch._inductor.ops_handler import OpCounterCSE
    from torch._inductor.virtualized import V

    counter = V.get_ops_handler()
    if not isinstance(counter, OpCounterCSE):
        yield
        return
    with V.set_ops_handler(counter.parent_handler):
        yield


def as_number(code: Any, on_gpu: bool) -> Any:
    """Inductor's value ``code``, whole and below 2 ** 22 in size, as fp32.

    On a GPU by an addition to its bits: a conversion takes it eight times as long.
    """
    from torch._inductor.virtualized import ops

    if not on_gpu:
        return ops.to_dtype(code, torch.float32)
    bits = ops.add(ops.to_dtype(code, torch.int32), ops.constant(WHOLE_WORD, torch.int32))
    number = ops.to_dtype_bitcast(bits, torch.float32, torch.int32)
    return ops.sub(number, ops.constant(WHOLE, torch.float32))


@taught
def lowered() -> None:
    """Teach Inductor these operators."""
    from torch._inductor.lowering import make_pointwise, register_lowering
    from torch._inductor.virtualized import ops

    number = functools.partial(ops.constant, dtype=torch.float32)

    def of_code(code: Any, element: Callable[..., Any], *others: Any) -> Any:
        on_gpu = code.get_device().type == "cuda"

        def restored(value: Any, *rest: Any) -> Any:
            with uncounted():
                return element(as_number(value, on_gpu), *rest)

        return make_pointwise(restored, override_return_dtype=torch.float32)(code, *others)

    @register_lowering(torch.ops.hot.short_function.default, type_promotion_kind=None)
    def _(x: Any, name: str) -> Any:
        def element(value: Any) -> Any:
            with uncounted():
                return FORMS[name](value, ops, number)

        return make_pointwise(element)(x)

    @register_lowering(torch.ops.hot.fourth_power.default, type_promotion_kind=None)
    def _(code: Any) -> Any:
        return of_code(code, lambda value: _fourth(value, ops))

    @register_lowering(torch.ops.hot.restored.default, broadcast=True, type_promotion_kind=None)
    def _(code: Any, scale: Any, levels: int, root: bool) -> Any:
        return of_code(code, lambda c, s: decoded(c, s, ops, number, levels, root), scale)
