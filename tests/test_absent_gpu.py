"""What only a GPU's code shows when it is made: lowered for one, in a process of its own."""

import absent_gpu
import pytest
from forked import in_a_process


@pytest.mark.slow  # CI lowers the block with all that is stored: runtime/test_peak_estimate.py
@pytest.mark.parametrize("arguments", [(), ("--kernels",)], ids=str)
def test_blocks_are_lowered_for_a_gpu(arguments, tmp_path):
    (result,) = in_a_process(absent_gpu.alone, str(tmp_path), *arguments)
    assert result["error"] == ""
    assert [side for side, _ in result["graphs"]] == ["forward", "backward"]
    for side, trace in result["graphs"]:
        assert not trace, f"{side}: {trace}"
