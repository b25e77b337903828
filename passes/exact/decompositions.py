"""Which operators AOTAutograd takes apart, and how: Inductor's table, and what it lacks for us.

A reader of a saved tensor is known by its operators: what stays whole is not known, unless it is
named somewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch._decomp import get_decompositions
from torch._inductor import config as inductor_config
from torch._inductor.decomposition import select_decomp_table

from hot_compile.passes.base.graph import aten
from hot_compile.passes.exact import norms

_APART = (aten.addcmul, aten.addcdiv, aten.lerp)
"""From torch 2.14 on Inductor leaves these whole, for the rounding of a fused multiply-add."""


def decompositions(patches: Mapping[str, Any]) -> dict[Any, Callable[..., Any]]:
    """Inductor's under ``patches`` of its configuration, and ours."""
    with inductor_config.patch(dict(patches)):
        own = select_decomp_table()
        whole = inductor_config.emulate_precision_casts  # then that rounding is asked for
    layer_norm = aten.native_layer_norm.default
    return {
        **({} if whole else get_decompositions(_APART)),
        **own,
        layer_norm: norms.unrounded(own[layer_norm]),
        aten.native_group_norm.default: norms.group_norm,
        aten.native_group_norm_backward.default: norms.group_norm_backward,
    }
