"""What was done to a graph in a few figures: kept for a process that finds its code in a cache."""

from types import SimpleNamespace

import pytest

from hot_compile import figures
from hot_compile.config import Strategy
from hot_compile.figures import Figures, most_frequent_reason


def decisions(*reasons):
    return [SimpleNamespace(strategy=Strategy.EXACT, reason=reason) for reason in reasons]


def test_reasons_that_differ_in_a_number_count_as_one():
    plan = decisions("not worth it: 1.02x", "the head", "not worth it: 0.9x", "the head", "n 1.5")
    assert most_frequent_reason(plan) == "not worth it: 1.02x"
    assert most_frequent_reason(decisions("a", "b", "b")) == "b"
    taken = SimpleNamespace(strategy=Strategy.INT8, reason="LQS: fine")
    assert most_frequent_reason([taken, taken, *decisions("", "small")]) == "small"
    assert most_frequent_reason([]) == ""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "cache_dir", lambda: str(tmp_path))
    return tmp_path / "hot_compile"


def test_kept_and_found_again(folder):
    found = Figures("layers", 5, 3, 100, 400, "the head")
    found.save("d" * 64)
    assert Figures.load("d" * 64) == found
    assert Figures.load("e" * 64) is None


@pytest.mark.parametrize("text", ["", "[1]", '{"other": 1}', "{"])
def test_what_cannot_be_read_is_nothing(folder, text):
    folder.mkdir()
    (folder / f"{'d' * 32}.json").write_text(text)
    assert Figures.load("d" * 64) is None


def test_where_nothing_can_be_kept_nothing_is(folder):
    folder.touch()  # no folder can be made there
    Figures("layers", 1, 1, 1, 1).save("d" * 64)
    assert Figures.load("d" * 64) is None
