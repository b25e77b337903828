"""One training step whose backward runs on integers: the whole change is ``backend="hot"``."""

import torch
from torch import nn


def main() -> float:
    model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))
    step = torch.compile(model, backend="hot")
    loss = step(torch.randn(1024, 512)).square().mean()
    loss.backward()
    torch.optim.AdamW(model.parameters()).step()
    print(f"loss {loss.item():.4f}")
    return loss.item()


if __name__ == "__main__":
    main()
