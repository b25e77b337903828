"""The head's operators: a wide product and its loss, chunk by chunk."""
