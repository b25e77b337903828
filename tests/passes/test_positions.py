"""A convolution's tensors as rows: products of them are what the convolution is."""

import pytest
import torch
from torch.nn import functional as F

from hot_compile.passes.base.site import Convolution
from hot_compile.passes.layers.positions import channels_last, rows_of, unfolded

SIZES = [
    ((9, 10), (3, 3), (1, 1), (1, 1), (1, 1)),
    ((9, 10), (3, 2), (2, 1), (0, 1), (1, 2)),
    ((9, 10), (1, 1), (2, 2), (0, 0), (1, 1)),
    ((16,), (5,), (3,), (2,), (1,)),
    ((5, 6, 7), (2, 2, 2), (1, 2, 1), (1, 0, 1), (1, 1, 2)),
]


@pytest.mark.parametrize(("size", "kernel", "stride", "padding", "dilation"), SIZES)
def test_rows_times_weights_are_the_convolution(size, kernel, stride, padding, dilation):
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    weight = torch.randn(4, 3, *kernel, dtype=torch.float64)
    conv = (F.conv1d, F.conv2d, F.conv3d)[len(size) - 1]
    y = conv(x, weight, None, stride, padding, dilation)
    geometry = Convolution(
        batch=2, small_size=tuple(y.shape[2:]), big_size=size, big_channels=3, kernel=kernel,
        stride=stride, padding=padding, dilation=dilation, transposed=False, rows_last=False,
    )  # fmt: skip
    product = unfolded(x, geometry) @ channels_last(weight).reshape(4, -1).t()
    torch.testing.assert_close(product, rows_of(y))


def test_rows_are_a_view_of_channels_last():
    x = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    assert rows_of(x).data_ptr() == x.data_ptr()
