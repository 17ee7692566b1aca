"""A cache of rows by access importance: what it returns, what it keeps, and what it counts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from salience.errors import ConfigError, StateError
from salience.feed.rows import RowCache


@pytest.fixture
def matrix(tmp_path: Path) -> np.ndarray:
    np.save(tmp_path / "features.npy", np.arange(300, dtype=np.float32).reshape(100, 3))
    return np.load(tmp_path / "features.npy", mmap_mode="r")


def test_rows_are_those_of_the_matrix_whatever_is_kept(matrix):
    rng = np.random.default_rng(0)
    rows = RowCache(matrix, 10)
    for _ in range(5):
        for _ in range(4):
            ids = np.minimum(rng.zipf(1.5, 30) - 1, 99)
            np.testing.assert_array_equal(rows.take(ids), matrix[ids])
        rows.next_window()


def test_what_was_asked_for_most_is_kept_from_the_next_window_on(matrix):
    rows = RowCache(matrix, 2)
    for ids in ([1, 2, 3], [2, 3], [3, 7]):
        rows.take(ids)
    assert rows.rows_from_slow_tier == 7
    assert rows.next_window() == 2  # 3, asked for three times, and 2
    rows.take([2, 3, 7])
    assert (rows.rows_from_memory, rows.rows_from_slow_tier) == (2, 7 + 2 + 1)


def test_a_row_named_twice_in_a_batch_is_read_once(matrix):
    rows = RowCache(matrix, 0)
    assert rows.take([5, 5, 5]).shape == (3, 3)
    assert rows.rows_from_slow_tier == 1


def test_a_guess_fills_it_before_the_first_window(matrix):
    rows = RowCache(matrix, 3, importance=np.arange(100))
    assert rows.rows_from_slow_tier == 3
    rows.take([97, 98, 99])
    assert rows.rows_from_slow_tier == 3


def test_an_exchange_reads_only_what_is_missing(matrix):
    rows = RowCache(matrix, 3, decay=0.0)
    rows.take([1, 2, 3])
    rows.next_window()
    rows.take([2, 3, 4])
    assert rows.next_window() == 1
    assert rows.next_window() == 0  # nothing was asked for: what is there stays
    before = rows.rows_from_slow_tier
    rows.take([2, 3, 4])
    assert rows.rows_from_slow_tier == before


def test_older_windows_count_less(matrix):
    rows = RowCache(matrix, 1, decay=0.5)
    for ids in ([1], [1], [1]):
        rows.take(ids)
    rows.next_window()
    rows.take([2])
    rows.next_window()
    rows.take([2])
    rows.next_window()  # 1: 3 / 4, 2: 1.5
    assert rows.importance[[1, 2]].tolist() == [0.75, 1.5]
    before = rows.rows_from_slow_tier
    rows.take([2])
    assert rows.rows_from_slow_tier == before


def test_a_resumed_cache_keeps_the_same_rows(matrix):
    rows = RowCache(matrix, 2)
    rows.take([1, 2])
    rows.next_window()
    rows.take([3])
    again = RowCache(matrix, 2)
    again.load_state_dict(rows.state_dict())
    for one in (rows, again):
        one.take([1, 2, 3])
        one.next_window()
    assert again.rows_from_slow_tier == rows.rows_from_slow_tier
    np.testing.assert_array_equal(again.importance, rows.importance)
    with pytest.raises(StateError, match="100 rows"):
        RowCache(matrix[:50], 2).load_state_dict(rows.state_dict())


def test_wrong_arguments_say_what_is_allowed(matrix):
    with pytest.raises(ConfigError, match="rows 0 to 99"):
        RowCache(matrix, 2).take([3, 100])
    with pytest.raises(ConfigError, match="capacity is -1"):
        RowCache(matrix, -1)
    with pytest.raises(ConfigError, match=r"\[100\]"):
        RowCache(matrix, 1, importance=[1.0])
    with pytest.raises(ConfigError, match=r"\[rows, columns\]"):
        RowCache(matrix[:, 0], 1)
