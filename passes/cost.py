"""What a strategy costs: FLOPs and bytes in L, O, I (sympy), priced by one table of device rates.

The paper's overhead count (supplementary D, table 5) is the start; here every pass over memory is
counted too, because on real hardware the transforms are bound by bytes, not by additions.
"""

from __future__ import annotations

import dataclasses
from functools import cache

import sympy

from hot_compile.config import BASELINES, Strategy

L, O, I, E, R = sympy.symbols("L O I element rank", positive=True)  # noqa: E741
"""Rows, outputs, inputs, bytes of one element of g_y / x / W, and HLA's rank (of 16)."""
VARIABLES = (L, O, I, E, R)
ZERO = sympy.Integer(0)
PACKING = sympy.Rational(3, 2)
"""Bytes moved to pack an INT8 value two to a byte."""
INT4_BYTES = sympy.Rational(17, 32)
"""Packed INT4 with a bf16 scale and minimum per 128 rows."""


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
    int32_result: bool = False
    """The product leaves int32 in memory, to be scaled by a pass of its own (no fused epilogue)."""
    asynchronous: bool = False
    start: float = 0.0
    one_read: bool = False
    """One 8-bit quantisation of g_y for both products is faster than one for each."""

    def override(self, rates: dict[str, float]) -> Rates:
        """The same device with some rates replaced: dtype names set ``exact``, the rest fields."""
        exact = {dtype: rates.get(dtype, rate) for dtype, rate in self.exact.items()}
        fields = {name: rate for name, rate in rates.items() if name not in exact}
        return dataclasses.replace(self, exact=exact, **fields)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class Cost:
    """One side of a comparison, symbolic: floating, INT8 and INT4 operations, bytes moved by
    passes, elements that integer products write, operator calls.
    """

    flops: sympy.Expr = ZERO
    int_ops: sympy.Expr = ZERO
    int4_ops: sympy.Expr = ZERO
    bytes: sympy.Expr = ZERO
    results: sympy.Expr = ZERO
    calls: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.flops + other.flops,
            self.int_ops + other.int_ops,
            self.int4_ops + other.int4_ops,
            self.bytes + other.bytes,
            self.results + other.results,
            self.calls + other.calls,
        )


def exact_cost(gx: bool, gw: bool) -> Cost:
    """Both exact products of a layer's backward."""
    products = int(gx) + int(gw)
    return Cost(flops=2 * L * O * I * products, calls=products)


def gx_cost(packed: bool = False) -> Cost:
    """HQ: W transformed and quantised, integer product, epilogue. g_y's pass is counted apart.

    ``packed``: an INT4 product; W is packed two values a byte in a pass of its own.
    """
    if packed:
        passes = O * I * (E + 1 + PACKING)
        return Cost(int4_ops=2 * L * O * I, bytes=passes, results=L * I, calls=2)
    return Cost(int_ops=2 * L * O * I, bytes=O * I * (E + 1), results=L * I, calls=2)


def gw_cost(strategy: Strategy) -> Cost:
    """x's compression in the forward, its expansion, integer product, epilogue."""
    product = Cost(int_ops=2 * L * O * I, results=O * I, calls=1)
    if strategy is Strategy.HLA8:
        half = Cost(int_ops=2 * L * O * I * R / 16, results=O * I, calls=1)
        return half + Cost(bytes=L * I * (E + R / 16), calls=1)
    if strategy is Strategy.INT8:
        return product + Cost(bytes=L * I * (2 * E + 1), calls=1)
    packed = Cost(bytes=L * I * (E + INT4_BYTES), calls=1)
    return product + packed + Cost(bytes=L * I * (INT4_BYTES + 1), calls=1)


