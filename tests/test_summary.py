"""The line at the end of a run: what was compiled, what of it was found in a cache."""

import pytest

from hot_compile import summary
from hot_compile.figures import Figures
from hot_compile.summary import Summary


@pytest.fixture(autouse=True)
def kept(monkeypatch):
    """What is kept of graphs, by digest; nothing was compiled long."""
    known = {}
    monkeypatch.setattr(Figures, "load", classmethod(lambda cls, digest: known.get(digest)))
    spent = {"total_wall_time": 0.0}
    monkeypatch.setattr(
        summary.torch._dynamo.utils, "calculate_time_spent", lambda: spent, raising=True
    )
    return known


def figures(layers="a", rewritten=3, why=""):
    return Figures(layers, 4, rewritten, 2**20, 4 * 2**20, why)


def test_nothing_compiled():
    assert str(Summary()).startswith("hot: nothing compiled")


def test_what_a_cache_gave_is_told_by_what_was_kept(kept):
    said = Summary()
    for digest in ("one", "two", "three"):
        said.listener(digest)
    kept |= {"one": figures("a"), "two": figures("b")}
    text = str(said)
    assert "3 graphs compiled, 6 of 8 products rewritten" in text
    assert "2.00 MiB held for the backward (8.00 MiB uncompressed)" in text
    assert "2 from Inductor's cache, 1 from Inductor's cache, where nothing is kept" in text


def test_of_layers_that_were_compiled_twice_the_last_counts(kept):
    said = Summary()
    said.listener("one"), said.listener("two")
    kept |= {"one": figures("a", 1), "two": figures("a", 3)}
    assert "2 graphs compiled, 3 of 4 products rewritten" in str(said)


def test_nothing_rewritten_says_why(kept):
    said = Summary()
    said.listener("one")
    said.without_backward()
    kept["one"] = figures(rewritten=0, why="not worth it")
    assert "2 graphs compiled, 0 of 4 products rewritten (most: not worth it)" in str(said)
    assert "1 without a backward" in str(said)
