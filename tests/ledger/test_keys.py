"""A sample has a key, and the ledger gives it a row; a ledger can grow."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from salience.errors import ConfigError, DataError
from salience.ledger import Ledger, load
from salience.ledger.keys import Keys


def test_a_dense_range_is_its_own_rows_and_is_not_copied():
    ids = np.arange(5, 9)
    assert Keys(10).rows(ids) is ids
    assert (len(Keys(10)), Keys(10).dense, list(Keys(3))) == (10, True, [0, 1, 2])


def test_other_keys_get_rows_as_they_come_and_keep_them():
    keys = Keys()
    assert keys.add(["cat/1.jpg", "dog/7.jpg", "cat/1.jpg"]).tolist() == [0, 1, 0]
    assert keys.add(["new.jpg", "dog/7.jpg"]).tolist() == [2, 1]
    assert keys.rows(["new.jpg", "cat/1.jpg"]).tolist() == [2, 0]
    assert list(keys) == ["cat/1.jpg", "dog/7.jpg", "new.jpg"]


def test_unknown_keys_get_one_sentence():
    with pytest.raises(DataError, match=r"no sample 'x\.jpg'; add it first"):
        Keys().rows(["x.jpg"])
    with pytest.raises(DataError, match="positions from 0 to 3; got 1 to 4"):
        Keys(4).rows(np.array([1, 4]))
    with pytest.raises(ConfigError, match="needs keys of its own"):
        Keys(4).add(["x"])


def test_a_ledger_grows_and_knows_what_it_knew():
    ledger = Ledger(3)
    ledger.record(np.arange(3), {"loss": np.array([1, 2, 3], dtype=np.float32)}, window=0)
    larger = ledger.grown(5)
    np.testing.assert_array_equal(larger.last_loss[:3], [1, 2, 3])
    assert larger.seen.tolist() == [1, 1, 1, 0, 0]
    np.testing.assert_array_equal(larger.last_seen[3:], Ledger(1).last_seen[0])
    with pytest.raises(ConfigError, match="cannot shrink"):
        larger.grown(2)


def test_a_ledger_saved_before_the_run_was_made_of_parts_still_loads():
    ledger = load(Path(__file__).parent / "version-1.npz")
    assert ledger.seen.tolist() == [1, 1, 1, 1, 0, 0]
    assert ledger.last_loss[:4].tolist() == [1, 2, 3, 4]
    assert ledger.label.tolist() == [0, 1, 0, 1, 0, 1]
