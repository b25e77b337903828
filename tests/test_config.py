"""Options: recipes, overrides, and errors that say what is valid."""

import dataclasses
import functools

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

from hot_compile.backend import hot
from hot_compile.config import (
    RECIPES,
    HotConfig,
    Memory,
    Rows,
    Strategy,
    option_names,
    refuse_misplaced,
    split_options,
)
from hot_compile.errors import OptionError


def test_options_lie_over_the_recipe():
    config = HotConfig.from_options({"recipe": "fast", "hot.exclude": "head*", "rank": 4})
    assert config.strategies == (Strategy.HLA8, Strategy.INT8)
    assert config.exclude == ("head*",)
    assert config.rank == 4
    assert config.rows is Rows.BATCH


def test_fast_measures_unless_told_otherwise():
    """HLA on trust costs accuracy: only who says so, or brings a profile, gets it unobserved."""
    assert HotConfig.from_options({"recipe": "fast"}).lqs == "auto"
    assert HotConfig.from_options({"recipe": "fast", "lqs": "off"}).lqs == "off"
    assert HotConfig.from_options({"recipe": "fast", "profile": "p.json"}).lqs == "off"
    both = {"recipe": "fast", "profile": "p.json", "lqs": "auto"}
    assert HotConfig.from_options(both).lqs == "auto"
    assert {name for name, config in RECIPES.items() if config.lqs == "auto"} == {"fast"}


def test_paper_is_the_papers_text():
    paper = RECIPES["paper"]
    assert paper.strategies == (Strategy.HLA8,)
    assert (paper.gx_bits, paper.rank, paper.per_channel) == (4, 8, False)
    assert paper.rows is Rows.CONSECUTIVE


BITS = "[6, 8, 12, 'exact', 'around6', 'around8', 'around12']"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"recipes": "hot"}, "valid ones of ours are"),
        ({"hot.nonsense": 1}, "valid ones of ours are"),
        ({"hot.gathered": True}, "valid ones of ours are"),
        ({"schedule": [{"gx_bits": 8}]}, "valid ones of ours are"),
        (
            {"recipe": "turbo"},
            "'exact', 'fast', 'hot', 'int4-naive', 'int8', 'int8-forward', 'lbp-wht', 'luq', ",
        ),
        ({"recipe": ["hot"]}, "one of"),
        ({"gx_bits": 5}, "[4, 8, None]"),
        ({"gx_bits": True}, "[4, 8, None]"),
        ({"gx_bits": 8.0}, "[4, 8, None], whole numbers: 8 for 8.0"),
        ({"rank": 4.0}, "[1, 2, 4, 8, 16], whole numbers: 4 for 4.0"),
        ({"rank": True}, "[1, 2, 4, 8, 16]"),
        ({"memory_bits": 8.0}, "[4, 6, 8, None], whole numbers: 8 for 8.0"),
        ({"memory_bits": 2.0}, "[4, 6, 8, None]"),
        ({"memory_bits": "4"}, "[4, 6, 8, None]"),
        ({"memory_bits": [4]}, "[4, 6, 8, None]"),
        ({"memory_override": {"fc1": 7}}, BITS),
        (
            {"memory_override": {"fc1": 8.0}},
            f"{BITS}, whole numbers: 8 for 8.0",
        ),
        (
            {"memory_override": {1: 8}},
            f"a dict {{glob: one of {BITS}}}",
        ),
        (
            {"memory_override": "fc1"},
            f"a dict {{glob: one of {BITS}}}",
        ),
        ({"keep_head": 1.0}, "[True, False]"),
        ({"lqs": ["auto"]}, "['auto', 'off']"),
        ({"memory_min_bytes": 64.0}, "number of bytes"),
        ({"lqs_batches": 2.0}, "whole number >= 1"),
        ({"rank": 3}, "[1, 2, 4, 8, 16]"),
        ({"rows": "column"}, "'batch', 'consecutive'"),
        ({"override": {"a": "int3"}}, "'gx-only', 'gw-only', 'exact'"),
        ({"override": "int8"}, "{glob: strategy}"),
        ({"exclude": 3}, "glob"),
        ({"strategies": []}, "list of strategies"),
        ({"min_gain": -1}, "number >= 0"),
        ({"min_gain": "a lot"}, "number >= 0"),
        ({"keep_head": 1}, "[True, False]"),
        ({"forward": "int4"}, "['exact', 'int8']"),
        ({"forward": 8}, "['exact', 'int8']"),
        ({"forward_budget": 0}, "relative error > 0"),
        ({"dump": 3}, "a path"),
        ({"profile": 3}, "a path"),
        ({"lqs": "manual"}, "['auto', 'off']"),
        ({"lqs_warm_up": -1}, "whole number >= 0"),
        ({"lqs_batches": 1.5}, "whole number >= 1"),
        ({"lqs_rechecks": -1}, "whole number >= 0"),
        ({"error_budget": 0}, "relative error > 0"),
        ({"memory": "some"}, "'all', 'paper', 'free', 'off'"),
        ({"memory": "free", "memory_budget": 0.5}, "a budget of its own"),
        ({"memory_bits": 2}, "[4, 6, 8, None]"),
        ({"memory_budget": 1.5}, "a fraction"),
        ({"memory_budget": -1}, "a fraction"),
        ({"memory_budget": True}, "a fraction"),
        ({"memory_min_bytes": 1.5}, "number of bytes"),
        ({"rates": {"int2": 1e12}}, "positive numbers by"),
        ({"rates": {"integer": -1}}, "positive numbers by"),
        ({"prices": "guessed"}, "['measured', 'table']"),
    ],
)
def test_bad_values_name_the_valid_ones(options, says):
    with pytest.raises(OptionError) as error:
        HotConfig.from_options(options)
    assert says in str(error.value)
    assert "got" in str(error.value)


