"""A history keeps what the ledger said after each window, stays small, and is saved and checked."""

from __future__ import annotations

import numpy as np
import pytest

from salience.errors import StateError
from salience.ledger import Ledger, history
from salience.ledger.history import MAX_SAMPLES, MAX_WINDOWS, History


def noted(windows: int, n: int = 4) -> History:
    kept, ledger = History(n), Ledger(n)
    for window in range(windows):
        ledger.record(np.arange(n), {"loss": np.arange(n, dtype=np.float32) / (window + 1)}, window=window)
        kept.note(ledger, window)
    return kept


def test_every_window_has_a_row_of_what_the_ledger_said():
    kept = noted(3)
    assert kept.windows == [0, 1, 2]
    np.testing.assert_allclose(kept["last_loss"], np.outer([1, 1 / 2, 1 / 3], np.arange(4)), rtol=1e-3)
    assert np.isnan(kept["confidence"]).all(), "no logits were given"


def test_a_window_that_is_done_again_replaces_what_was_said_of_it_and_of_later_ones():
    kept, ledger = noted(3), Ledger(4)
    ledger.record(np.arange(4), {"loss": np.full(4, 7, dtype=np.float32)}, window=1)
    kept.note(ledger, 1)
    assert kept.windows == [0, 1]
    assert (kept["last_loss"][1] == 7).all()


def test_it_stays_small_on_many_samples_and_many_windows():
    many = noted(2, n=3 * MAX_SAMPLES)
    assert many["last_loss"].shape == (2, MAX_SAMPLES)
    assert (np.diff(many.ids) > 0).all()
    long = noted(MAX_WINDOWS + 30)
    assert len(long) <= MAX_WINDOWS
    assert long.windows[-1] == MAX_WINDOWS + 28, "every second window from there on"
    assert np.unique(np.diff(long.windows)).tolist() == [2]


def test_it_is_saved_and_loaded_as_it_was(tmp_path):
    kept = noted(3)
    history.save(kept, tmp_path / "history.npz")
    again = history.load(tmp_path / "history.npz")
    assert again.windows == kept.windows
    for name in ("last_loss", "var_loss", "forgotten"):
        np.testing.assert_array_equal(again[name], kept[name])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ids", np.array([0, 9])),
        ("windows", np.array([1, 0, 2])),
        ("last_loss", np.zeros((3, 4), dtype=np.float64)),
        ("every", np.array(0)),
    ],
)
def test_a_history_that_cannot_be_right_is_refused(name, value):
    with pytest.raises(StateError, match="history"):
        History(0).load_state_dict({**noted(3).state_dict(), name: value})


def test_a_history_that_lacks_a_column_is_refused():
    state = noted(2).state_dict()
    del state["forgotten"]
    with pytest.raises(StateError, match="lacks forgotten"):
        History(0).load_state_dict(state)
