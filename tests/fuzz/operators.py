"""Torch's own database of operators, each put behind a layer so that it reads what crosses."""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree


@functools.cache
def database() -> dict:
    """Every differentiable operator that torch's tests list, by its name with its variant.

    The same on every device: seeds are places in it.
    """
    from torch.testing._internal import common_utils
    from torch.testing._internal.common_methods_invocations import op_db

    # every sample looks through the source of the whole stack for a test class, to name it
    common_utils.extract_test_fn = lambda: None
    # torch's test utilities forbid everybody to set torch.backends.* from then on: take that back
    torch.backends.__allow_nonbracketed_mutation_flag = True
    return {
        op.formatted_name: op
        for op in op_db
        if op.supports_autograd and op.supports_dtype(torch.float32, "cpu") and not _seeds(op)
    }


def _seeds(op) -> bool:
    """It sets the seed before it draws, which a traced graph does not do."""
    return "wrapper_set_seed" in getattr(getattr(op.op, "__code__", None), "co_names", ())


def samples(name: str, dtype: torch.dtype = torch.float32) -> list:
    """The operator's sample calls, the same ones every time; those that read no tensor left out."""
    torch.manual_seed(0)
    device = str(torch.get_default_device())
    found = database()[name].sample_inputs(device, dtype, requires_grad=True)
    return [s for s in found if hole_of(leaves_of(s)) is not None]


def leaves_of(sample) -> list:
    """What a sample passes, flat."""
    return pytree.tree_leaves((sample.input, sample.args, dict(sample.kwargs)))


def hole_of(leaves: list) -> int | None:
    """Place of the first dense floating tensor that wants a gradient: the activation takes it."""
    for place, leaf in enumerate(leaves):
        dense = isinstance(leaf, Tensor) and leaf.layout == torch.strided and leaf.numel() > 0
        if dense and leaf.is_floating_point() and leaf.requires_grad:
            return place
    return None


@functools.cache
def sample_call(name: str, index: int, dtype: torch.dtype):
    """(call, tensors, place): ``call(*tensors)`` is the operator's sample as one flat vector.

    ``place`` is the tensor that the activation takes. Dynamo does not look into the call: torch's
    tests are on its list of files to skip.
    """
    op, sample = database()[name], samples(name, dtype)[index]
    leaves, spec = pytree.tree_flatten((sample.input, sample.args, dict(sample.kwargs)))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def call(*tensors: Tensor) -> Tensor:
        filled = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        first, args, kwargs = pytree.tree_unflatten(filled, spec)
        out = sample.output_process_fn_grad(
            op.gradcheck_wrapper(op.get_op(), first, *args, **kwargs)
        )
        return flat_vector(pytree.tree_leaves(out))

    hole = places.index(hole_of(leaves))
    return torch._dynamo.allow_in_graph(call), [leaves[i].detach() for i in places], hole


def flat_vector(outputs: list) -> Tensor:
    """All floating and complex tensors of ``outputs`` as one real vector."""
    parts = []
    for out in outputs:
        if isinstance(out, Tensor) and (out.is_floating_point() or out.is_complex()):
            dense = out.to_dense() if out.layout != torch.strided else out
            real = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
            parts.append(real.flatten().to(torch.promote_types(real.dtype, torch.float32)))
    return torch.cat([p.to(parts[0].dtype) for p in parts])


class Operator(nn.Module):
    """An operator's sample call, ``x`` in the place of its first tensor; gives one flat vector.

    Args:
        name, index: of the operator in the database and of the sample call.
        width: 0, or the columns of the matrix that the (zero-padded) vector is given as.
    """

    def __init__(self, name: str, index: int, dtype=torch.float32, width: int = 0):
        super().__init__()
        self.call, tensors, self.hole = sample_call(name, index, dtype)
        self.width = width
        self.shape = tensors[self.hole].shape
        self.kinds = []
        for place, tensor in enumerate(tensors):
            learns = tensor.is_floating_point() and tensor.layout == torch.strided
            if place != self.hole and learns:
                setattr(self, f"t{place}", nn.Parameter(tensor.clone()))
            elif place != self.hole:
                self.register_buffer(f"t{place}", tensor)
        self.count = len(tensors)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` of any shape that the operator takes there."""
        tensors = [x if i == self.hole else getattr(self, f"t{i}") for i in range(self.count)]
        y = self.call(*tensors).to(x.dtype)
        return F.pad(y, (0, -len(y) % self.width)).view(-1, self.width) if self.width else y


class Reader(nn.Module):
    """A Linear and the operator that reads its output, resized to the sample's own shape.

    ``fit`` gives the Linear weights that make its output the sample's own tensor, so that the
    operator is called within its domain.
    """

    def __init__(self, name: str, index: int, shape: tuple, dtype=torch.float32, width: int = 0):
        super().__init__()
        self.operator = Operator(name, index, dtype, width)
        self.target = sample_call(name, index, dtype)[1][self.operator.hole]
        rows = math.prod(shape[:-1])
        self.linear = nn.Linear(shape[-1], math.ceil(self.target.numel() / rows), bias=False)

    @torch.no_grad()
    def fit(self, x: Tensor) -> None:
        """``x`` [..., features]: with fewer rows than features the fit is exact."""
        x = x.flatten(0, -2).float()
        columns = self.linear.out_features
        wanted = torch.zeros(len(x) * columns)
        wanted[: self.target.numel()] = self.target.flatten().float()
        solved = torch.linalg.lstsq(x, wanted.view(len(x), columns), driver="gelsd").solution
        self.linear.weight.copy_(solved.T)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` as in ``fit``; gives the operator's vector."""
        h, shape = self.linear(x), self.operator.shape
        size = math.prod(shape)
        h = h.view(shape) if h.numel() == size else h.flatten()[:size].view(shape)
        return self.operator(h)
