"""The head and its loss in chunks of rows: no logits, no gradient of theirs, as a whole."""
