"""Who waits is told on a terminal what goes on; nobody else is."""

import io
import time

from rich.console import Console

from hot_compile import progress as module


def shown(monkeypatch, terminal, patience=0.0, wait=0.3):
    monkeypatch.setattr(module, "_PATIENCE", patience)
    console = Console(file=io.StringIO(), force_terminal=terminal)
    with module.progress(2, console) as begin:
        begin("the first")
        time.sleep(wait)
        begin("the second")
    return console.file.getvalue()


def test_on_a_terminal(monkeypatch):
    assert "the first" in shown(monkeypatch, True)


def test_not_before_somebody_waits(monkeypatch):
    assert "the first" not in shown(monkeypatch, True, patience=60.0, wait=0.0)


def test_nowhere_else(monkeypatch):
    assert shown(monkeypatch, False) == ""
