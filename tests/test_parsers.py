"""Each kind of option's value: what it takes, and what it says of what it does not."""

import pathlib

import pytest

from hot_compile import parsers
from hot_compile.config import Strategy
from hot_compile.errors import OptionError

TAKEN = [
    (parsers.choice(Strategy), "int8", Strategy.INT8),
    (parsers.one_of(4, 8, None), None, None),
    (parsers.globs, "head*", ("head*",)),
    (parsers.globs, ["a", "b"], ("a", "b")),
    (parsers.gain, 0, 0.0),
    (parsers.at_least(1), 3, 3),
    (parsers.error_budget, None, None),
    (parsers.memory_budget, 0.5, 0.5),
    (parsers.memory_budget, 4096, 4096),
    (parsers.peak_budget, "16GiB", "16GiB"),
    (parsers.bytes_of, 0, 0),
    (parsers.rates, {"integer": 3e12}, (("integer", 3e12),)),
    (parsers.path, pathlib.PurePosixPath("a/b"), "a/b"),
]
REFUSED = [
    (parsers.choice(Strategy), "int5", "int8"),
    (parsers.one_of(4, 8), 8.0, "8 for 8.0"),
    (parsers.one_of(True, False), 1, "True"),
    (parsers.globs, [1], "list of globs"),
    (parsers.gain, -1, ">= 0"),
    (parsers.gain, True, ">= 0"),
    (parsers.at_least(1), 0, ">= 1"),
    (parsers.error_budget, 0, "> 0"),
    (parsers.memory_budget, "16GiB", "peak_budget='16GiB'"),
    (parsers.memory_budget, 1.5, "fraction"),
    (parsers.peak_budget, "16", "24GiB"),
    (parsers.peak_budget, 16, "16GiB"),
    (parsers.bytes_of, -1, "int >= 0"),
    (parsers.rates, {"integers": 1.0}, "integer"),
    (parsers.rates, {"integer": 0}, "positive"),
    (parsers.path, 3, "a path"),
]


@pytest.mark.parametrize(("parse", "value", "made"), TAKEN)
def test_what_is_valid(parse, value, made):
    assert parse("option", value) == made


@pytest.mark.parametrize(("parse", "value", "said"), REFUSED)
def test_what_is_not_says_what_is(parse, value, said):
    with pytest.raises(OptionError, match="got ") as told:
        parse("option", value)
    assert said in str(told.value)
