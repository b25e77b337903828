"""Random models against exact Inductor: ``python -m tests.fuzz --help``; README.md says how."""
