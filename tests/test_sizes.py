"""Sizes and times as people write them, there and back."""

import pytest

from hot_compile.errors import OptionError
from hot_compile.sizes import memory_bytes, memory_text, time_text


@pytest.mark.parametrize(
    ("text", "size"),
    [("24GiB", 24 * 2**30), ("1.5 MiB", 3 * 2**19), (" 2GB ", 2 * 10**9), ("512MB", 512 * 10**6)],
)
def test_bytes(text, size):
    assert memory_bytes(text) == size


@pytest.mark.parametrize("text", ["24", "GiB", "24 gib", "-1GiB", "1e9GB", ""])
def test_no_size_says_what_one_is(text):
    with pytest.raises(OptionError, match=r"got peak_budget=.*e\.g\. 24GiB"):
        memory_bytes(text, "peak_budget")


def test_as_text():
    assert memory_text(3 * 2**29) == "1.50 GiB"
    assert memory_text(2**20) == "1.0 MiB"
    assert time_text(0.0123) == "12.3 ms"
    assert time_text(2.0) == "2 s"
