"""What a strategy costs: FLOPs and bytes in L, O, I (sympy), priced by one table of device rates.

The paper's overhead count (supplementary D, table 5) is the start; here every pass over memory is
counted too, because on real hardware the transforms are bound by bytes, not by additions.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import sympy
import torch

from hot_compile.config import Strategy
from hot_compile.passes.layers.strategies import STRATEGIES, How, Spec
from hot_compile.runtime.reference.sizes import HADAMARD_ORDER

L, O, I, E, R = sympy.symbols("L O I element rank", positive=True)  # noqa: E741
"""Rows, outputs, inputs, bytes of one element of g_y / x / W, and HLA's rank (of 16)."""
VARIABLES = (L, O, I, E, R)
ZERO, ONE = sympy.Integer(0), sympy.Integer(1)
PACKING = sympy.Rational(3, 2)
"""Bytes moved to pack an INT8 value two to a byte."""
_AT_ONCE = 1e9
"""Times as fast as it is, a device takes next to no time; which of its rates is higher stays."""
_SIXTEEN_BITS = ("bfloat16", "float16")
_MOST_ROWS = 2**24
"""More than any step has."""


@dataclasses.dataclass(frozen=True)
class Rates:
    """What one device sustains. Only their ratios matter to a decision.

    ``exact``: FLOP/s of a product by dtype name; ``integer``, ``int4``: OP/s of the INT8 and INT4
    products (equal where INT4 is carried as INT8); ``transform``: bytes/s of our transform and
    quantise kernels (bytes read and written); ``launch``: seconds per operator call.

    A GPU works while the host goes on, so there a layer takes what the device takes or what the
    host's launches take, whichever is longer: ``asynchronous``. ``start``: what a kernel costs the
    device besides, until its first values arrive and after its last leave.
    """

    exact: dict[str, float]
    integer: float
    int4: float
    transform: float
    launch: float
    convolution: dict[str, float] = dataclasses.field(default_factory=dict)
    """FLOP/s of exact convolutions by dtype; empty: none is rewritten on this device."""
    unfold: float = 1e12
    """Elements/s laid out and transformed as a kernel's offsets see them."""
    fold: float = 1e12
    """Elements/s of a kernel's products added up into g_x."""
    copy: float = 1e12
    """Bytes/s of a copy, read and written."""
    packing: float = 1e12
    """Bytes/s, read and written, of a kernel that packs a tensor to bytes or restores it."""
    coding: float = 0.0
    """Elements/s that a kernel which does something else as well codes on its way, or restores; 0:
    as long as ``packing`` takes longer than ``copy``."""
    power: float = 0.0
    """What 16-bit products cost a step beyond their own time, as a share of it: what they draw
    slows down all of a step, where integer products let it run at a higher clock. Not on every
    device alike (ADR 37), so it may choose a layer's way, and pays for nothing else."""
    host_copy: float = 0.0
    """Bytes/s of a copy to pinned host memory, or back; 0: it has no memory of its own."""
    int32_result: bool = False
    """The product leaves int32 in memory, to be scaled by a pass of its own (no fused epilogue)."""
    asynchronous: bool = False
    start: float = 0.0
    idle: float = 0.0
    """What a kernel takes, whatever its size, that has too little to do to fill the device: one
    that goes down the columns of a weight, or over the scales of a rescaling."""
    one_read: bool = False
    """One 8-bit quantisation of g_y for both products is faster than one for each."""
    source: str = dataclasses.field(default="", compare=False, repr=False)
    """Where the rates come from, in words."""

    def override(self, rates: dict[str, float]) -> Rates:
        """The same device with some rates replaced: dtype names set ``exact``, the rest fields."""
        exact = {dtype: rates.get(dtype, rate) for dtype, rate in self.exact.items()}
        fields = {name: rate for name, rate in rates.items() if name not in exact}
        source = ", ".join([self.source, *(f"{name} by option" for name in rates)])
        return dataclasses.replace(self, exact=exact, source=source, **fields)  # type: ignore[arg-type]

    def by_launch(self) -> Rates:
        """The same device where it waits for its host: nothing but calls takes time."""
        source = f"{self.source}, by launches alone: the device waits for its host"
        names = ("integer", "int4", "transform", "unfold", "fold")
        speeds: dict[str, Any] = {name: getattr(self, name) * _AT_ONCE for name in names}
        for name in ("exact", "convolution"):
            known = getattr(self, name)
            speeds[name] = {dtype: rate * _AT_ONCE for dtype, rate in known.items()}
        return dataclasses.replace(self, start=0.0, idle=0.0, source=source, **speeds)


