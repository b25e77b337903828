"""``python -m hot_compile``: what ``hot-compile`` does, for launchers that start modules."""

from hot_compile.cli import app

app(prog_name="python -m hot_compile")
