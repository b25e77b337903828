"""Beginnings of graphs that tests make by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from hot_compile.passes.exact import forms as exact_forms
from hot_compile.passes.exact import pools


def given(
    graph: fx.Graph, tensors: Mapping[str, tuple[Sequence[int], torch.dtype]], device: str = "cpu"
) -> list[fx.Node]:
    """A placeholder of each name, for a fake tensor of that size and dtype."""
    mode, nodes = FakeTensorMode(), []
    for name, (size, dtype) in tensors.items():
        node = graph.placeholder(name)
        with mode:
            node.meta["val"] = torch.empty(size, dtype=dtype, device=device)
        nodes.append(node)
    return nodes


def forms_pay(monkeypatch, *modules):
    """These exact forms are taken, as on a GPU, and no others; what each graph took is listed."""
    chosen = (f for f in exact_forms.EXACT_FORMS if f.replace in [m.replace for m in modules])
    paying = tuple(dataclasses.replace(form, pays=lambda reads, tf32: "") for form in chosen)
    monkeypatch.setattr(exact_forms, "EXACT_FORMS", paying)
    taken, own = [], exact_forms.take

    def take(graph, found, decisions):
        done = own(graph, found, decisions)
        taken.append([form.form for form in done if form.taken])
        return done

    monkeypatch.setattr("hot_compile.passes.pipeline.take", take)
    return taken


def pools_pay(monkeypatch):
    """Gradients of max pools are gathered, as on a GPU, and nothing else takes an exact form."""
    return forms_pay(monkeypatch, pools)
