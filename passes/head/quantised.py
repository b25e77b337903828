"""A head whose gradients' products are a strategy's (``layers/strategies.py``), chunk by chunk.

The strategy's function sees each chunk of the logits' gradient as if it were a layer's g_y. Rows
are whole, so g_x is what it would be at once; g_w is the sum over chunks, in fp32, each with scales
of its own. The logits and the loss stay exact.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hot_compile.config import BASELINES, HotConfig, Rows, Strategy
from hot_compile.passes.layers.strategies import STRATEGIES, How
from hot_compile.runtime.head.products import (
    SCHEMAS,
    both,
    fake_both,
    gradients,
    gradients_of,
)

_BY = "str strategy, int gx_bits, int rank, bool per_channel, bool per_row"

By = tuple[str, int, int, bool, bool]
"""What an operator is told of the strategy: ``_BY``."""
EXACT: By = (str(Strategy.EXACT), 8, 0, True, True)


def problem(strategy: Strategy, config: HotConfig) -> str | None:
    """Why ``strategy`` cannot work on chunks of rows, or None."""
    if strategy in BASELINES:
        return f"{strategy} is a baseline that scales whole tensors, of which a chunk is a part"
    if STRATEGIES[strategy].grouped and config.rows is Rows.BATCH:
        return f"{strategy} groups rows across the batch, which lie in different chunks"
    return None


def by(strategy: Strategy, config: HotConfig) -> By:
    """The operators' last arguments."""
    if strategy is Strategy.EXACT:
        return EXACT
    rank = config.rank if STRATEGIES[strategy].low_rank else 0
    per_row = config.per_channel or bool(config.per_token)
    return str(strategy), config.gx_bits or 8, rank, config.per_channel, per_row


def _multiplying(*args: Any) -> tuple[Any, ...]:
    """An operator's arguments with a function in the place of what it is told of the strategy."""
    *given, strategy, gx_bits, rank, per_channel, per_row = args
    wants_x, wants_weight, _ = given[-1]
    how = How(
        gx=wants_x,
        gw=wants_weight,
        gx_bits=gx_bits,
        rank=rank,
        per_channel=per_channel,
        per_row=per_row,
    )

    def multiply(g: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor | None, Tensor | None]:
        found = STRATEGIES[Strategy(strategy)](g.contiguous(), x, weight, how)
        return found.gx, found.gw

    return *given, multiply


def _head_both_by(*args: Any) -> tuple[Tensor, ...]:
    return both(*_multiplying(*args))


def _head_gradients_by(*args: Any) -> tuple[Tensor, ...]:
    return gradients(*_multiplying(*args))


_LIBRARY = torch.library.Library("hot", "FRAGMENT")
for _name, _own in (("head_both", _head_both_by), ("head_gradients", _head_gradients_by)):
    _schema = SCHEMAS[_name].replace(" wanted)", f" wanted, {_BY})")
    _LIBRARY.define(f"{_name}_by{_schema}", tags=(torch.Tag.needs_exact_strides,))
    for _device in ("CPU", "CUDA"):
        _LIBRARY.impl(f"{_name}_by", _own, _device)


@torch.library.register_fake("hot::head_both_by")
def _(*args: Any) -> tuple[Tensor, ...]:
    return fake_both(*args[:-5])


@torch.library.register_fake("hot::head_gradients_by")
def _(*args: Any) -> tuple[Tensor, ...]:
    x, weight, wanted = args[0], args[1], args[-6]
    return gradients_of(x, weight.shape[0], wanted)


IN_FORWARD = {torch.ops.hot.head_both.default, torch.ops.hot.head_both_by.default}
"""What makes a head's gradients with its loss."""
GRADIENTS = range(2, 5)
"""Which of their results these are."""
