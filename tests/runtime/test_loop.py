"""A head's chunks by one call into C++ do what they do one by one."""

import dataclasses
import itertools
import re
from types import SimpleNamespace

import pytest
import torch

from hot_compile.errors import BuildError
from hot_compile.runtime.head import loop
from hot_compile.runtime.head import parts as head_parts
from hot_compile.runtime.head import products as head
from hot_compile.runtime.head.rows import Chunk, Form, Gradient, calls_of
from hot_compile.runtime.native.build import load_extension
from hot_compile.runtime.native.extensions import head_extension

OUTPUTS, INPUTS = 301, 24


def operands(rows, dtype=torch.float32, bias=True):
    torch.manual_seed(rows)
    own = torch.randn(OUTPUTS).to(dtype) if bias else None
    return torch.randn(rows, INPUTS).to(dtype), torch.randn(OUTPUTS, INPUTS).to(dtype), own


@pytest.mark.parametrize(("padded", "bias"), [*itertools.product((False, True), repeat=2)])
def test_products_of_all_chunks(padded, bias, monkeypatch):
    """Nothing between them: y is its own gradient."""
    load_extension(head_extension())
    if padded:
        monkeypatch.setattr(head_parts, "missing_outputs", lambda w: -w.shape[0] % 16)
    x, weight, own = operands(17, bias=bias)
    parts = head_parts.parts_of(weight, own)
    assert len(parts) == (2 if padded and not bias else 1)
    width = head_parts.width_of(parts)
    wanted = [True] * 3
    sums = head.gradients_of(x, width, wanted)
    sums[0].fill_(torch.nan), sums[1].fill_(torch.nan)  # what holds nothing yet is not read
    room = torch.full((5, width), torch.nan)
    weights = [part.weight for part in parts]
    biases = [part.bias for part in parts if part.bias is not None]
    torch.ops.hot.head_chunks(x, weights, biases, None, 0, room, None, *sums, [], 0)
    y = torch.nn.functional.linear(x, torch.cat(weights), *biases)
    assert torch.allclose(room[:2], y[15:], atol=1e-5)
    for got, want in zip(sums, (y @ torch.cat(weights), y.t() @ x, y.sum(0)), strict=True):
        torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-4)
    kept, grad_x = torch.full((17, width), torch.nan), torch.empty_like(x)
    room.fill_(2.0)  # as if that were the gradient
    none = x.new_empty(0)
    torch.ops.hot.head_chunks(x, weights, biases, None, 0, room, kept, grad_x, none, none, [], 0)
    assert torch.allclose(kept, y, atol=1e-5)
    assert torch.allclose(grad_x, 2 * torch.cat(weights).sum(0).expand_as(x), atol=1e-4)


def test_what_a_call_may_not_be_given():
    load_extension(head_extension())
    x, weight, _ = operands(3)
    none, room = x.new_empty(0), torch.empty(3, OUTPUTS)
    given = (room, None, none, none, none, [], 0)
    labels = torch.tensor([0, OUTPUTS - 1, 300])
    torch.ops.hot.head_chunks(x, [weight], [], labels, OUTPUTS, *given)
    with pytest.raises(RuntimeError, match="out of bounds"):
        torch.ops.hot.head_chunks(x, [weight], [], labels, OUTPUTS - 1, *given)
    with pytest.raises(RuntimeError, match="no room for a chunk"):
        torch.ops.hot.head_chunks(x, [weight], [], None, 0, room[:0], *given[1:])
    torch.ops.hot.head_chunks(x[:0], [weight], [], None, 0, room[:0], *given[1:])


def calls(rows):
    y, out, target = torch.zeros(rows, 304), torch.zeros(4, rows), torch.zeros(rows).long()
    chunk = Chunk(y, OUTPUTS, target, None, Form(1.0, False, 1.0))
    return calls_of(chunk, out, None, Gradient(y, torch.zeros(3, rows)), rows)


@dataclasses.dataclass(frozen=True)
class Elsewhere:
    """A call whose kernel is compiled for a GPU that is not here."""

    own: object

    def __getattr__(self, name):
        return getattr(self.own, name)

    def compiled(self):
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        types, constants = {}, {}
        kernel = self.own.kernel
        for (place, name), arg in zip(enumerate(kernel.arg_names), self.own.args, strict=True):
            if isinstance(arg, torch.Tensor):
                types[name] = {torch.float32: "*fp32", torch.int64: "*i64"}[arg.dtype]
            elif isinstance(arg, float):
                types[name] = "fp32"
            elif isinstance(arg, bool) or arg == 1 or name == "BLOCK":
                types[name], constants[(place,)] = "constexpr", arg
            else:
                types[name] = "i32"
        source = ASTSource(kernel, types, constants, {})
        return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 16})


@pytest.mark.parametrize("rows", [32, 1024])
def test_a_kernel_gets_what_triton_compiled_it_for(rows):
    """As many values as the code that Triton made has parameters, in its order."""
    pytest.importorskip("triton")
    first, *others = map(Elsewhere, calls(rows))
    assert len(others) == (rows < 512)
    kernel = loop.Kernel.of(first)
    ptx = kernel.compiled.asm["ptx"]
    (entry,) = re.findall(r"\.entry \w+\((.*?)\)", ptx, re.DOTALL)
    kinds = re.findall(r"\.param \.(u64|u32|b32|f32|b64)", entry)
    kernel.compiled.function = 77
    y = first.args[0]
    function, columns, threads, shared, count, *values = kernel.launch(first, y)
    assert (function, columns, threads) == (77, 1, 512)
    assert shared == kernel.compiled.metadata.shared
    assert count == len(kinds) == len(values) // 2
    assert values[:4] == [y.data_ptr(), 0, y.stride(0), 0]  # the room is every chunk's
    assert values[4:6] == [first.args[2].data_ptr(), 8]  # labels go on with the rows
    assert values[-4:] == [0, 0, 0, 0]
    wide = [kind[1:] == "64" for kind in kinds]
    passed = [arg for arg, own in zip(first.args, kernel.passed, strict=True) if own]
    assert wide[: len(passed)] == [isinstance(arg, torch.Tensor) for arg in passed]
    outer = loop._bits(first.args[15])
    assert values[2 * len(passed) - 2] == outer == 0x3F800000


