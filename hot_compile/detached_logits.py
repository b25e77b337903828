"""Logits that the caller gets besides the loss, with a gradient of their own only if one is asked.

A compiled graph that returns logits is handed a gradient for them in every backward: zeros of their
size when the loss was all that mattered, as with Hugging Face's models. So the graph returns them
detached, and beside them the input of the product they come from; outside the graph an autograd
function ties the two together again. Nobody's gradient changes, and nobody pays for one in vain.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from .again import twin
from .config import HotConfig
from .passes.base.site import hint

PRODUCTS = {torch._C._nn.linear, torch.nn.functional.linear, torch.matmul, operator.matmul}
_LOSSES = ("cross_entropy", "log_softmax", "logsumexp", "nll_loss")
_CHAIN_METHODS = {"float", "to", "view", "reshape", "contiguous", "bfloat16", "half", "type"}
_CHAIN_FUNCTIONS = {
    operator.mul,
    operator.truediv,
    operator.imul,
    operator.itruediv,
    operator.add,
    operator.iadd,
    torch.add,
    torch.mul,
    torch.div,
    torch.tanh,
}


@dataclasses.dataclass(frozen=True)
class Returned:
    """One output that is detached in the graph."""

    place: int
    """Among the graph's outputs."""
    chain: fx.GraphModule
    """(x, *inputs) -> the output, by the graph's own operations."""
    x: int | None
    """Place of x among the outputs; None: it is an input of the graph, the first of ``inputs``."""
    inputs: tuple[int, ...]
    """Places among the graph's inputs of what else the chain reads."""


def detach_logits(gm: fx.GraphModule, config: HotConfig) -> tuple[fx.GraphModule, list[Returned]]:
    """(a graph that returns its logits detached, what to tie together again).

    Dynamo's graph itself is returned where it has no such output or the head is not to be chunked.
    """
    if config.head == "off" or not config.keep_head:
        return gm, []
    outputs = gm.graph.output_node().args[0]
    if not isinstance(outputs, (tuple, list)):  # a piece of DDP's
        return gm, []
    places = [(n, chain) for n, node in enumerate(outputs) if (chain := _logits(node, config))]
    places = [(n, chain) for n, chain in places if outputs.count(chain[-1]) == 1]
    if not places:
        return gm, []
    own = twin(gm)
    same = dict(zip(gm.graph.nodes, own.graph.nodes, strict=True))
    given = [node for node in own.graph.nodes if node.op == "placeholder"]
    returned = list(own.graph.output_node().args[0])  # type: ignore[arg-type]
    found = []
    for place, theirs in places:
        chain = [same[node] for node in theirs]
        read = [chain[0].all_input_nodes[0], *_weights(chain)]
        returned[place] = _detached(chain[-1])
        module, at = _module(own, chain, read), None
        if read[0].op != "placeholder":
            x = read.pop(0)
            if x not in returned:
                returned.append(x)
            at = returned.index(x)
        found.append(Returned(place, module, at, tuple(given.index(n) for n in read)))
    own.graph.output_node().args = (tuple(returned),)
    own.recompile()
    return own, found


def _logits(node: Any, config: HotConfig) -> list[fx.Node]:
    """From the product to the output ``node``, if that is logits which a loss reads, too."""
    chain = _chain(node, config.head_min_bytes)
    if not chain or not _feeds_loss(chain[0]):
        return []
    x = chain[0].all_input_nodes[0]
    value = x.meta.get("example_value")
    ours = isinstance(value, Tensor) and value.requires_grad
    return chain if ours and all(n.op == "placeholder" for n in _weights(chain)) else []


def _weights(chain: list[fx.Node]) -> list[fx.Node]:
    """What a chain reads besides the input x of its product, which comes first."""
    read = dict.fromkeys(n for node in chain for n in node.all_input_nodes)
    return [n for n in read if n not in chain and n is not chain[0].all_input_nodes[0]]


