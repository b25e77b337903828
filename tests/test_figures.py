"""What was done to a graph in a few figures."""

from types import SimpleNamespace

from hot_compile.config import Strategy
from hot_compile.figures import most_frequent_reason


def decisions(*reasons):
    return [SimpleNamespace(strategy=Strategy.EXACT, reason=reason) for reason in reasons]


def test_reasons_that_differ_in_a_number_count_as_one():
    plan = decisions("not worth it: 1.02x", "the head", "not worth it: 0.9x", "the head", "n 1.5")
    assert most_frequent_reason(plan) == "not worth it: 1.02x"
    assert most_frequent_reason(decisions("a", "b", "b")) == "b"
    taken = SimpleNamespace(strategy=Strategy.INT8, reason="LQS: fine")
    assert most_frequent_reason([taken, taken, *decisions("", "small")]) == "small"
    assert most_frequent_reason([]) == ""
