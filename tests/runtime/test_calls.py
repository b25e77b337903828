"""Several calls as one operator: natively and by definition the same, temporaries let go alike."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.library import opcheck

from hot_compile.memory import peak_bytes
from hot_compile.runtime import reference
from hot_compile.runtime.native import build
from hot_compile.runtime.ops import SCHEMAS
from hot_compile.runtime.reference.calls import argument_words

hot = torch.ops.hot
LAYER = (
    "%3 %4 %5 %6 = hot::quantize_grad ( %0! 8 True 0 1 True False ) ; "
    "%7 %8 = hot::quantize_columns ( %2! 16 1 8 True False False ) ; "
    "%9 = hot::scaled_int_mm ( %3! %7! %4! %8! None None {dtype} ) ; "
    "%10 %11 = hot::quantize_columns ( %1 0 1 8 True False False ) ; "
    "_ %12 = hot::quantize_columns ( %1! 0 1 4 True False False ) ; "
    "%13 = hot::scaled_int_mm ( %5! %10! %6 %11! ? %6! ? %12! {dtype} ) ; return %9 %13"
)


def operands(device, rows=33, inputs=48, outputs=20):
    sizes = ((rows, outputs), (rows, inputs), (outputs, inputs))
    return [torch.randn(size, device=device) for size in sizes]


def called_one_by_one(g, x, w):
    row, row_scale, col, col_scale = hot.quantize_grad(g, 8, True, 0, 1, True, False)
    w_q, w_scale = hot.quantize_columns(w, 16, 1, 8, True, False, False)
    x_q, x_scale = hot.quantize_columns(x, 0, 1, 8, True, False, False)
    _, term = hot.quantize_columns(x, 0, 1, 4, True, False, False)
    return [
        hot.scaled_int_mm(row, w_q, row_scale, w_scale, None, None, torch.bfloat16),
        hot.scaled_int_mm(col, x_q, col_scale, x_scale, col_scale, term, torch.bfloat16),
    ]


def assert_equal(got, want):
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        assert g.dtype == w.dtype
        assert g.shape == w.shape
        assert torch.equal(g, w)


@pytest.mark.parametrize("rows", [1, 33, 64])
def test_a_layer_is_what_its_calls_are(device, rows):
    given, text = operands(device, rows), LAYER.format(dtype="bfloat16")
    want = called_one_by_one(*given)
    assert_equal(hot.layer_calls(given, [], text), want)
    assert_equal(reference.layer_calls(given, [], text), want)


def test_what_any_operator_takes(device):
    """Sizes, lists, optional arguments, and operators that are not ours."""
    x = torch.randn(4, 6, device=device)
    text = (
        "%1 = aten::view ( %0 [ $0 2 3 ] ) ; %2 = aten::amax ( %1! [ 0 $1 ] True ) ; "
        "%3 = aten::squeeze_copy ( %2! ) ; return %3 %0 %3"
    )
    most = x.view(4, 2, 3).amax([0, 1])
    want = [most, x, most]
    assert_equal(hot.layer_calls([x], [4, 1], text), want)
    assert_equal(reference.layer_calls([x], [4, 1], text), want)


def test_opcheck(device):
    opcheck(hot.layer_calls.default, (operands(device), [], LAYER.format(dtype="float32")))
    strided = [torch.randn(66, 40, device=device)[::2, ::2], *operands(device)[1:]]
    opcheck(hot.layer_calls.default, (strided, [], LAYER.format(dtype="float32")))


def test_temporaries_are_let_go_at_their_last_reader(device):
    x = torch.randn(1 << 16, device=device)
    many = " ; ".join(f"%{n + 1} = aten::neg ( %{n}! )" for n in range(20)) + " ; return %20"
    unread = "_ = aten::neg ( %0 ) ; _ = aten::neg ( %0 ) ; %1 = aten::neg ( %0! ) ; return %1"
    for run in (hot.layer_calls, reference.layer_calls):
        peaks = [
            peak_bytes(functools.partial(run, [x], [], text), x.device)
            for text in (many, many, unread)
        ]
        assert peaks[1:] == [2 * x.nbytes, x.nbytes]


def test_many_lists_are_remembered_and_forgotten():
    build.load("cpu")
    x = torch.ones(2)
    for number in [*range(1500), 0, 1499]:
        text = f"%1 = aten::expand ( %0! [ {number} 2 ] False ) ; return %1"
        (got,) = hot.layer_calls([x], [], text)
        assert got.shape == (number, 2)


MISTAKES = [
    ("", [], "return"),
    ("%1 = aten::neg ( %0 ) ;", [], "return"),
    ("%1 = aten::neg ( %0 ) ; return", [], "return"),
    ("%1 = aten::neg ( %2 ) ; return %1", [], "%2"),
    ("%1 = aten::neg ( %0 ) ; return %5", [], "%5"),
    ("%1 aten::neg ( %0 ) ; return %1", [], "aten::neg"),
    ("%1 = aten::neg ( %0 what ) ; return %1", [], "what"),
    ("%1 = aten::expand ( %0 [ $1 2 ] False ) ; return %1", [3], r"\$1"),
    ("%1 = aten::neg ( %0! ) ; %2 = aten::neg ( %0 ) ; return %2", [], "%0"),
]


@pytest.mark.parametrize(("text", "sizes", "message"), MISTAKES)
def test_mistakes_say_what_was_got(device, text, sizes, message):
    x = torch.ones(2, device=device)
    with pytest.raises(RuntimeError, match=message):
        hot.layer_calls([x], sizes, text)
    with pytest.raises(ValueError, match=message):
        reference.layer_calls([x], sizes, text)


def test_a_call_that_fails_is_named(device):
    x = torch.ones(2, device=device)
    with pytest.raises(RuntimeError, match="aten::mm failed"):
        hot.layer_calls([x], [], "%1 = aten::mm ( %0 %0! ) ; return %1")


def test_words_of_arguments():
    names = {"x": "%3", "n": "$0"}
    for argument in (True, None, 8, -1, torch.bfloat16):
        assert list(argument_words(argument, names)) == [str(argument).removeprefix("torch.")]
    words = list(argument_words([2, "n", ["x"]], names))
    assert words == ["[", "2", "$0", "[", "%3", "]", "]"]
    for wrong in ("text", torch.strided, 0.5):
        with pytest.raises(TypeError, match="expected a tensor, a whole number"):
            list(argument_words(wrong, names))


def test_every_operator_of_ours_has_a_form():
    """Types of arguments that lists of calls have; an operator with others needs one made."""
    kinds = {
        (argument.real_type.getElementType() if wrapped else argument.real_type).kind()
        for name in SCHEMAS
        if name != "layer_calls"
        for argument in getattr(hot, name).default._schema.arguments
        for wrapped in [argument.real_type.kind() in ("OptionalType", "ListType")]
    }
    assert kinds <= {"TensorType", "IntType", "SymIntType", "BoolType", "ScalarTypeType"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_captured_in_a_cuda_graph():
    build.load("cuda")
    given, text = operands("cuda", 256, 256, 128), LAYER.format(dtype="bfloat16")
    hot.layer_calls(given, [], text)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = hot.layer_calls(given, [], text)
    for tensor in given:
        tensor.normal_()
    graph.replay()
    assert_equal(got, called_one_by_one(*given))
