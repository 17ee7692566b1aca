"""Options of a source: checked when it is made, kept as one value, and used by the Loader."""

from __future__ import annotations

import dataclasses

import pytest

import salience
from salience.errors import ConfigError
from salience.feed.options import ReadingOptions


@pytest.fixture
def folder(tmp_path):
    for k in range(8):
        (tmp_path / f"{k}.bin").write_bytes(bytes([k]) * 100)
    return tmp_path


def first(data: bytes) -> int:
    return data[0]


def test_a_source_keeps_its_options_as_one_frozen_value(folder):
    source = salience.Source(
        folder,
        decode=first,
        cache="0.5kB",
        disk=f"{folder}/.cache",
        max_broken=0.25,
        views=True,
        cache_policy="planned",
    )
    assert source.reading == ReadingOptions(
        decode=first, cache=500, disk=f"{folder}/.cache", max_broken=0.25, views=True, cache_policy="planned"
    )
    assert source.reading.cached
    with pytest.raises(dataclasses.FrozenInstanceError):
        source.reading.cache = 0  # pyright: ignore[reportAttributeAccessIssue]
    assert salience.Source(folder).reading == ReadingOptions()
    assert not salience.Source(folder).reading.cached


def test_a_cache_is_no_larger_than_all_samples(folder):
    assert salience.Source(folder, cache="1MiB").reading.cache == 800


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"decode": "jpeg"}, r"decode is 'jpeg'; it must be a function"),
        ({"cache": "4GiBs"}, r"'4GiBs' is not a size; write for example"),
        ({"cache": -1}, r"cache is -1 bytes; it must be at least 0"),
        ({"cache": 50}, r"A cache of 50 bytes holds no sample; the smallest has 100"),
        ({"cache": 500, "cache_policy": "planed"}, r"no cache policy 'planed'.*'planned'"),
        ({"disk": "/x:0"}, r"disk is '/x:0'; write DIR:BYTES"),
        ({"redis": "http://host"}, r"redis is not the URL of a Redis server; write for example redis://"),
        ({"max_broken": 1.5}, r"max_broken is 1.5; it must be a share from 0 to 1"),
    ],
)
def test_a_wrong_option_is_said_when_the_source_is_made(folder, options, says):
    with pytest.raises(ConfigError, match=says):
        salience.Source(folder, **options)


def test_a_loader_reads_as_its_source_says(folder):
    loader = salience.Loader(salience.Source(folder, decode=first, cache=500), 4, with_ids=True)
    for _ in range(2):
        for ids, batch in loader:
            assert batch.tolist() == ids.tolist()
    assert "Cache of 500 bytes" in loader.report()


def test_a_loader_stops_at_the_share_of_broken_samples_its_source_allows(folder):
    def picky(data: bytes) -> int:
        return 1 // data[0]  # fails for the first sample

    list(salience.Loader(salience.Source(folder, decode=picky, max_broken=0.2), 4))
    with pytest.raises(salience.errors.DataError, match=r"more than max_broken = 0\.1"):
        list(salience.Loader(salience.Source(folder, decode=picky, max_broken=0.1), 4))