Pricing = Callable[[torch.device], Rates | str]
"""Rates of a device, or the reason why nothing can run there."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """One side of a comparison, symbolic: floating, INT8 and INT4 operations, bytes moved by
    passes, elements that integer products write, operator calls, and kernels that leave the device
    idle.
    """

    flops: sympy.Expr = ZERO
    int_ops: sympy.Expr = ZERO
    int4_ops: sympy.Expr = ZERO
    bytes: sympy.Expr = ZERO
    results: sympy.Expr = ZERO
    calls: int = 0
    idle: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(*map(operator.add, vars(self).values(), vars(other).values()))


def exact_cost(products: int, summed: bool = False) -> Cost:
    """Exact products of a layer's backward, ``products`` of them; ``summed``: and g_b, for which
    Inductor reads all of g_y once more (it works out what g_y is made of a second time)."""
    read = L * O * E if summed else ZERO
    return Cost(flops=2 * L * O * I * products, bytes=read, calls=products + summed)


def exact_backward(how: How) -> Cost:
    """All that ``how`` wants of a layer, left exact."""
    return exact_cost(how.gx + how.gw, how.summed)


class Entry(NamedTuple):
    """One operator on a bill."""

    cost: Cost
    read: tuple[Sized, ...]
    made: tuple[Sized, ...]


@dataclasses.dataclass(frozen=True)
class Sized:
    """In the place of a 2-D tensor in a strategy's function: its size, and a bill to add costs to.

    An operator called on it computes nothing; what it costs goes on the bill, by ``PRICES``.
    """

    bill: list[Entry]
    rows: sympy.Expr
    columns: sympy.Expr
    element: sympy.Expr = E
    """Bytes of one value."""

    @property
    def values(self) -> sympy.Expr:
        """How many there are."""
        return self.rows * self.columns

    @property
    def bytes(self) -> sympy.Expr:
        """What it takes in memory."""
        return self.values * self.element

    def like(self, rows: Any, columns: Any, element: Any) -> Sized:
        """Another tensor on the same bill."""
        return Sized(self.bill, sympy.sympify(rows), sympy.sympify(columns), element)

    @property
    def shape(self) -> tuple[sympy.Expr, sympy.Expr]:
        """As a tensor has it."""
        return self.rows, self.columns

    @classmethod
    def __torch_function__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Put ``op`` on the bill and give its results' sizes."""
        cost, results = PRICES[op](*args, **(kwargs or {}))
        read, made = (
            tuple(a for a in given if isinstance(a, Sized))
            for given in (args, results if isinstance(results, tuple) else (results,))
        )
        read[0].bill.append(Entry(cost, read, made))
        return results


def _moved(*sized: Sized, calls: int = 1, idle: int = 0, again: sympy.Expr = ZERO) -> Cost:
    """Each of ``sized`` read or written once, and bytes that are moved ``again``."""
    return Cost(bytes=sum((s.bytes for s in sized), again), calls=calls, idle=idle)


def _vector(x: Sized, length: sympy.Expr, element: int = 4) -> Sized:
    return x.like(length, 1, sympy.Integer(element))


def _kept_rows(x: Sized, rank: int) -> sympy.Expr:
    return x.rows * sympy.Rational(rank or HADAMARD_ORDER, HADAMARD_ORDER)


def _integers(x: Sized, rows: Any, columns: Any, packed: bool = False) -> Sized:
    return x.like(rows, columns, sympy.Rational(1, 2) if packed else ONE)


def _quantize_rows(
    x: Sized, bits: int, per_row: bool, stochastic: bool, packed: bool = False
) -> Any:
    q = _integers(x, x.rows, x.columns, packed)
    return _moved(x, q), (q, _vector(x, x.rows))


def _quantize_columns(
    x: Sized,
    rank: int,
    tokens: int,
    bits: int,
    per_column: bool,
    stochastic: bool,
    packed: bool = False,
) -> Any:
    """Read twice unless transformed, because columns need their absmax first."""
    q = _integers(x, x.columns, _kept_rows(x, rank))
    twice = ZERO if rank else x.bytes
    cost = _moved(x, q, again=twice + PACKING * q.values * int(packed))
    q = _integers(q, q.rows, q.columns, packed)
    return cost, (q, _vector(x, x.columns))


def _quantize_grad(
    g: Sized,
    bits: int,
    per_row: bool,
    rank: int,
    tokens: int,
    per_column: bool,
    packed: bool = False,
) -> Any:
    rows = _integers(g, g.rows, g.columns, packed)
    columns = _integers(g, g.columns, _kept_rows(g, rank))
    scales = _vector(g, g.rows), _vector(g, g.columns)
    return _moved(g, g, rows, columns), (rows, scales[0], columns, scales[1])


