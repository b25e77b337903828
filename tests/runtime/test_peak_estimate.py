"""Where Inductor looks for the order of lowest peak it counts what takes memory, by its bytes."""

import math
import os
import re

import absent_gpu
import pytest
from forked import in_a_process


def miscounted(folder: str) -> dict[str, list[str]]:
    """Of a block's graphs for a GPU: inputs not counted by their bytes, buffers never written.

    ``folder``: what Inductor writes is there.
    """
    from torch._inductor import memory
    from torch._inductor.virtualized import V

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    found, counted = {"inputs": list[str](), "unwritten": list[str]()}, set[str]()
    reorder = memory.reorder_for_peak_memory

    def reordered(nodes, name_to_buf, name_to_fused_node, graph_inputs, graph_outputs, **more):
        given = nodes, name_to_buf, name_to_fused_node, graph_inputs, graph_outputs
        inputs = memory.prepare_planning_info(*given)[1]
        for name, buffer in inputs.items():
            tensor = V.graph.graph_inputs[name]
            size = math.prod(map(int, tensor.get_size())) * tensor.get_dtype().itemsize
            if size != buffer.mpi_buffer.size_free:
                found["inputs"].append(name)
        buffers = (buffer for node in nodes for buffer in node.get_outputs())
        counted.update(b.get_name() for b in buffers if b.mpi_buffer.size_alloc)
        return reorder(*given, **more)

    def written(code):
        made = set(re.findall(r"\b(buf\d+) = ", code))
        found["unwritten"].extend(sorted(counted - made))
        counted.clear()

    absent_gpu.pretend(kernels=False, written=written)
    memory.reorder_for_peak_memory = reordered
    graphs = absent_gpu.lowered(absent_gpu.block, {"min_gain": 0, "memory": "all"})
    assert graphs == [("forward", ""), ("backward", "")], graphs
    return found


@pytest.mark.slow
def test_what_takes_memory_counts_by_its_bytes(tmp_path):
    found = in_a_process(miscounted, str(tmp_path))
    assert found == {"inputs": [], "unwritten": []}
