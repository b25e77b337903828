"""For all tests: pytest's log capture does not switch torch's structured trace on.

Torch writes every graph of every stage as text as soon as that logger has a handler, and pytest >=
9.2 gives its own to each logger that does not propagate.
"""

import logging

import torch  # importing it sets its loggers up

trace = logging.getLogger(f"{torch.__name__}.__trace")
trace.handlers.clear()
trace.propagate = True
