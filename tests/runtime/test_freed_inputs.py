"""What a kernel frees by reading an input last is the input's bytes."""

import json
import math
import os
import subprocess
import sys

from tests import absent_gpu


def miscounted() -> list[tuple[str, int, int]]:
    """Of a block's graphs for a GPU: (input, bytes as estimated, bytes), where they differ."""
    from torch._inductor import memory
    from torch._inductor.virtualized import V

    found, own = list[tuple[str, int, int]](), memory.reorder_for_peak_memory

    def watched(nodes, name_to_buf, name_to_fused_node, graph_inputs, *rest):
        for name, buffer in memory.get_freeable_input_buf(nodes, graph_inputs).items():
            given = V.graph.graph_inputs[name]
            size = math.prod(map(int, given.get_size())) * given.get_dtype().itemsize
            if size != buffer.mpi_buffer.size_free:
                found.append((name, buffer.mpi_buffer.size_free, size))
        return own(nodes, name_to_buf, name_to_fused_node, graph_inputs, *rest)

    absent_gpu.pretend(kernels=False)
    memory.reorder_for_peak_memory = watched
    graphs = absent_gpu.lowered(absent_gpu.block, {"memory": "all"})
    assert graphs == [("forward", ""), ("backward", "")], graphs
    return found


def test_inputs_that_can_be_freed_count_by_their_bytes(tmp_path):
    said = subprocess.run(
        [sys.executable, "-m", "tests.runtime.test_freed_inputs"],
        env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert said.returncode == 0, said.stderr[-2000:]
    assert json.loads(said.stdout) == []


if __name__ == "__main__":
    print(json.dumps(miscounted()))
