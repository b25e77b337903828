"""A failing case made small, and written as a script that shows the failure by itself."""

from __future__ import annotations

import dataclasses
import inspect
import random
from collections.abc import Callable, Iterator
from pathlib import Path

from . import operators
from .cases import Case, NotBuilt, build
from .vocabulary import LOSSES


def smaller(case: Case) -> Iterator[Case]:
    """The case with one thing less, the largest steps first."""
    stages, options = case.stages, case.options
    for size in (4, 2, 1):
        for start in range(0, len(stages) - size + 1):
            yield dataclasses.replace(case, stages=stages[:start] + stages[start + size :])
    for key in range(len(options)):
        yield dataclasses.replace(case, options=options[:key] + options[key + 1 :])
    plain = {
        "dtype": "float32",
        "layout": "contiguous",
        "dynamic": False,
        "wants_input_gradient": False,
        "input_tweak": "x",
        "near": 1.0,
        "loss": LOSSES[0],
    }
    for key, value in plain.items():
        if getattr(case, key) != value:
            yield dataclasses.replace(case, **{key: value})
    for place, stage in enumerate(stages):
        if stage.tweaks:
            bare = dataclasses.replace(stage, tweaks=())
            yield dataclasses.replace(case, stages=(*stages[:place], bare, *stages[place + 1 :]))
        if not stage.modules and stage.forward != "F.gelu(x)":
            plain_stage = dataclasses.replace(stage, forward="F.gelu(x)")
            yield dataclasses.replace(
                case, stages=(*stages[:place], plain_stage, *stages[place + 1 :])
            )


def shrink(case: Case, fails: Callable[[Case], bool], tries: int = 60) -> Case:
    """The smallest case found that still ``fails``, in at most so many ``tries``."""
    chance = random.Random(0)
    while tries > 0:
        steps = list(smaller(case))
        chance.shuffle(steps)
        for candidate in sorted(steps, key=lambda c: len(c.stages)):
            tries -= 1
            if tries < 0:
                break
            try:
                build(candidate)
            except NotBuilt:
                continue
            if fails(candidate):
                case = candidate
                break
        else:
            return case
    return case


HEAD = '''"""{title}

Run with a Python that has hot-compile: prints every gradient under hot beside exact's.
{failures}
"""
{imports}
'''

TAIL = """
# ---- the step, exactly and under hot
def gradients(run):
    torch.manual_seed(0)
    m = copy.deepcopy(model)
    inputs = [t.detach().clone().requires_grad_(t.requires_grad) for t in (x, target)]
    value = run(m, *inputs)
    value.backward()
    found = {{name: p.grad for name, p in m.named_parameters()}}
    return value.item(), {{**found, "x": inputs[0].grad}}

options = {options}
hot = functools.partial(backend.hot, options=options{inner})
want_loss, want = gradients({exact})
got_loss, got = gradients(torch.compile(loss, backend=hot, dynamic={dynamic}))
print(f"loss exact {{want_loss:.7g}}  hot {{got_loss:.7g}}   options {{options}}")
for name, e in want.items():
    h = got[name]
    if e is None or h is None:
        print(f"  {{name:24s}} exact {{e is not None}} hot {{h is not None}}")
        continue
    e, h = e.double(), h.double()
    error, cosine = (h - e).norm() / e.norm(), (h * e).sum() / h.norm() / e.norm()
    print(f"  {{name:24s}} cosine {{cosine:.4f}}  error {{error:.3g}}  |exact| {{e.norm():.4g}}")
"""


def script(case: Case, failures: list[str], lower: bool) -> str:
    """The case as a program of its own."""
    imports = ["import copy, functools, logging, math", "import torch, torch.nn.functional as F"]
    imports += ["from torch import Tensor, nn", "from torch.utils import _pytree as pytree"]
    imports += ["from hot_compile import backend", "from hot_compile.inspect import run_uncompiled"]
    text = build(case).text
    pasted = ""
    if "Operator(" in text or "Reader(" in text:
        names = "database _seeds samples leaves_of hole_of sample_call flat_vector Operator Reader"
        parts = [inspect.getsource(getattr(operators, name)) for name in names.split()]
        pasted = "\n# ---- one sample call of an operator in torch's own database\n" + "\n\n".join(
            parts
        )
        text = "\n\n# ---- the model\n" + text
    head = HEAD.format(
        title=case.name,
        failures="\n".join(failures),
        imports="\n".join([*imports, "", "torch.set_num_threads(1)"]),
    )
    exact = "loss"
    if lower:
        exact = f'torch.compile(loss, backend="inductor", dynamic={case.dynamic or None})'
    tail = TAIL.format(
        options=dict(case.options),
        inner="" if lower else ", inner_compile=run_uncompiled",
        exact=exact,
        dynamic=case.dynamic or None,
    )
    return head + pasted + "\n" + text + tail


def write_script(case: Case, failures: list[str], lower: bool, folder: Path) -> Path:
    """Write the script to ``folder``; the path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"seed_{case.seed}.py"
    path.write_text(script(case, failures, lower))
    return path
