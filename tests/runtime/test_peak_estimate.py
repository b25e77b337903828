"""Where Inductor looks for the order of lowest peak it counts what takes memory, by its bytes."""

import math
import os
import re

import absent_gpu
import pytest
import torch
from forked import in_a_process
from torch import nn

from hot_compile.runtime import peak_estimate


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


BATCH, HEADS, TOKENS, CHANNELS = 2, 4, 32, 16


def within(folder: str, shared: int) -> list[tuple[int, int]]:
    """Of an attention's backward: what it takes beside its results, and what goes when it is done.

    The operator is a CPU's: a GPU's is not chosen where there is none.
    """
    from torch._inductor import memory

    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    peak_estimate._ATTENTION.add(operator)
    found, reorder = [], memory.reorder_for_peak_memory

    def reordered(nodes, name_to_buf, name_to_fused_node, graph_inputs, graph_outputs, **more):
        given = nodes, name_to_buf, name_to_fused_node, graph_inputs, graph_outputs
        memory.prepare_planning_info(*given)
        for node in nodes:
            if getattr(node.node, "op_overload", None) == operator:
                (info,) = [buffer.mpi_buffer for buffer in node.get_outputs()]
                results = [b.mpi_buffer for n in info.succ_nodes for b in n.get_outputs()]
                found.append((info.size_alloc - sum(b.size_free for b in results), info.size_free))
        return reorder(*given, **more)

    memory.reorder_for_peak_memory = reordered
    absent_gpu.codes_of(lambda: attention(shared), {}, folder)
    return found


class Attention(nn.Module):
    """Of queries, keys and values that are its weights."""

    def __init__(self, shared):
        super().__init__()
        for name, heads in (("q", HEADS), ("k", shared), ("v", shared)):
            value = torch.randn(BATCH, heads, TOKENS, CHANNELS, dtype=torch.bfloat16)
            setattr(self, name, nn.Parameter(value))

    def forward(self):
        how = {"is_causal": True, "enable_gqa": True}
        return nn.functional.scaled_dot_product_attention(self.q, self.k, self.v, **how)


def attention(shared):
    return Attention(shared), lambda forward: forward().float().square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("shared", [HEADS, 2])
def test_attention_takes_more_than_it_returns(tmp_path, shared):
    """The gradient of queries in fp32; and those of keys and values for each head in bf16."""
    queries = BATCH * HEADS * TOKENS * CHANNELS
    bytes_within = queries * (4 if shared == HEADS else 4 + 2 * 2)
    assert in_a_process(within, str(tmp_path), shared) == [(bytes_within, bytes_within)]
