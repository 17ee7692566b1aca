"""Do networks agree? Rank correlation, overlap, votes and what is hard to rank, on examples computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from salience.errors import StateError
from salience.ledger import Ledger
from salience.select.agreement import agreement, auroc, overlap, rank_correlation


def ledger_of(losses, label=None) -> Ledger:
    ledger = Ledger(len(losses))
    ledger.record(np.arange(len(losses)), {"loss": np.asarray(losses, dtype=np.float32)}, window=0)
    if label is not None:
        ledger.set_labels(np.asarray(label))
    return ledger


def test_rank_correlation_is_that_of_the_ranks_whatever_the_scale():
    a = np.array([1.0, 2.0, 3.0, 4.0])
    assert rank_correlation(a, np.exp(a)) == pytest.approx(1)
    assert rank_correlation(a, -a) == pytest.approx(-1)
    # ranks 1 2 3 4 against 2 1 4 3: 1 - 6 * 4 / (4 * 15) = 0.6
    assert rank_correlation(a, np.array([2.0, 1.0, 4.0, 3.0])) == pytest.approx(0.6)
    assert rank_correlation(a, np.ones(4)) == 0
    assert rank_correlation(np.append(a, np.nan), np.append(-a, 7.0)) == pytest.approx(-1), (
        "what one does not know is left out"
    )


def test_overlap_counts_the_hardest_that_both_have():
    a, b = np.arange(10.0), np.array([0, 1, 2, 3, 4, 5, 9, 6, 8, 7.0])
    assert overlap(a, b, 0.1) == 0
    assert overlap(a, b, 0.3) == pytest.approx(2 / 3)
    assert overlap(a, b, 1.0) == 1


def test_auroc_counts_pairs_and_ties_half():
    assert auroc(np.array([1.0, 2.0, 2.0, 3.0]), np.array([False, True, False, True])) == pytest.approx(3.5 / 4)
    assert np.isnan(auroc(np.ones(3), np.zeros(3, dtype=bool)))


def test_networks_that_agree_speak_for_the_data_and_others_for_the_model():
    rng = np.random.default_rng(0)
    losses = rng.random(400)
    alike = agreement({"a": ledger_of(losses), "b": ledger_of(losses * 3 + 0.01 * rng.random(400))})
    other = agreement({"a": ledger_of(losses), "b": ledger_of(rng.random(400))})
    assert (alike.verdict, other.verdict) == ("mainly of the data", "mainly of the model")
    assert alike.overlap > 0.9
    assert other.overlap == pytest.approx(0.1, abs=0.1)


def test_the_sample_whose_rank_differs_most_is_the_hardest_to_rank():
    losses = np.linspace(1, 2, 50)
    swapped = losses.copy()
    swapped[[7, 42]] = losses[[42, 7]]
    found = agreement({"a": ledger_of(losses), "b": ledger_of(swapped)})
    assert set(found.unsteady[:2].tolist()) == {7, 42}
    assert found.spread[0] == pytest.approx(35 / 50 / 2)


def test_classes_are_compared_one_by_one_and_small_ones_left_out():
    label = np.repeat([0, 1, 2], [30, 30, 5])
    losses = np.random.default_rng(1).random(65)
    turned = np.where(label == 1, -losses, losses)
    (pair,) = agreement({"a": ledger_of(losses, label), "b": ledger_of(turned, label)}).pairs
    assert pair.by_class == {0: pytest.approx(1), 1: pytest.approx(-1)}


def test_with_wrong_labels_known_networks_together_are_compared_with_each_alone():
    rng = np.random.default_rng(2)
    wrong = rng.random(2000) < 0.2
    each = {name: ledger_of(wrong + rng.normal(size=2000)) for name in "abc"}
    found = agreement(each, wrong=wrong).found
    assert all(found["all together"] > found[name] + 0.05 for name in "abc")


def test_ledgers_that_cannot_be_compared_are_told_in_a_sentence():
    with pytest.raises(StateError, match="at least two"):
        agreement({"a": ledger_of([1.0])})
    with pytest.raises(StateError, match="same data set"):
        agreement({"a": ledger_of([1.0]), "b": ledger_of([1.0, 2.0])})
    with pytest.raises(StateError, match="no losses in common"):
        agreement({"a": Ledger(3), "b": Ledger(3)})
