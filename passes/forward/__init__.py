"""The optional 8-bit forward: which layers' products take it, and how (docs/forward.md)."""
