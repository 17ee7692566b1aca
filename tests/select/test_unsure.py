"""The sampler of `default`: prefers what can be learnt, never wrong labels, and is unbiased where nobody judges them."""

from __future__ import annotations

import numpy as np
import pytest

import salience
from salience.errors import ConfigError
from salience.ledger import Ledger
from salience.select import Candidates, Clock, View
from salience.select.samplers import unsure
from salience.select.trial import AFTER, ID, RESTS, WINDOW
from salience.select.weights import loss_weights

N = 4000


def candidates(noise: float | None, *, carried: float | None = 0.9) -> Candidates:
    """A quarter is hard; those that rested gained `carried` of what others did (None: no trial was made)."""
    ledger = Ledger(N)
    ledger.set_labels(np.arange(N) % 5)
    ledger.last_seen[:] = 3
    hard = np.arange(N) < N // 4
    ledger.confidence[:] = np.where(hard, 0.3, 0.95)
    if carried is not None:
        rests = np.arange(100) % 2
        ledger.trial = np.zeros((100, 6))
        ledger.trial[:, WINDOW], ledger.trial[:, ID], ledger.trial[:, RESTS] = 1, np.arange(100), rests
        ledger.trial[:, AFTER] = np.where(rests, 0.2 * carried, 0.2)
    view = View(ledger, Clock(window=4, windows=20, keep=0.5))
    raw = (1 - ledger.confidence).astype(np.float32)
    return Candidates(view=view, ids=np.arange(N), importance=raw, noise=noise, raw_of_all=raw)


def drawn(noise: float | None, **options: float | None) -> float:
    """Share of the hard samples that is drawn."""
    draw = unsure(candidates(noise, **options), N // 2, np.random.default_rng(1))
    assert len(set(draw.positions.tolist())) == N // 2
    return float((draw.positions < N // 4).sum() / (N // 4))


@pytest.mark.parametrize("noise", [0.0, float("nan")])
def test_what_others_carry_along_is_preferred(noise):
    assert drawn(noise) == pytest.approx(1.0)


@pytest.mark.parametrize(("noise", "carried"), [(0.2, 0.9), (0.0, 0.5), (float("nan"), 0.5), (0.0, None)])
def test_the_cut_is_random_where_labels_are_wrong_or_no_trial_favours_hard_samples(noise, carried):
    assert drawn(noise, carried=carried) == pytest.approx(0.5, abs=0.05)


def test_hard_samples_are_not_preferred_after_their_labels_were_called_wrong():
    some = candidates(float("nan"))
    some.view._ledger.course.append((0.4, 0.2, 2000.0, 0.15))
    draw = unsure(some, N // 2, np.random.default_rng(1))
    assert (draw.positions < N // 4).sum() / (N // 4) == pytest.approx(0.5, abs=0.05)
    assert "called wrong before" in draw.note


@pytest.mark.parametrize("carried", [0.9, 0.5])
def test_samples_on_trial_rest_or_are_visited_as_drawn(carried):
    some = candidates(0.0, carried=carried)
    now = np.zeros((200, 6))
    now[:, WINDOW], now[:, ID], now[:, RESTS], now[:, AFTER] = 4, np.arange(200), np.arange(200) % 2, np.nan
    some.view._ledger.trial = np.concatenate((some.view.trial, now))
    picked = set(unsure(some, N // 2, np.random.default_rng(1)).positions.tolist())
    assert len(picked) == N // 2
    assert not picked & set(range(1, 200, 2))
    assert picked >= set(range(0, 200, 2))
    assert len(unsure(some, 150, np.random.default_rng(1)).positions) == 150, "too small a budget for a trial"


def test_random_cuts_take_what_the_last_window_left_out_first():
    some = candidates(0.2)
    left_out = np.random.default_rng(0).permutation(N)[: N // 2]
    some.view._ledger.last_seen[left_out] = 2
    for budget in (N // 4, N // 2):
        assert set(unsure(some, budget, np.random.default_rng(1)).positions.tolist()) <= set(left_out.tolist())
    more = unsure(some, 3 * N // 4, np.random.default_rng(1)).positions
    assert set(left_out.tolist()) <= set(more.tolist())


def test_without_a_judgement_the_weighted_mean_is_unbiased():
    some = candidates(None)
    value = np.where(np.arange(N) < N // 4, 3.0, 1.0)
    means = []
    for seed in range(200):
        draw = unsure(some, N // 2, np.random.default_rng(seed))
        weights = loss_weights(draw.inclusion, len(draw.positions), N, draw.temper)
        means.append((weights * value[draw.positions]).mean())
    assert np.mean(means) == pytest.approx(value.mean(), abs=3 * np.std(means) / 14 + 1e-3)


def test_tempered_weights_lie_between_plain_and_unbiased_with_mean_one():
    inclusion = np.array([1.0, 0.25, 0.25, 0.25], dtype=np.float32)
    half, whole = loss_weights(inclusion, 4, 8, 0.5), loss_weights(inclusion, 4, 8)
    assert half.mean() == pytest.approx(1)
    assert half[1] / half[0] == pytest.approx(2)
    assert whole[1] / whole[0] == pytest.approx(4)
    assert (loss_weights(inclusion, 4, 8, 0.0) == 1).all()


@pytest.mark.parametrize("options", [{"floor": 0}, {"power": -1}, {"temper": 2}, {"carry": -0.1}])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        unsure(candidates(0.0), 10, np.random.default_rng(0), **options)


def test_equal_scores_favour_no_class_on_disk():
    """Folders sorted by class and a constant score: every class gets its share."""
    selector = salience.Selector(1000, batch_size=50, epochs=10, select="default", labels=np.repeat(np.arange(10), 100))
    counts = np.zeros(10)
    import torch

    for _ in range(10):
        for ids, _ in selector:
            selector.loss(torch.ones(len(ids)))
        counts += np.bincount(selector.plan.ids // 100, minlength=10)
    assert counts.max() < 1.15 * counts.min()
