"""What the ledger stores, counts and refuses."""

from __future__ import annotations

import numpy as np
import pytest

from salience.errors import ConfigError, Misattributed, StateError
from salience.ledger import Ledger, bytes_per_sample, load, merge, save
from salience.ledger.ledger import LOSS_SMOOTHING, block_bytes
from salience.memory import Memory


def rows(*losses: float) -> dict[str, np.ndarray]:
    return {"loss": np.array(losses, dtype=np.float32)}


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def test_a_sample_takes_at_most_64_bytes():
    assert bytes_per_sample() <= 64
    ledger = Ledger(1000)
    votes = ledger.vote.nbytes + ledger.vote_p.nbytes
    assert (ledger.nbytes, votes) == (1000 * bytes_per_sample() + votes, 24_000)


def test_mean_and_variance_follow_their_formula():
    ledger = Ledger(3)
    mean, var = 2.0, 0.0
    ledger.record(ids(1), rows(2.0), window=0)
    for value in (1.0, 4.0, 0.5):
        ledger.record(ids(1), rows(value), window=1)
        step = value - mean
        mean, var = mean + LOSS_SMOOTHING * step, (1 - LOSS_SMOOTHING) * (var + LOSS_SMOOTHING * step**2)
    assert ledger.mean_loss[1] == pytest.approx(mean)
    assert ledger.var_loss[1] == pytest.approx(var)
    assert ledger.last_loss[1] == 0.5
    assert (ledger.seen[1], ledger.last_seen[1]) == (4, 1)
    assert np.isnan(ledger.mean_loss[[0, 2]]).all()


def test_an_id_that_stands_twice_in_a_batch_counts_twice_with_the_mean():
    ledger = Ledger(4)
    ledger.record(ids(2, 0, 2), rows(1.0, 5.0, 3.0), window=4)
    assert ledger.last_loss[2] == 2.0
    assert ledger.seen.tolist() == [1, 0, 2, 0]
    assert ledger.last_seen.tolist() == [4, -1, 4, -1]


def test_losses_that_are_not_finite_are_counted_and_never_stored():
    ledger = Ledger(4)
    bad = ledger.record(ids(0, 1, 2, 3), rows(1.0, float("nan"), float("inf"), 2.0), window=0)
    assert bad == 2
    assert ledger.bad.tolist() == [0, 1, 1, 0]
    assert ledger.seen.tolist() == [1, 0, 0, 1]
    assert np.isnan(ledger.mean_loss[1:3]).all()


def test_counters_stop_at_their_limit_instead_of_wrapping():
    ledger = Ledger(1)
    ledger.seen[0] = 65535
    ledger.record(ids(0), rows(1.0), window=0)
    assert ledger.seen[0] == 65535


def test_a_sample_that_goes_from_right_to_wrong_is_forgotten_once():
    ledger = Ledger(1)
    for guess in (1, 2, 2, 1, 0):
        full = {"loss": [1.0], "target": [1], "margin": [0.5], "el2n": [0.1], "entropy": [0.2], "confidence": [0.5]}
        full |= {"guess": [guess], "other": [1], "guess_p": [0.6]}
        ledger.record(ids(0), {k: np.array(v, dtype=np.float32) for k, v in full.items()}, window=0)
    assert (ledger.right[0], ledger.forgotten[0], ledger.guess[0]) == (2, 2, 0)
    assert ledger.margin_sum[0] == pytest.approx(2.5)


def test_targets_that_contradict_known_classes_stop_the_run_and_name_with_ids():
    ledger = Ledger(3)
    ledger.check_labels(ids(0, 1), np.array([5, 6]))
    with pytest.raises(Misattributed, match="with_ids"):
        ledger.check_labels(ids(1, 2), np.array([5, 6]))


def test_a_saved_ledger_comes_back_the_same(tmp_path):
    ledger = Ledger(5)
    ledger.record(ids(1, 4), rows(0.25, 3.0), window=2)
    save(ledger, tmp_path / "l.npz")
    again = load(tmp_path / "l.npz")
    for name in ledger:
        np.testing.assert_array_equal(again[name], ledger[name], err_msg=name)


def test_a_damaged_ledger_is_one_clear_sentence(tmp_path):
    path = tmp_path / "l.npz"
    save(Ledger(5), path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(StateError, match="damaged"):
        load(path)
    with pytest.raises(StateError, match="no ledger at"):
        load(tmp_path / "missing.npz")


def test_merged_ledgers_add_visits_average_losses_and_vote_on_guesses():
    runs = [Ledger(2) for _ in range(3)]
    for run, guess in zip(runs, (1, 2, 2), strict=True):
        run.record(ids(0), rows(float(guess)), window=0)
        run.guess[0] = guess
    merged = merge(runs)
    assert merged.seen[0] == 3
    assert merged.mean_loss[0] == pytest.approx(5 / 3)
    assert merged.guess[0] == 2
    assert np.isnan(merged.mean_loss[1])
    with pytest.raises(StateError, match="same data set"):
        merge([Ledger(2), Ledger(3)])


def test_a_ledger_of_another_length_is_refused():
    with pytest.raises(StateError, match="4 samples"):
        Ledger(4).load_state_dict(Ledger(5).state_dict())
    with pytest.raises(ConfigError, match="at least one"):
        Ledger(0)


def test_processes_of_a_node_see_one_ledger():
    memory = Memory(block_bytes(10))
    first = Ledger(10, memory=memory.buffer)
    second = Ledger(10, memory=Memory.open(memory.token).buffer, fresh=False)
    first.record(ids(3), rows(1.5), window=0)
    assert second.last_loss[3] == 1.5
