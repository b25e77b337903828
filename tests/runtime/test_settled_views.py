"""What Inductor reads through a view is what it wrote: tables of attention's biases."""

import absent_gpu
import pytest
import torch
from forked import in_a_process


def test_no_view_of_memory_is_older_than_its_layout(tmp_path):
    (result,) = in_a_process(absent_gpu.alone, str(tmp_path), "biased")
    assert result["error"] == ""
    assert result["graphs"] == [("forward", ""), ("backward", "")]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["hot", "inductor"])
def test_the_gradient_of_a_table_of_biases(backend):
    torch._dynamo.reset()
    with torch.device("cuda"):
        model, loss = absent_gpu.biased()
    if backend == "inductor":  # which the mend reaches once hot has compiled anything
        torch.compile(torch.nn.Linear(4, 4, device="cuda"), backend="hot")(
            torch.randn(4, 4, device="cuda")
        ).sum().backward()
    loss(model).backward()
    exact = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    compiled = torch.compile(model, backend=backend)
    loss(compiled).backward()
    for name, parameter in model.named_parameters():
        off = (parameter.grad - exact[name]).norm() / exact[name].norm()
        assert off < 0.1, name  # what storing in 8 bits and more rounds
