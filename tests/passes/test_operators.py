"""The table of operators against the truth: what they do to samples, in fp64.

Samples are torch's own of each operator (OpInfo); what a module's function calls is what counts.
"""

import itertools
import subprocess
import sys

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from hot_compile.passes.base import operators as table

aten = torch.ops.aten
SAMPLES = 4
"""Calls of one operator that are looked at."""
OF_EACH = 6
"""Samples of each of torch's entries."""
SMALL = 400
"""Elements of what is looked at."""
LEFT_OUT = ("jiterator", "linalg", "fft", "signal", "sparse", "masked", "special")
"""Entries that call no operator of the table beside what others call."""
ENTRIES = """
view reshape permute t transpose unsqueeze squeeze expand narrow select split split_with_sizes
unbind cat clone gather index_select __getitem__ roll flip to full_like zeros_like ones_like
empty_like sum mean var var_mean amax amin mm addmm bmm baddbmm matmul add sub mul div where
addcmul neg floor ceil round trunc frac remainder fmod tanh sigmoid sin cos softmax outer
native_layer_norm nn.functional.layer_norm nn.functional.group_norm nn.functional.pad
max_pool2d_with_indices_backward constant_pad_nd
"""
"""Of torch's samples: those that call the table's operators."""
MANY = 3
"""Calls that must keep a claim for an operator to be missed in the table."""


class Calls(TorchDispatchMode):
    """Keeps some calls of every operator that is called under it."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        kept = self.seen.setdefault(func, [])
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        fresh = "out" not in kwargs and not func._schema.is_mutable
        if fresh and len(kept) < SAMPLES and sum(t.numel() for t in tensors) <= SMALL:
            copy = lambda t: t.clone() if isinstance(t, torch.Tensor) else t  # noqa: E731
            kept.append(pytree.tree_map(copy, (args, kwargs)))
        return func(*args, **kwargs)


@pytest.fixture(scope="module")
def calls():
    """{operator: [(args, kwargs)]} of what torch's samples of ``ENTRIES`` call."""
    return called(lambda info: info.name in ENTRIES.split())


def called(wanted):
    torch.manual_seed(0)
    mode = Calls()
    for info in op_db:
        if torch.float64 not in info.dtypes or not wanted(info):
            continue
        try:
            made = info.sample_inputs("cpu", torch.float64, requires_grad=False)
            samples = list(itertools.islice(made, OF_EACH))
        except (RuntimeError, ValueError, ImportError):
            continue  # it wants what this build lacks
        for sample in samples:
            with mode, torch.no_grad():
                try:
                    info(sample.input, *sample.args, **sample.kwargs)
                except (RuntimeError, ValueError, NotImplementedError, TypeError):
                    continue
    mode.seen.update(by_hand())
    return mode.seen


def by_hand():
    """Operators that only a compiler's graphs have."""
    x, y = torch.randn(4, 6, dtype=torch.float64), torch.randn(6, 5, dtype=torch.float64)
    image, kernel, grad = (
        torch.randn(shape, dtype=torch.float64) for shape in ((2, 3, 5), (4, 3, 2), (2, 4, 4))
    )
    settings = [1], [0], [1], False, [0], 1
    found = {
        torch.ops.prims.convert_element_type.default: [((x, torch.float32), {})],
        aten._unsafe_view.default: [((x, [6, 4]), {})],
        aten.add.Scalar: [((x, 2.0), {})],
        aten.sub.Scalar: [((x, 2.0), {})],
        aten.mul.Scalar: [((x, 3.0), {})],
        aten.div.Scalar: [((x, 3.0), {})],
        aten.reshape.default: [((x, [6, 4]), {})],
        aten.permute.default: [((x, [1, 0]), {})],
        aten.mm.default: [((x, y), {})],
        aten.bmm.default: [((x[None], y[None]), {})],
        aten._to_copy.default: [((x,), {"dtype": torch.float32})],
        aten.alias.default: [((x,), {})],
        aten.remainder.Scalar: [((x, 2.0), {})],
        aten.round.decimals: [((x,), {"decimals": 1})],
        aten.squeeze.dims: [((x[None, :, None], [0, 2]), {})],
        aten.fmod.Scalar: [((x, 2.0), {})],
        aten.convolution.default: [((image, kernel, None, *settings), {})],
        aten.convolution_backward.default: [
            ((grad, image, kernel, None, *settings, [True, True, False]), {})
        ],
        aten.avg_pool2d_backward.default: [
            ((x[None, :, :5], x[None], [1, 2], [1, 1], [0, 0], False, True, None), {})
        ],
    }
    whole = torch.randint(-2, 3, (6, 16)).bfloat16(), torch.randint(-2, 3, (2, 16, 8)).bfloat16()
    ends = torch.tensor([2, 6], dtype=torch.int32)
    found[aten._grouped_mm.default] = [(whole, {"offs": ends})]
    for fused in table.FUSED:
        found[fused] = [((x, x + 1, x - 1), {})]
    return found


