"""Kernels that sum along rows of codes and across them go one row at a time."""

import absent_gpu
import pytest
import torch
from forked import in_a_process
from torch import nn

from hot_compile.runtime.mixed_order import one_row_at_a_time

KERNEL = """
@triton_heuristics.persistent_reduction(
    size_hints={{'x': 32768, 'r0_': {block}}},
    reduction_hint=ReductionHint.INNER,
    filename=__file__,
    triton_meta={{'signature': {{'in_ptr0': '*bf16', 'in_ptr1': '{codes}', 'out_ptr2': '*bf16'}}}},
)
@triton.jit
def kernel(in_ptr0, in_ptr1, out_ptr2, xnumel, r0_numel, XBLOCK : tl.constexpr):
    R0_BLOCK: tl.constexpr = {block}
"""


@pytest.mark.parametrize(
    ("block", "rows", "warps"), [(512, 16, 2), (512, 128, 2), (1024, 64, 4), (4096, 128, 8)]
)
@pytest.mark.parametrize("codes", ["*i8", "*u8"])
def test_the_configuration_is_fixed(block, rows, warps, codes):
    got = one_row_at_a_time(KERNEL.format(block=block, codes=codes), rows)
    config = f"'XBLOCK': 1, 'RSPLIT_SIZE': {rows}, 'NUM_STAGES': 1, 'num_warps': {warps}"
    assert f"@triton_heuristics.fixed_config(config={{{config}, 'num_stages': 1}},\n" in got
    assert "persistent_reduction" not in got
    assert "size_hints" not in got
    assert got.count("filename=__file__") == 1


@pytest.mark.parametrize(
    ("block", "codes"), [(256, "*i8"), (512, "*bf16"), (1024, "*fp32"), (1024, "*i8")]
)
def test_other_kernels_stay_as_inductor_wrote_them(block, codes):
    text = KERNEL.format(block=block, codes=codes)
    assert one_row_at_a_time(text, 16) == text
    assert one_row_at_a_time("", 16) == ""


class Block(nn.Module):
    """A norm before a layer, as in a block of ConvNeXt's third stage or a small ViT's; by hand,
    since a CPU's has statistics in bf16."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(384))
        self.before, self.after = nn.Linear(384, 384), nn.Linear(384, 384)

    def forward(self, x):
        y = self.before(x).float()
        y = y - y.mean(-1, True)
        y = y * (y.square().mean(-1, True) + 1e-5).rsqrt()
        return x + self.after(y * self.gain)


def model():
    x = torch.randn(25088, 384)
    return nn.Sequential(Block(), Block()), lambda forward: forward(x).square().mean()


def configurations(folder):
    """Heuristics of kernels of mixed order in a backward that is written for a GPU."""
    codes = absent_gpu.codes_of(model, {"memory": "all"}, folder)
    sources = [source for _, source in absent_gpu.KERNEL.findall(codes[-1])]
    return [source for source in sources if "MixOrderReductionGrid" in source]


def test_a_norms_backward_is_written_so(tmp_path):
    found = in_a_process(configurations, str(tmp_path))
    assert found
    assert all("fixed_config(config={'XBLOCK': 1" in source for source in found), found
