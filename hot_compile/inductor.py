"""Inductor's configuration, as a user's options and other libraries leave it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.decomposition import select_decomp_table

from .config import OBJECTS, option_names
from .errors import OptionError, PassDisabledError
from .generated import lightened
from .passes.pipeline import sources_hash
from .passes.storage.layout import CHANNELS_LAST
from .runtime.native.providers import runtime_version
from .runtime.read_again import read_again

_DISABLING = "use_joint_graph_passes"


def inductor_patches(mode: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """Inductor's config patches for this mode and these options, validated by Inductor itself.

    But for unknown names: among its hundreds of options a misspelt one of ours would be lost.
    """
    known = torch._inductor.list_options()
    if unknown := {name for name in options if name.replace("-", "_") not in known}:
        raise OptionError.unknown(unknown, option_names() | OBJECTS, known)
    wrapper = torch._TorchCompileInductorWrapper(mode or "default", options or None, None)
    patches = dict(wrapper.config)
    if not patches.get(_DISABLING, getattr(inductor_config, _DISABLING)):
        raise PassDisabledError(
            f"got mode={mode!r}, options={sorted(options)}: these set {_DISABLING}=False, which "
            "switches HOT off in silence. Remove that option, or use backend='inductor'."
        )
    return patches


def existing_passes(patches: dict[str, Any]) -> tuple[Any, ...]:
    """The joint pass(es) a user or library already put into Inductor's hook."""
    current = patches.get("joint_custom_pre_pass", inductor_config.joint_custom_pre_pass)
    if current is None:
        return ()
    return tuple(current) if isinstance(current, (list, tuple)) else (current,)


class Ran(CustomGraphPass):
    """Stands for passes that have run already: what lowers their graphs is of this version."""

    def __call__(self, graph: fx.Graph) -> None:
        """Nothing."""

    def uuid(self) -> Any:
        """The same for all graphs, options and names of modules."""
        return sources_hash(), runtime_version()


def keyed_by_graph(inner_compile: Callable[..., Any]) -> Callable[..., Any]:
    """``inner_compile``, which finds in Inductor's cache what it has lowered before.

    In a graph that ``passes/storage/layout.py`` marked it lays images channels last. On a GPU it
    makes again what takes less to read (``runtime/read_again.py``).

    Halves of a graph are keyed with the passes of joint graphs that are set, and ours are other
    ones for each graph: they go by names. Blocks that are alike, as DistributedDataParallel cuts
    them, were each lowered and loaded anew (a ViT-B's: 28 graphs for stock's 8). What takes
    operators apart before (``passes/exact/decompositions.py``) is done by then: what lowers them is
    told of Inductor's own table, which has a name in its caches (torch 2.14).
    """

    @functools.wraps(inner_compile)
    def lowered(gm: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        passes = {"joint_custom_pre_pass": Ran(), "custom_partitioner_fn": None}
        layout = {"force_layout_optimization": True} if CHANNELS_LAST in gm.meta else {}
        if "get_decomp_fn" in kwargs:
            kwargs["get_decomp_fn"] = select_decomp_table
        with inductor_config.patch({**passes, **layout}), lightened(), read_again():
            return inner_compile(gm, *args, **kwargs)

    return lowered