def _detached(node: fx.Node) -> fx.Node:
    with node.graph.inserting_after(node):
        detached = node.graph.call_method("detach", (node,))
    detached.meta = {**node.meta, "example_value": node.meta["example_value"].detach()}
    return detached


def tied(
    compiled: Callable[..., Any], found: Sequence[Returned], gm: fx.GraphModule
) -> Callable[..., Any]:
    """``compiled`` with its logits differentiable again, returning what Dynamo's ``gm`` does."""
    if not found:
        return compiled
    count = len(gm.graph.output_node().args[0])  # type: ignore[arg-type]

    def call(*args: Any) -> Any:
        outputs = list(compiled(*args))
        for one in found:
            read = [args[n] for n in one.inputs]
            if one.x is not None:
                read.insert(0, outputs[one.x])
            outputs[one.place] = _Tied.apply(one.chain, outputs[one.place], *read)
        return tuple(outputs[:count])

    return call


class _Tied(torch.autograd.Function):
    """The logits as they are; their gradient, if there is one, by doing the product again."""

    @staticmethod
    def forward(ctx: Any, chain: Any, logits: Tensor, *inputs: Any) -> Tensor:
        """``inputs``: what ``chain`` makes the logits of."""
        ctx.chain = chain
        ctx.autocast = torch.is_autocast_enabled(logits.device.type)
        ctx.autocast_dtype = torch.get_autocast_dtype(logits.device.type)
        ctx.save_for_backward(*inputs)
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        """The gradients of ``inputs``."""
        wanted = ctx.needs_input_grad[2:]
        inputs = [
            t.detach().requires_grad_(needed)
            for t, needed in zip(ctx.saved_tensors, wanted, strict=True)
        ]
        with (
            torch.enable_grad(),
            torch.autocast(grad.device.type, ctx.autocast_dtype, ctx.autocast),
        ):
            logits = ctx.chain(*inputs)
        chosen = [t for t in inputs if t.requires_grad]
        grads = iter(torch.autograd.grad(logits, chosen, grad))
        return (None, None, *(next(grads) if needed else None for needed in wanted))


def _chain(node: Any, least: int) -> list[fx.Node]:
    """The product and what follows it up to the output ``node``; empty if there is none."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    if not isinstance(value, Tensor) or not value.requires_grad or value.dim() < 2:
        return []
    if math.prod(map(hint, value.shape)) * value.element_size() < least:
        return []
    chain = [node]
    while chain[0].target not in PRODUCTS:
        first = chain[0]
        known = first.target in (_CHAIN_METHODS if first.op == "call_method" else _CHAIN_FUNCTIONS)
        read = [n for n in first.all_input_nodes if not _is_given(n)]
        if not known or len(read) != 1:
            return []
        moved = [n for n in first.all_input_nodes if n not in read and n.op != "placeholder"]
        chain = [read[0], *moved, *chain]
    return chain


def _is_given(node: fx.Node) -> bool:
    """An input of the graph, or that moved or cast, as Hugging Face's BART does with its bias."""
    moved = node.op == "call_method" and node.target in _CHAIN_METHODS
    sources = node.all_input_nodes if moved else [node]
    return all(n.op == "placeholder" for n in sources)


def _feeds_loss(product: fx.Node) -> bool:
    """A function that is the heart of a loss depends on it."""
    seen: set[fx.Node] = set()
    stack = [product]
    while stack:
        node = stack.pop()
        for user in node.users:
            name = getattr(user.target, "__name__", str(user.target))
            if any(loss in name for loss in _LOSSES):
                return True
            if user not in seen:
                seen.add(user)
                stack.append(user)
    return False


def _module(owner: fx.GraphModule, chain: list[fx.Node], inputs: list[fx.Node]) -> fx.GraphModule:
    graph = fx.Graph()
    made = {node: graph.placeholder(f"input_{n}") for n, node in enumerate(inputs)}
    for node in chain:
        made[node] = graph.node_copy(node, made.__getitem__)
    graph.output(made[chain[-1]])
    return fx.GraphModule(owner, graph)
