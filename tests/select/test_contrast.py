"""Suspected, hard and easy samples side by side: groups, means and what separates, on a run computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from salience.ledger import Ledger
from salience.ledger.history import History
from salience.select.classes import class_findings
from salience.select.contrast import contrast, groups_of

N = 40
WRONG = np.arange(N) < 8
HARD = np.arange(N) >= N - 3  # a tenth of the 32 others


def run_of(*windows: np.ndarray) -> tuple[Ledger, History]:
    ledger, history = Ledger(N), History(N)
    for window, losses in enumerate(windows):
        ledger.record(np.arange(N), {"loss": losses.astype(np.float32)}, window=window)
        history.note(ledger, window)
    return ledger, history


FIRST = np.where(WRONG, 4.0, np.where(HARD, 5.0, 1.0 + np.arange(N) / N))
THEN = np.where(WRONG, 4.0, np.where(HARD, 3.0, np.arange(N) / N))


def test_groups_are_the_wrong_ones_and_the_hardest_and_easiest_of_the_others():
    ledger, _ = run_of(FIRST, THEN)
    groups = groups_of(ledger, WRONG)
    assert list(groups) == ["wrong", "hard", "easy"]
    np.testing.assert_array_equal(groups["hard"], HARD)
    assert np.flatnonzero(groups["easy"]).tolist() == list(range(8, 24))


def test_means_and_what_separates_are_followed_from_window_to_window():
    ledger, history = run_of(FIRST, THEN)
    found = contrast(history, groups_of(ledger, WRONG), known=True)
    assert found.sizes == {"wrong": 8, "hard": 3, "easy": 16}
    np.testing.assert_allclose(found.course["loss"]["wrong"], [4, 4])
    np.testing.assert_allclose(found.course["loss"]["hard"], [5, 3])
    np.testing.assert_allclose(found.separation["loss"], [0, 1], atol=1e-6)
    assert found.course["variance"]["hard"][1] > found.course["variance"]["wrong"][1] == 0
    assert found.best()[0] in ("loss", "variance")
    assert "forgotten" not in found.course, "no logits, so that nothing is known of it"


def test_without_known_labels_and_without_suspects_nothing_separates():
    ledger, history = run_of(FIRST)
    found = contrast(history, groups_of(ledger))
    assert (found.first, found.sizes["suspected"], found.best()) == ("suspected", 0, None)
    assert found.separation["loss"] == pytest.approx([np.nan], nan_ok=True)


def test_a_class_that_loses_its_share_because_it_is_learnt_is_told_so():
    ledger = Ledger(100)
    ledger.set_labels(np.repeat([0, 1], 50))
    ledger.record(np.arange(100), {"loss": np.repeat([0.05, 1.0], 50).astype(np.float32)}, window=0)
    ledger.confidence[:] = np.repeat([0.95, 0.4], 50)
    ledger.trained[:] = np.repeat([1, 4], 50)
    _, (easy, hard) = class_findings(ledger, np.zeros(100, dtype=bool))
    assert easy.reason.startswith("visited 0.4x its share: mean loss 0.05 against 0.53 overall")
    assert easy.reason.endswith("100% of it is learnt (p(label) over 0.9) against 50%")
    assert hard.reason.endswith("0% of it is learnt (p(label) over 0.9) against 50%")
