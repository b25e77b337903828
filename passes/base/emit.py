"""Inserts operator nodes with the metadata that the partitioner and Inductor read."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import fx
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy

from hot_compile.passes.base.graph import aten, placeholders
from hot_compile.passes.base.operators import VIEWS

prims = torch.ops.prims
_DESCRIBING = (
    "seq_nr",
    "nn_module_stack",
    "fwd_nn_module_stack",
    "stack_trace",
    "partitioner_tag",
    "autograd_backward",
)


_CHECKPOINTED = ("recompute", "ac_graph_id")
_RECOMPUTES = {CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE}


def describe(like: fx.Node) -> dict[str, Any]:
    """Metadata for a node made in the place of ``like``, all but its value."""
    return {key: like.meta[key] for key in _DESCRIBING if key in like.meta}


class Emitter:
    """Appends nodes before one place of a graph, each with its fake value.

    Args:
        graph: changed in place.
        before: new nodes go right before this one, in the order they are made.
        like: whose origin the new nodes are given.
        stays: the new nodes belong to the backward even where they depend on no gradient.
    """

    def __init__(
        self, graph: fx.Graph, before: fx.Node, like: fx.Node, stays: bool = False
    ) -> None:
        self._graph = graph
        self._before = before
        self._like = like
        self._stays = stays

    def __call__(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A node ``op(*args, **kwargs)``."""
        with self._graph.inserting_before(self._before):
            node = self._graph.call_function(op, args, kwargs)
        node.meta = describe(self._like)
        if self._stays:
            node.meta["partitioner_tag"] = "must_be_in_backward"
        node.meta["val"] = fake_result(node, fake_mode(self._like))
        return node

    def traced(self, node: fx.Node) -> torch.Tensor:
        """``node`` as a tensor for plain functions, whose operators become nodes here."""
        return cast(torch.Tensor, Traced(self, node))

    def parts(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """The results of a node that has several, each as a node."""
        return tuple(self(operator.getitem, node, n) for n in range(len(node.meta["val"])))

    def size(self, node: fx.Node, dim: int) -> int | fx.Node:
        """Length of ``node`` along ``dim``: a number, or a node where it is symbolic."""
        length = node.meta["val"].shape[dim]
        return length if isinstance(length, int) else self(aten.sym_size.int, node, dim)

    def known(self, size: Any) -> Any:
        """A symbolic size by what is known by now: symbols may have been found to be equal."""
        env = fake_mode(self._like).shape_env
        return size if env is None else env.replace(size)

    def symbol(self, symbol: Any) -> fx.Node:
        """A node that holds a symbol of the shapes: one of the graph's inputs, or a size of one.

        Raises:
            ValueError: no input has it.
        """
        given = placeholders(self._graph)
        for node in given:
            value = node.meta["val"]
            if isinstance(value, torch.SymInt) and value.node.expr == symbol:
                return node
        for node in given:
            for dim, length in enumerate(getattr(node.meta["val"], "shape", ())):
                if isinstance(length, torch.SymInt) and length.node.expr == symbol:
                    return self(aten.sym_size.int, node, dim)
        raise ValueError(f"no input of the graph has the size {symbol}")

    def cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        """``node`` as ``dtype``."""
        if node.meta["val"].dtype == dtype:
            return node
        return self(prims.convert_element_type.default, node, dtype)

    def shortened(self, node: fx.Node) -> fx.Node:
        """``node``, fp32 numbers that bf16 holds, as bf16.

        On a CPU by way of int16, of which Inductor makes no vectors. A loop over scales in vectors
        cannot be joined with the loop over rows that packs them. Inductor finds that out last: it
        wrote the code of both twice, and a row was read twice.
        """
        if node.meta["val"].device.type != "cpu":
            return self.cast(node, torch.bfloat16)
        bits = self(aten.view.dtype, node, torch.int32)
        upper = self.cast(self(aten.bitwise_right_shift.Tensor_Scalar, bits, 16), torch.int16)
        return self(aten.view.dtype, upper, torch.bfloat16)

    def numbers(self, length: int | fx.Node, device: torch.device) -> fx.Node:
        """0, 1, 2 ... as int64, in a form that Inductor lowers."""
        kind = {"dtype": torch.int64, "device": device, "requires_grad": False}
        return self(prims.iota.default, length, start=0, step=1, **kind)

    def constant(self, value: float, like: fx.Node) -> fx.Node:
        """``value`` as a tensor without dimensions, of the dtype and on the device of ``like``."""
        fake = like.meta["val"]
        kind = {"dtype": fake.dtype, "device": fake.device, "pin_memory": False}
        return self(aten.full.default, [], value, **kind)

    def permute(self, node: fx.Node, order: Sequence[int]) -> fx.Node:
        """``node`` with its dimensions in this order."""
        if list(order) == list(range(len(order))):
            return node
        return self(aten.permute.default, node, list(order))

    def from_memory(self, value: fx.Node) -> fx.Node:
        """``value``, whose strides are those that Inductor gives it, read from memory by its users.

        Inductor would else work it out again for every element that it is applied to, wherever it
        comes from another kernel. What is no more than a view of something lies in memory already.
        """
        if value.op != "call_function" or value.target in VIEWS:
            return value
        fake = value.meta["val"]
        if not all(isinstance(n, int) for n in (*fake.shape, *fake.stride())):
            return value  # sizes known at run time only are no arguments
        return self(aten.as_strided.default, value, list(fake.shape), list(fake.stride()))


class ForwardEmitter(Emitter):
    """Nodes in the place of one of the forward, in whose checkpointed region they belong.

    What only serves the result is not saved where a policy saves the result.
    """

    def __call__(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A node ``op(*args, **kwargs)``."""
        node = super().__call__(op, *args, **kwargs)
        policy = self._like.meta.get("recompute")
        marks = _CHECKPOINTED if policy in _RECOMPUTES else _CHECKPOINTED[1:]
        node.meta |= {key: self._like.meta[key] for key in marks if key in self._like.meta}
        return node

    def put_in_place(self, new: fx.Node) -> None:
        """Give the readers of ``like`` the result, kept or made again as that one was to be."""
        if "recompute" in self._like.meta:
            new.meta["recompute"] = self._like.meta["recompute"]
        self._like.replace_all_uses_with(new)


class Traced:
    """A node in the place of a tensor: an operator called on it becomes a node of the graph.

    Only operators, by their overloads (``torch.ops.aten.mm.default``), and what a shape tells.
    """

    def __init__(self, emit: Emitter, node: fx.Node) -> None:
        self.emit = emit
        self.node = node

    @property
    def shape(self) -> torch.Size:
        """Of the node's value."""
        return self.node.meta["val"].shape

    def is_contiguous(self) -> bool:
        """Of the node's value."""
        return self.node.meta["val"].is_contiguous()

    @classmethod
    def __torch_function__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """A node for ``op``; several for an operator with several results."""
        leaves, spec = pytree.tree_flatten((args, kwargs or {}))
        emit = next(leaf.emit for leaf in leaves if isinstance(leaf, Traced))
        nodes = [leaf.node if isinstance(leaf, Traced) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(nodes, spec)
        made = emit(op, *args, **kwargs)
        if isinstance(made.meta["val"], (tuple, list)):
            return tuple(map(emit.traced, emit.parts(made)))
        return emit.traced(made)


def node_of(value: Any) -> fx.Node:
    """The node that ``value`` stands for: what a plain function made of ``Emitter.traced``."""
    assert isinstance(value, Traced)
    return value.node


def channels_first(new: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """[B, *size, C] -> [B, C, *size] in the layout of ``like``, as the graph was traced with.

    ``new``: a tensor, or a node in the place of one.
    """
    *_, channels = new.shape
    if all(n == 1 for n in new.shape[1:-1]) and like.stride(-1) == 1:
        return aten.reshape.default(new, [-1, channels, *new.shape[1:-1]])
    dims = like.dim()
    new = aten.permute.default(new, [0, dims - 1, *range(1, dims - 1)])
    if new.is_contiguous() or not like.is_contiguous():
        return new
    return aten.clone.default(new, memory_format=torch.contiguous_format)


def fake_mode(node: fx.Node) -> FakeTensorMode:
    """The mode that made ``node``'s fake value."""
    value = node.meta["val"]
    for part in value if isinstance(value, (tuple, list)) else (value,):
        if isinstance(part, FakeTensor):
            return part.fake_mode
    raise AssertionError(f"{node} has no fake tensor to take a mode from")


def fake_result(node: fx.Node, mode: FakeTensorMode) -> Any:
    """What ``node`` computes from its arguments' fake values."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    with mode:
        return node.target(*args, **kwargs)  # type: ignore[operator]


def refresh(changed: Sequence[fx.Node]) -> None:
    """Recompute the fake values that depend on ``changed``, as far as shapes or strides differ.

    Nodes of which torch cannot say it (higher-order operators, unbacked sizes) keep what they have.

    Raises:
        whatever an operator raises whose arguments no longer suit it: a graph with strides that
        are not so must not be lowered.
    """
    stale = {user for node in changed for user in node.users}
    while stale:
        node = min(stale)
        stale.discard(node)
        if node.op != "call_function" or _unknowable(node):
            continue
        value = fake_result(node, fake_mode(changed[0]))
        if not _same_layout(value, node.meta.get("val")):
            node.meta["val"] = value
            stale |= set(node.users)


def _unknowable(node: fx.Node) -> bool:
    """Fake values do not tell what ``node`` gives."""
    if isinstance(node.target, HigherOrderOperator) or "unbacked_bindings" in node.meta:
        return True
    return any("val" not in given.meta for given in node.all_input_nodes)


def _same_layout(new: Any, old: Any) -> bool:
    if isinstance(new, (tuple, list)):
        return isinstance(old, (tuple, list)) and all(map(_same_layout, new, old))
    if not isinstance(new, torch.Tensor) or not isinstance(old, torch.Tensor):
        return True
    return new.shape == old.shape and new.stride() == old.stride()