def _quantize_one_read(
    g: Sized, rank: int, tokens: int, summed: bool = False, fused: bool = False
) -> Any:
    rows = _integers(g, g.rows, g.columns)
    columns = _integers(g, g.columns, _kept_rows(g, rank))
    vectors = [_vector(g, n) for n in (columns.columns, columns.columns, g.columns, g.columns)]
    return _moved(g, rows, columns, calls=2), (rows, _vector(g, g.rows), columns, *vectors)


def _compress_int8(x: Sized, rank: int, tokens: int) -> Any:
    q = _integers(x, x.columns, _kept_rows(x, rank))
    return _moved(x, q), (q, _vector(x, x.columns, 2))


def _rescale_int8(stored: Sized, scale: Sized, *fold: Sized) -> Any:
    return _moved(stored, stored, idle=1), (stored, _vector(stored, stored.rows))


def _scaled_int_mm(a: Sized, b: Sized, *epilogue: Any) -> Any:
    operations, result = 2 * a.values * b.rows, a.like(a.rows, b.rows, E)
    if a.element == ONE:
        return Cost(int_ops=operations, results=result.values, calls=1), result
    return Cost(int4_ops=operations, results=result.values, calls=1), result


def _hadamard_int_mm(
    a: Sized,
    equal: Sized,
    b: Sized,
    scale: Sized,
    outputs: Any,
    outputs_last: bool,
    dtype: Any,
) -> Any:
    """Priced as where the sums go through memory, since the transform needs 16 of them. Hopper's
    products in bf16 have it in their epilogue, so this is too much there."""
    cost, result = _scaled_int_mm(*((b, a) if outputs_last else (a, b)))
    sums = result.like(result.rows, result.columns, sympy.Integer(4))
    return cost + _moved(sums, sums, result), result


def _mul(a: Sized, b: Sized) -> Any:
    return _moved(a, a), a


def _same(x: Sized, *args: Any) -> Any:
    return Cost(), x


def _permute(x: Sized, order: Any) -> Any:
    return Cost(), x.like(x.columns, x.rows, x.element)


def _exact_product(a: Sized, b: Sized, method: str, rank: int) -> Any:
    return exact_cost(1), a  # fake-quantised: nothing is gained


_hot, _baseline = torch.ops.hot, torch.ops.hot_baseline
PRICES: dict[Any, Callable[..., tuple[Cost, Any]]] = {
    _hot.quantize_rows.default: _quantize_rows,
    _hot.quantize_columns.default: _quantize_columns,
    _hot.quantize_grad.default: _quantize_grad,
    _hot.quantize_one_read.default: _quantize_one_read,
    _hot.compress_int8.default: _compress_int8,
    _hot.rescale_int8.default: _rescale_int8,
    _hot.scaled_int_mm.default: _scaled_int_mm,
    _hot.hadamard_int_mm.default: _hadamard_int_mm,
    torch.ops.aten.permute.default: _permute,
    torch.ops.aten.mul.Tensor: _mul,
    torch.ops.aten.slice.Tensor: _same,
    torch.ops.aten.unsqueeze.default: _same,
    _baseline.grad_input.default: _exact_product,
    _baseline.grad_weight.default: _exact_product,
}
"""Every operator that strategies call: (what it costs, sizes of its results) of its arguments."""


def layer_cost(strategy: Strategy, how: How) -> Cost:
    """All that ``strategy`` does in a layer's backward, exact products that it leaves included."""
    return _layer_bill(STRATEGIES[strategy], how)[0]


def layer_bytes(strategy: Strategy, how: How, shape: Shape) -> int:
    """The most bytes that ``strategy`` takes at once beside its operands, of which g_y's are free
    once it is read."""
    return int(at(_layer_bill(STRATEGIES[strategy], how)[1], shape))


@cache
def _layer_bill(spec: Spec, how: How) -> tuple[Cost, sympy.Expr]:
    """What a layer's backward costs, and the most bytes at once beside its operands."""
    bill: list[Entry] = []
    g, x, weight = Sized(bill, L, O), Sized(bill, L, I), Sized(bill, O, I)
    if how.weight_is_io:
        weight = Sized(bill, I, O)
    found = spec(g, x, weight, how)  # type: ignore[arg-type]
    left = (how.gx and found.gx is None) + (how.gw and found.gw is None)
    cost = exact_cost(left, how.summed and found.sums is None)
    return sum((entry.cost for entry in bill), cost), _most(bill, found, g)


