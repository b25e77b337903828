"""What is asked of a network's first convolution before it is given another form."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from hot_compile.passes.base.graph import aten
from hot_compile.passes.exact import first_conv


def gradients(x, w, g, wanted):
    conv = aten.convolution.default(x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    back = aten.convolution_backward.default(
        g, x, w, [0], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [wanted, True, False]
    )
    return conv, back[1]


@pytest.mark.parametrize("wanted", [False, True])
def test_its_backward_is_found_and_what_it_is_asked_for(wanted):
    inputs = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3), torch.randn(2, 4, 6, 6)
    gm = make_fx(lambda *given: gradients(*given, wanted))(*inputs)
    conv = gm.graph.output_node().args[0][0]
    (backward,) = first_conv.backwards_of(conv)
    assert first_conv.wants_grad_input(backward) is wanted


def test_only_cudnn_is_slow_at_few_channels():
    assert "runs on cpu" in first_conv.slow_in_cudnn(torch.empty(2, 3, 4, 4))
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert first_conv.slow_in_cudnn(torch.empty(2, 3, 4, 4, device="cuda")) == ""
        assert "16 channels" in first_conv.slow_in_cudnn(torch.empty(2, 16, 4, 4, device="cuda"))
