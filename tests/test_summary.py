"""The line at the end of a run: what was compiled, what of it was found in a cache."""

from types import SimpleNamespace

import pytest

from hot_compile import summary
from hot_compile.figures import Figures
from hot_compile.summary import Summary


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Nothing was compiled long, and a report is its figures."""
    monkeypatch.setattr(Figures, "of", lambda report: report.figures)
    spent = {"total_wall_time": 0.0}
    monkeypatch.setattr(
        summary.torch._dynamo.utils, "calculate_time_spent", lambda: spent, raising=True
    )


def report(layers="a", rewritten=3, why="", cached=False):
    figures = Figures(layers, 4, rewritten, 2**20, 4 * 2**20, why)
    return SimpleNamespace(figures=figures, cached=cached)


def test_nothing_compiled():
    assert str(Summary()).startswith("hot: nothing compiled")


def test_what_a_cache_gave_is_told_by_what_was_kept():
    said = Summary()
    said.listener("one")(report("a", cached=True))
    said.listener("two")(report("b", cached=True))
    said.listener("three")
    text = str(said)
    assert "3 graphs compiled, 6 of 8 products rewritten" in text
    assert "2.00 MiB held for the backward (8.00 MiB uncompressed)" in text
    assert "2 from Inductor's cache, 1 from Inductor's cache, where nothing is kept" in text


def test_of_layers_that_were_compiled_twice_the_last_counts():
    said = Summary()
    said.listener("one")(report("a", 1, cached=True))
    said.listener("two")(report("a", 3))
    assert "2 graphs compiled, 3 of 4 products rewritten" in str(said)
    assert "1 from Inductor's cache" in str(said)


def test_nothing_rewritten_says_why():
    said = Summary()
    said.listener("one")(report(rewritten=0, why="not worth it"))
    said.without_backward()
    assert "2 graphs compiled, 0 of 4 products rewritten (most: not worth it)" in str(said)
    assert "1 without a backward" in str(said)