def grad_cost(strategy: Strategy, gx: bool, gw: bool, packed: bool = False) -> Cost:
    """Quantising g_y: one read for the rows, a second one where columns need their absmax first.

    ``packed``: the rows are written two values a byte.
    """
    rows = sympy.Rational(1, 2) if packed else sympy.Integer(1)
    reads = E if gx or strategy is Strategy.HLA8 else 2 * E
    if gw and strategy is not Strategy.GX_ONLY:
        reads = 2 * E
        kept = R / 16 if strategy is Strategy.HLA8 else sympy.Integer(1)
        return Cost(bytes=L * O * (reads + kept + int(gx) * rows), calls=1)
    return Cost(bytes=L * O * (reads + rows), calls=1)


def shared_cost(strategy: Strategy) -> Cost:
    """Everything, where g_y is read once for both products and x is rescaled in the backward."""
    rank = R / 16 if strategy is Strategy.HLA8 else sympy.Integer(1)
    stored = INT4_BYTES if strategy is Strategy.INT4 else rank
    grad = Cost(bytes=L * O * (E + 1 + rank), calls=2)
    x = Cost(bytes=L * I * (E + 2 * stored + rank), calls=2)
    return grad + x + gx_cost() + Cost(int_ops=2 * L * O * I * rank, results=O * I, calls=1)


@cache
def hot_cost(
    strategy: Strategy, gx: bool, gw: bool, shared: bool = False, packed: bool = False
) -> Cost:
    """Everything HOT adds and replaces for one layer."""
    if strategy is Strategy.EXACT or strategy in BASELINES:
        return exact_cost(gx, gw)
    if shared:
        return shared_cost(strategy)
    cost = grad_cost(strategy, gx, gw, gx and packed)
    if gx:
        cost += gx_cost(packed)
    if gw:
        cost += exact_cost(False, True) if strategy is Strategy.GX_ONLY else gw_cost(strategy)
    return cost


def saved_bytes(strategy: Strategy) -> sympy.Expr:
    """Bytes of x that this strategy keeps from forward to backward."""
    if strategy in BASELINES:
        return L * I * E
    return {
        Strategy.HLA8: L * I * R / 16,
        Strategy.INT4: L * I * INT4_BYTES,
        Strategy.INT8: L * I,
        Strategy.GX_ONLY: sympy.Integer(0),
        Strategy.EXACT: L * I * E,
    }[strategy]


def seconds(cost: Cost, rates: Rates, dtype: str) -> sympy.Expr:
    """Predicted time, still symbolic in L, O, I: products at their rate plus passes at theirs."""
    device = (
        cost.flops / rates.exact[dtype]
        + cost.int_ops / rates.integer
        + cost.int4_ops / rates.int4
        + (cost.bytes + cost.results * (8 * rates.int32_result + E)) / rates.transform
        + cost.calls * rates.start
    )
    host = cost.calls * rates.launch
    return sympy.Max(device, host) if rates.asynchronous else device + host


@dataclasses.dataclass(frozen=True)
class Shape:
    """Numbers for the symbols: one layer's L, O, I, element bytes and HLA rank."""

    rows: int
    outputs: int
    inputs: int
    element: int
    rank: int = 8


@cache
def _number(expression: sympy.Expr) -> object:
    return sympy.lambdify(VARIABLES, expression, "math")


def at(expression: sympy.Expr, shape: Shape) -> float:
    """The value of ``expression`` for one layer."""
    function = _number(sympy.sympify(expression))
    return float(function(shape.rows, shape.outputs, shape.inputs, shape.element, shape.rank))  # type: ignore[operator]


def predicted_gain(
    strategy: Strategy,
    gx: bool,
    gw: bool,
    rates: Rates,
    dtype: str,
    shape: Shape,
    shared: bool = False,
    packed: bool = False,
) -> float:
    """How many times faster than exact the layer's backward is predicted to be."""
    ours = at(seconds(hot_cost(strategy, gx, gw, shared, packed), rates, dtype), shape)
    return at(seconds(exact_cost(gx, gw), rates, dtype), shape) / ours if ours else 1.0
