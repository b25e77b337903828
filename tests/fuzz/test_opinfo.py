"""Every differentiable operator of torch's own database reads what a layer made."""

import pytest

from fuzz.operators import database
from fuzz.run import main

QUICK = 45
"""Every so many operators one is tried in the quick run."""


def places(step: int) -> str:
    return ",".join(str(place) for place in range(0, len(database()), step)) + ","


def clean(seeds: str, *arguments: str) -> bool:
    return main(["--opinfo", "--seeds", seeds, "--shrink", "0", "--quiet", *arguments]) == 0


def test_some_operators():
    assert clean(places(QUICK), "--jobs", "1")


@pytest.mark.slow
def test_all_operators():
    assert clean(places(1))


@pytest.mark.slow
def test_some_operators_lowered():
    assert clean(places(5), "--lower")
