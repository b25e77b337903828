"""A normalised image is made again by each reader, not written in fp32 for later ones."""

import contextlib
import re

import absent_gpu
import pytest
import torch
from forked import in_a_process
from torch import nn

from hot_compile import inductor

SAMPLES, CHANNELS, LENGTH = 16, 64, 2000
WRITTEN = re.compile(r"empty_strided_cuda\(\(([\d, ]+)\), \([\d, ]+\), torch\.float32\)")


class Ears(nn.Sequential):
    """Speech as a Wav2Vec2 hears it: what is normalised the next convolution reads, activated."""

    def __init__(self):
        super().__init__(
            nn.Conv1d(1, CHANNELS, 10, 5, bias=False),
            nn.GroupNorm(CHANNELS, CHANNELS),
            nn.GELU(),
            nn.Conv1d(CHANNELS, CHANNELS, 3, 2, bias=False),
        )


def model():
    torch.manual_seed(0)
    x = torch.randn(SAMPLES, 1, 5 * LENGTH + 5)
    return Ears(), lambda forward: forward(x).float().square().mean()


def written(folder, again):
    """Images that the kernels of a step write in fp32."""
    if not again:
        inductor.read_again = contextlib.nullcontext
    codes = absent_gpu.codes_of(model, {"memory": "all"}, folder)
    found = (sizes for code in codes for sizes in WRITTEN.findall(code))
    sizes = [[int(n) for n in re.findall(r"\d+", text)] for text in found]
    return [size for size in sizes if size == [SAMPLES, CHANNELS, LENGTH]]


@pytest.mark.slow
def test_a_normalised_image_is_not_written_in_fp32(tmp_path):
    assert in_a_process(written, str(tmp_path / "a"), False)
    assert not in_a_process(written, str(tmp_path / "b"), True)
