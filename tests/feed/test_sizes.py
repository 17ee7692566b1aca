"""Sizes as people write them."""

from __future__ import annotations

import pytest

from salience.errors import ConfigError
from salience.feed.sizes import parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("64MiB", 64 << 20),
        ("4GiB", 4 << 30),
        ("1TiB", 1 << 40),
        ("2KiB", 2048),
        ("3kB", 3000),
        ("1.5 gb", 1_500_000_000),
        ("2 TB", 2 * 10**12),
        ("7B", 7),
        ("1000", 1000),
        (1000, 1000),
        (" 0.3MB ", 300_000),
    ],
)
def test_sizes_are_read_in_both_kinds_of_units(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "many", "-1MiB", -1, "4G", "1e9", "MiB", True])
def test_what_is_no_size_gets_examples(text):
    with pytest.raises(ConfigError, match=r"is not a size; write for example 64MiB"):
        parse_bytes(text)
