"""Attention in graphs of Dynamo's, rewritten and computed."""

import torch

from hot_compile.attention_masks import ATTENTION


def rewritten(rewrite, f, inputs, **how):
    """The attentions of f's graphs after ``rewrite``, whose results and gradients are f's own."""
    graphs = []

    def backend(gm, example_inputs):
        own = rewrite(gm)
        own.graph.lint()
        graphs.append(own)
        return own.forward

    torch._dynamo.reset()
    result = torch.compile(f, backend=backend, fullgraph=True, **how)(*inputs)
    want = f(*inputs)
    torch.testing.assert_close(result, want)
    trained = [x for x in inputs if x.requires_grad]
    theirs = torch.autograd.grad(want.square().sum(), trained)
    torch.testing.assert_close(torch.autograd.grad(result.square().sum(), trained), theirs)
    modules = [m for own in graphs for m in own.modules() if isinstance(m, torch.fx.GraphModule)]
    return [n for m in modules for n in m.graph.nodes if n.target is ATTENTION]


def captured(f, inputs):
    """Dynamo's graph of f, which is not run."""
    graphs = []
    torch._dynamo.reset()
    stand_in = lambda *given: (torch.zeros(()),)  # noqa: E731
    torch.compile(f, backend=lambda gm, _: graphs.append(gm) or stand_in)(*inputs)
    return graphs[0]
