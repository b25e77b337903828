"""``torch.compile(model, backend="hot")``: HOT's integer backward pass as a compiler backend."""

__version__ = "0.1.0"
