import torch

from hot_compile.runtime import sums  # noqa: F401  registers it


def test_the_operator_keeps_its_contract():
    total, more = torch.randn(3, 2), torch.randn(3, 2)
    torch.library.opcheck(torch.ops.hot.added.default, (total, more))
    assert torch.equal(torch.ops.hot.added(total, more), total + more)
