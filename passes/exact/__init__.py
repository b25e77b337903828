"""Exact forms: other ways to compute the same, where a device is faster with them."""
