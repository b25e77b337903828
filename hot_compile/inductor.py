"""Inductor's configuration, as a user's options and other libraries leave it."""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor import config as inductor_config

from .config import OBJECTS, option_names
from .errors import OptionError, PassDisabledError

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
