"""Every differentiable operator of torch's own database reads what a layer made."""

import pytest

from fuzz.operators import database
from fuzz.run import main, parsed, result

QUICK = 120
"""Every so many operators one is tried in the quick run."""


def places(step: int) -> range:
    return range(0, len(database()), step)


def clean(places: range, *arguments: str) -> bool:
    seeds = ",".join(map(str, places)) + ","
    return main(["--opinfo", "--seeds", seeds, "--shrink", "0", "--quiet", *arguments]) == 0


def test_some_operators():
    """In this process: another takes as long to start as they take."""
    options = parsed(["--opinfo", "--shrink", "0"])
    found = [result(place, options) for place in places(QUICK)]
    assert not [one["failures"] for one in found if one["failures"]]


@pytest.mark.slow
def test_all_operators():
    assert clean(places(1))


@pytest.mark.slow
def test_some_operators_lowered():
    assert clean(places(5), "--lower")
