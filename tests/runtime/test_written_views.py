"""What an operator wrote to a part of a ``cat`` is there for as long as somebody reads it."""

import pytest
import torch
from torch import Tensor, nn

ROWS, EDGES, WIDTH = 512, 4096, 128


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_gradient_of_a_maximum_over_edges(device):
    """Ties are counted where the maximum is read once more: of none, gradients are NaN."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    messages = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(2)).to(device)
    updates = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(2)).to(device)
    edges = torch.randint(0, ROWS, (2, EDGES), device=device)
    x = torch.randn(ROWS, WIDTH, device=device)

    def loss(x: Tensor) -> Tensor:
        for message, update in zip(messages, updates, strict=True):
            sent = torch.relu(message(torch.cat([x[edges[0]], x[edges[1]]], -1)))
            index = edges[1][:, None].expand_as(sent)
            largest = torch.zeros_like(x).scatter_reduce(0, index, sent, "amax")
            x = x + update(torch.cat([x, largest], -1))
        return (x - 1).abs().mean()

    loss(x).backward()
    exact = [(p, p.grad.clone()) for p in (*messages.parameters(), *updates.parameters())]
    for parameter, _ in exact:
        parameter.grad = None
    torch.compile(loss, backend="hot", options={"accept": "off"})(x).backward()
    for parameter, gradient in exact:
        off = (parameter.grad - gradient).norm() / gradient.norm()
        assert off < 0.1  # what storing in 8 bits and more rounds