def test_what_cannot_be_one_call_goes_on_by_itself(monkeypatch):
    pytest.importorskip("triton")
    (call,) = calls(1024)
    assert loop._kernel(call, 2048, 1022) is None  # the next chunk would lie otherwise
    metadata = SimpleNamespace(num_ctas=1, global_scratch_size=0, launch_pdl=False)
    source = SimpleNamespace(signature=dict.fromkeys(call.kernel.arg_names, "*fp32"), constants={})
    other = SimpleNamespace(metadata=metadata, src=source)
    monkeypatch.setattr(type(call), "compiled", lambda own: other)
    assert loop.Kernel.of(call) is None  # a number is no pointer
    for name, value in (("num_ctas", 2), ("global_scratch_size", 64), ("launch_pdl", True)):
        monkeypatch.setattr(metadata, name, value)
        assert loop.Kernel.of(call) is None
    monkeypatch.setattr(type(call), "compiled", lambda own: None)  # interpreted
    assert loop.Kernel.of(call) is None


def test_a_kernel_of_another_triton_stops_nothing(monkeypatch):
    pytest.importorskip("triton")
    (call,) = calls(1024)
    known, asked = {}, []
    monkeypatch.setattr(loop, "_kernels", lambda device: known)
    monkeypatch.setattr(type(call), "compiled", lambda own: asked.append(own) or SimpleNamespace())
    assert loop._kernel(call, 1024, 1024) is None
    assert loop._kernel(call, 1024, 1024) is None
    assert len(asked) == 1  # it is known then


def test_no_compiler_no_library(monkeypatch):
    def failing(extension):
        raise BuildError("found no C++ compiler")

    monkeypatch.setattr(loop, "load_extension", failing)
    monkeypatch.setattr(loop, "has_triton", lambda x: True)
    loop._library_found.cache_clear()
    assert not loop.serves(torch.zeros(1))
    loop._library_found.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", [(1.0, False, 1.0), (1 / 3, True, 3.0)], ids=["plain", "capped"])
@pytest.mark.parametrize("rows", [1, 17, 600, 1536])
@pytest.mark.parametrize("logits", [None, torch.float32, torch.bfloat16])
def test_a_gpus_chunks_in_one_call(dtype, form, rows, logits, monkeypatch):
    """To the bit what they are one by one; forwards, backwards and both."""
    for size, bias in itertools.product((16 * OUTPUTS, 512 * OUTPUTS), (False, True)):
        monkeypatch.setattr(head, "CHUNK_BYTES", size * dtype.itemsize)
        monkeypatch.setattr(head, "_LEAST_BYTES", 1)
        monkeypatch.setattr(head, "_FEW_BYTES", 1)
        x, weight, own = (t if t is None else t.cuda() for t in operands(rows, dtype, bias))
        target = torch.randint(0, OUTPUTS, (rows,), device="cuda")
        given, extra = (x, weight, own, target, None), torch.randn(rows, OUTPUTS).to(x)
        scales = torch.randn(3, rows, device="cuda") / rows
        found = []
        for alone in (False, True):
            with monkeypatch.context() as way:
                if alone:
                    way.setattr(loop, "serves", lambda x: False)
                ops = torch.ops.hot
                found.append([
                    *ops.head_both(*given, scales, *form, logits, [True] * 3),
                    *ops.head_statistics(*given, *form, logits),
                    *ops.head_gradients(*given, scales, None, 1.0, *form, [True] * 3),
                    *ops.head_gradients(*given, scales, extra, 0.5, *form, [True, False, True]),
                ])  # fmt: skip
        for one, other in zip(*found, strict=True):
            assert torch.equal(one, other)


@pytest.mark.gpu
def test_a_gpus_chunks_are_one_call(monkeypatch):
    """It is the library that makes them, on another stream and under autocast, too."""
    made = []
    own = torch.ops.hot.head_chunks
    monkeypatch.setattr(loop, "_chunks", lambda *args: made.append(args) or own(*args))
    x, weight, _ = (t if t is None else t.cuda() for t in operands(2048, torch.bfloat16, False))
    target = torch.randint(0, OUTPUTS, (2048,), device="cuda")
    scales = torch.randn(3, 2048, device="cuda")
    given = (x, weight, None, target, None, scales, 1.0, False, 1.0, torch.bfloat16, [True] * 3)
    want = torch.ops.hot.head_both(*given)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.autocast("cuda", torch.float16):
        got = torch.ops.hot.head_both(*given)
    stream.synchronize()
    assert [args[-1] for args in made] == [
        torch.cuda.current_stream().cuda_stream,
        stream.cuda_stream,
    ]
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
def test_a_cuda_graph_holds_all_chunks():
    x, weight, _ = (t if t is None else t.cuda() for t in operands(4096, torch.bfloat16, False))
    target = torch.randint(0, OUTPUTS, (4096,), device="cuda")
    scales = torch.randn(3, 4096, device="cuda")
    given = (x, weight, None, target, None, scales, 1.0, False, 1.0, None, [True] * 3)
    want = torch.ops.hot.head_both(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = torch.ops.hot.head_both(*given)
    for tensor in got:
        tensor.fill_(7.0)
    graph.replay()
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)
