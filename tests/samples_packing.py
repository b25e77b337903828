"""Tensors stored and restored, as graphs run node by node and as Inductor compiles them."""

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from hot_compile.passes.base.emit import Emitter
from hot_compile.passes.base.schemes import Scheme
from hot_compile.passes.storage.around import sample_of
from hot_compile.passes.storage.layout import packed_bytes
from hot_compile.passes.storage.pack import pack, unpack, unpack_mask
from hot_compile.runtime import planes

AS_ON_GPU = {
    "force_disable_caches": True,  # what is lowered anew is what is looked at
}


def round_trip(x, scheme, compiled=False):
    """(packed parts, restored x): what the forward would save, what the backward would see."""
    return masked_round_trip(x, None, scheme, compiled)[:2]


def masked_round_trip(x, mask, scheme, compiled=False):
    """The same, with ``mask`` in the same bytes and the restored mask behind it."""
    graph, value = fx.Graph(), FakeTensorMode().from_tensor(x)
    given_x = graph.placeholder("x")
    given_x.meta["val"] = value
    output = graph.output(())
    emit, given_mask = Emitter(graph, output, given_x), None
    if mask is not None:
        with graph.inserting_before(output):
            given_mask = graph.placeholder("mask")
        given_mask.meta["val"] = value.fake_mode.from_tensor(mask)
    sample = sample_of(given_x, value) if scheme.spec.around else ()
    parts = pack(emit, given_x, scheme, given_mask, sample=sample)
    restored = unpack(emit, parts, value, scheme)
    outcome = restored if mask is None else unpack_mask(emit, parts[0], value, scheme)
    output.args = ((*parts, restored, outcome),)
    module = fx.GraphModule({}, graph)
    run = torch.compile(module, dynamic=False) if compiled else module
    *stored, y, outcome = run(x) if mask is None else run(x, mask)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    assert sum(part.nbytes for part in stored) == packed_bytes(value, scheme, sample)
    return stored, y, outcome


def restored(scheme, parts, like):
    """Of packed ``parts``, by a GPU's operators."""
    if scheme is Scheme.INT4:
        return torch.ops.hot.restored_nibbles(*parts).view_as(like)
    spec, levels = scheme.spec, scheme.spec.levels or planes.STEPS12
    args = spec.pieces, levels, spec.levels > 0
    return torch.ops.hot.restored_planes(*parts, *args).view_as(like)


def values(shape, dtype, seed, spread):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * spread + spread / 3
    x.view(-1)[:: max(3, x.numel() // 7)] *= 8  # outliers
    return x.to(dtype)