def _most(bill: list[Entry], results: tuple[Any, ...], g: Sized) -> sympy.Expr:
    """Bytes, each from where it is made to where it is last read; ``results`` to the end."""
    memory: dict[int, list[Any]] = {id(g): [g.bytes, 0, 0]}  # bytes, first, last
    spans = list(memory.values())
    for place, entry in enumerate([*bill, Entry(Cost(), results, ())]):
        own = [memory[id(a)] for a in entry.read if id(a) in memory]
        for span in own:
            span[2] = place
        for made in entry.made:
            if entry.cost.calls:
                memory[id(made)] = [made.bytes, place, place]
                spans.append(memory[id(made)])
            elif own:  # a view
                memory[id(made)] = own[0]
    at_once = (
        sum(size for size, first, last in spans if first <= place <= last) - g.bytes
        for place in range(len(bill))
    )
    return sympy.Max(0, *at_once, evaluate=False)


def seconds(cost: Cost, rates: Rates, dtype: str) -> sympy.Expr:
    """Predicted time, still symbolic in L, O, I: products at their rate plus passes at theirs."""
    device = (
        cost.flops / rates.exact[dtype]
        + cost.int_ops / rates.integer
        + cost.int4_ops / rates.int4
        + (cost.bytes + cost.results * (8 * rates.int32_result + E)) / rates.transform
        + cost.calls * rates.start
        + cost.idle * rates.idle
    )
    host = cost.calls * rates.launch
    # unevaluated: sympy would try to find out which of both is larger, 10 ms a layer
    return sympy.Max(device, host, evaluate=False) if rates.asynchronous else device + host


@dataclasses.dataclass(frozen=True)
class Shape:
    """Numbers for the symbols: one layer's L, O, I, element bytes and HLA rank."""

    rows: int
    outputs: int
    inputs: int
    element: int
    rank: int = 8

    @property
    def numbers(self) -> Numbers:
        """By symbol."""
        return dict(zip(VARIABLES, dataclasses.astuple(self), strict=True))


Numbers = dict[sympy.Symbol, float]
"""One layer's, for each symbol."""


def at(expression: sympy.Expr, layer: Shape | Numbers) -> float:
    """The value of ``expression`` for one layer."""
    numbers = layer.numbers if isinstance(layer, Shape) else layer
    return float(_function(sympy.sympify(expression), tuple(numbers))(*numbers.values()))


@cache
def _function(expression: sympy.Expr, symbols: tuple[sympy.Symbol, ...]) -> Callable[..., float]:
    function: Callable[..., float] = sympy.lambdify(symbols, expression, "math")
    return function


@dataclasses.dataclass(frozen=True)
class Price:
    """Predicted seconds of a layer's backward, or forward, on one device: exact, and ours."""

    exact: sympy.Expr
    ours: sympy.Expr
    numbers: Numbers
    counted: int
    """How many rows these are of, or samples."""
    grows: tuple[sympy.Symbol, ...] = (L,)
    """What there is more of with more of those."""
    power: float = 0.0
    """``Rates.power``, where the exact products draw it: weighed in the gain, in no seconds."""

    def times(self, count: int | None = None) -> tuple[float, float]:
        """(exact's, ours), of so many rows or samples."""
        numbers = self.numbers
        if count is not None:
            numbers = numbers | {s: numbers[s] * count // self.counted for s in self.grows}
        return at(self.exact, numbers), at(self.ours, numbers)

    def gain(self, count: int | None = None, beside: float = 0.0) -> float:
        """How many times faster than exact it is, if ours takes ``beside`` seconds more."""
        exact, ours = self.times(count)
        ours += beside
        return (1 + self.power) * exact / ours if ours else 1.0

    def pays_from(self, least: float) -> int | None:
        """From how many rows or samples on it is ``least`` times faster; None: from none.

        What a layer does whatever its rows are (launches, the weight's quantisation) weighs less
        the more there are, so the gain only rises. Here it is too small.
        """
        if not self.counted:
            return None
        # rounded as a decision's gain is, which is judged by that
        return _first(lambda n: round(self.gain(n), 3) >= least, self.counted, _MOST_ROWS)


def layer_price(strategy: Strategy, how: How, rates: Rates, dtype: str, shape: Shape) -> Price:
    """Of a Linear's backward."""
    exact = seconds(exact_backward(how), rates, dtype)
    ours = seconds(layer_cost(strategy, how), rates, dtype)
    power = rates.power if dtype in _SIXTEEN_BITS else 0.0
    return Price(exact, ours, shape.numbers, shape.rows, power=power)


def _first(pays: Callable[[int], bool], low: int, high: int) -> int | None:
    """The least number above ``low`` that pays, up to ``high``; None if not even that does.

    What pays once pays for every larger number.
    """
    if low >= high or not pays(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high