def test_every_option_has_a_parser_and_no_inductor_namesake():
    import torch._inductor.config as inductor

    assert option_names() == {f.name for f in dataclasses.fields(HotConfig)}
    assert not [name for name in option_names() if hasattr(inductor, name)]
    ours, theirs = split_options({"recipe": "hot", "hot.rank": 8, "max_autotune": True})
    assert ours == {"recipe": "hot", "hot.rank": 8}
    assert theirs == {"max_autotune": True}


def test_hash_sees_every_field():
    base = HotConfig()
    changed = {
        "recipe": "fast",
        "strategies": (Strategy.HLA8,),
        "gx_bits": 4,
        "per_channel": False,
        "per_token": True,
        "rank": 4,
        "rows": Rows.CONSECUTIVE,
        "include": ("a",),
        "exclude": ("a",),
        "override": (("a", Strategy.INT8),),
        "keep_head": False,
        "head": "off",
        "head_min_bytes": 1,
        "recompute": False,
        "memory": Memory.OFF,
        "memory_bits": 8,
        "memory_override": (("a", 8),),
        "memory_budget": 0.5,
        "peak_budget": "16GiB",
        "memory_min_bytes": 1,
        "exact_forms": False,
        "min_gain": 2.0,
        "forward": "int8",
        "forward_exact": ["a.*"],
        "forward_budget": 0.1,
        "strict": True,
        "accept": "off",
        "dump": "x",
        "prices": "table",
        "rates": (("integer", 1.0),),
        "profile": "x",
        "error_budget": 0.1,
        "lqs": "auto",
        "lqs_warm_up": 3,
        "lqs_batches": 3,
        "lqs_rechecks": 3,
    }
    assert changed.keys() == option_names()
    hashes = {dataclasses.replace(base, **{k: v}).stable_hash() for k, v in changed.items()}
    assert len(hashes | {base.stable_hash()}) == len(changed) + 1


def test_options_given_as_arguments_of_the_backend_are_no_silent_nothing():
    backend = functools.partial(hot, accept="off")
    step = torch.compile(torch.nn.Linear(4, 4), backend=backend)
    with pytest.raises(BackendCompilerFailed, match=r"Write options=\{'accept': 'off'\}"):
        step(torch.randn(2, 4))
    refuse_misplaced({"a_later_dynamos": 1})