def tensors(value):
    return [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]


def floating(value):
    return [t for t in tensors(value) if t.is_floating_point()]


def result(target, args, kwargs):
    return tensors(target(*args, **kwargs))


def changed(args, kwargs, change):
    """The same call, of floating tensors changed by their number."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    number = -1
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            number += 1
            leaves[place] = change(number, leaf)
    return pytree.tree_unflatten(leaves, spec)


def distinct(args, kwargs):
    """Every element another number, none of them 0."""
    start = [1]

    def counted(_, t):
        first = start[0]
        start[0] += t.numel()
        return torch.arange(first, start[0], dtype=t.dtype).reshape(t.shape)

    return changed(args, kwargs, counted)


def moves(target, args, kwargs):
    """All elements of the results are elements of the operands (or what a pad is filled with)."""
    args, kwargs = distinct(args, kwargs)
    given = {float(v) for t in floating((args, kwargs)) for v in t.flatten()}
    numbers = {float(v) for v in pytree.tree_leaves((args, kwargs)) if type(v) in (int, float)}
    got = result(target, args, kwargs)
    return all(float(v) in given | numbers | {0.0} for t in got for v in t.flatten())


def keeps_order(target, args, kwargs):
    args, kwargs = distinct(args, kwargs)
    (got,) = result(target, args, kwargs)
    return torch.equal(got.flatten(), args[0].flatten())


def keeps_elements(target, args, kwargs):
    args, kwargs = distinct(args, kwargs)
    (got,) = result(target, args, kwargs)
    return torch.equal(got.flatten().sort()[0], args[0].flatten().sort()[0])


def aliases(target, args, kwargs):
    """The first operand's memory is the results', unless a reshape had to copy."""
    got = result(target, args, kwargs)
    return all(t.data_ptr() >= args[0].data_ptr() or t.numel() == 0 for t in got) and moves(
        target, args, kwargs
    )


def casts(target, args, kwargs):
    (got,) = result(target, args, kwargs)
    return got.shape == args[0].shape and torch.allclose(got.double(), args[0].double(), atol=1e-2)


def ignores_values(target, args, kwargs):
    """No result changes by a rounding of an operand, or results are gradients of something else."""
    if "backward" in str(target):  # linear in the gradient; x only says how large it is
        other = (args[0], args[1] * 1.001, *args[2:])
    else:
        other, kwargs = changed(args, kwargs, lambda _, t: t * 1.001 + 0.01)
    if not result(target, args, kwargs) or "empty" in str(target):
        return True
    return all(map(torch.equal, result(target, args, kwargs), result(target, other, kwargs)))


def reduces(target, args, kwargs):
    """Each number comes of many elements, whatever their order along what is reduced."""
    got = result(target, args, kwargs)
    flat = args[0].flatten()
    same = result(target, *changed(args, kwargs, lambda _, t: torch.full_like(t, 2.0)))
    return all(t.numel() <= max(1, flat.numel()) for t in got) and all(
        t.numel() == 0 or (t.nan_to_num(0.0) - t.flatten()[0].nan_to_num(0.0)).abs().max() == 0
        for t in same
    )


def ignores_a_shift(target, args, kwargs):
    """Of elements that all get more by the same, the first result stays."""
    before = result(target, args, kwargs)[0]
    after = result(target, *changed(args, kwargs, lambda _, t: t + 3.0))[0]
    return torch.allclose(before, after, equal_nan=True)


def linear_in(place, target, args, kwargs):
    """f(2 t) = 2 f(t) in one operand, less what does not depend on it."""
    if len(floating((args, kwargs))) <= place:
        return False

    def of(factor):
        return result(target, *changed(args, kwargs, lambda n, t: t * factor if n == place else t))

    zero, one, three = of(0.0), of(1.0), of(3.0)
    return all(
        torch.allclose(c - a, 3 * (b - a), equal_nan=True)
        for a, b, c in zip(zero, one, three, strict=True)
        if a.is_floating_point()
    )


def product(target, args, kwargs):
    """Linear in either factor, and no more than linear in both; of a gradient, in its first one."""
    first = len(floating(args)) - 2 if "add" in str(target) else 0
    factors = (0,) if "backward" in str(target) else (0, 1)
    return all(linear_in(first + n, target, args, kwargs) for n in factors)


def linear_in_first(target, args, kwargs):
    return not floating(args[:1]) or linear_in(0, target, args, kwargs)


def linear_in_one(target, args, kwargs):
    return any(linear_in(n, target, args, kwargs) for n in range(3))


def bounded(target, args, kwargs):
    """A thousand times as much makes no more of it."""
    weights = any(name in str(target) for name in ("layer_norm", "group_norm"))
    change = lambda n, t: t * 1000.0 if n == 0 or not weights else t  # noqa: E731
    before = result(target, args, kwargs)[0]
    after = result(target, *changed(args, kwargs, change))[0]
    if before.numel() == 0 or (weights and args[0].numel() < 16):
        return True
    return float(after.abs().max()) <= 4 * max(1.0, float(before.abs().max()))


CLAIMS = {
    "IN_ORDER": keeps_order,
    "TRANSPOSES": keeps_elements,
    "VIEWS": aliases,
    "PARTS": moves,
    "SPLITS": moves,
    "MOVES": moves,
    "CASTS": casts,
    "SHAPE_ONLY": ignores_values,
    "PADS": moves,
    "EXTREMES": moves,
    "DEVIATIONS": ignores_a_shift,
    "REDUCTIONS": reduces,
    "MATRIX_PRODUCTS": product,
    "BATCHED_PRODUCTS": product,
    "CONVOLUTIONS": product,
    "GROUPED_PRODUCTS": product,
    "MULTIPLES": linear_in_first,
    "SUMS": linear_in_first,
    "SCALED": linear_in_first,
    "ADDITIVE": linear_in_first,
    "LINEAR_IN_GRADIENT": linear_in_one,
    "BOUNDED": bounded,
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_no_operator_breaks_a_claim(calls, claim):
    """And each was called: an operator that no sample calls is no knowledge."""
    operators = getattr(table, claim)
    unseen = [str(o) for o in operators if not calls.get(o) and "sym_size" not in str(o)]
    wrong = {
        str(operator)
        for operator in operators
        for args, kwargs in calls.get(operator, ())
        if not CLAIMS[claim](operator, args, kwargs)
    }
    assert (unseen, wrong) == ([], set())


PLACING = table.MOVES | table.VIEWS | table.SPLITS.keys() | table.IN_ORDER | table.SHAPE_ONLY
_CHOOSES = "it compares: of rounded values it may choose others"
_WRITTEN = "Inductor writes it by others of the table first"
_SAMPLES = "it moves nothing but what samples are made of"
LEFT_ALONE = {
    **dict.fromkeys(("argmax.default", "argmin.default", "max.dim", "min.dim"), _CHOOSES),
    **dict.fromkeys(("sort.default", "topk.default", "nonzero.default"), _CHOOSES),
    **dict.fromkeys((f"max_pool{n}d_with_indices.default" for n in (2, 3)), _CHOOSES),
    **dict.fromkeys(("diagonal.default", "repeat.default"), _WRITTEN),
    **dict.fromkeys((f"reflection_pad{n}d.default" for n in (1, 2, 3)), _WRITTEN),
    **dict.fromkeys((f"replication_pad{n}d.default" for n in (1, 2, 3)), _WRITTEN),
    **dict.fromkeys(("mean.default", "grid_sampler_2d.default", "fill.Scalar"), _SAMPLES),
    "_local_scalar_dense.default": "a number for the host",
    "as_strided.default": "where its elements come from only memory says",
    "embedding.default": "rows of a parameter",
    "select_scatter.default": "part of one tensor in the place of another's",
}
"""Core operators that place values elsewhere, for all that samples show, and stand nowhere in the
table; and why that is right.
"""


@pytest.mark.slow  # all of torch's samples: a minute
def test_what_moves_values_is_in_the_table():
    """Else it is a function that nobody knows, and tensors that it reads are stored exactly."""
    known = PLACING | table.CASTS | table.EXTREMES | table.BOUNDED
    missing = set()
    calls = called(lambda info: not info.name.startswith(LEFT_OUT))
    for operator, seen in calls.items():
        if operator in known or torch.Tag.core not in operator.tags or len(seen) < MANY:
            continue
        if torch.Tag.pointwise in operator.tags or not all(floating(args[:1]) for args, _ in seen):
            continue
        try:
            if all(moves(operator, args, kwargs) for args, kwargs in seen):
                missing.add(str(operator).removeprefix("aten."))
        except (RuntimeError, IndexError):  # it wants values that mean something
            continue
    assert not missing - LEFT_ALONE.keys()


def test_the_table_does_not_depend_on_what_was_imported_before():
    """Inductor registers ``prims.fma``; where the table was imported first, it lacked that."""
    found = "import hot_compile.passes.base.operators as table; print(bool(table.FUSED))"
    said = subprocess.run([sys.executable, "-c", found], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == str(bool(table.FUSED))
