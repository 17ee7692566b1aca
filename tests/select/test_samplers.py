"""Samplers tested as statistics: budgets, inclusion frequencies, unbiased gradients."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

import salience
from salience.config import SelectConfig, Use
from salience.errors import ConfigError
from salience.ledger import Ledger
from salience.registry import card_of, catalogue, find
from salience.select import Candidates, Clock, Draw, Pipeline, View
from salience.select.drawing import inclusion_probabilities, systematic
from salience.select.samplers import lowest, probability, prune_rescale, ratio, threshold
from salience.select.weights import loss_weights

N = 200


def candidates(n: int = N) -> Candidates:
    rng = np.random.default_rng(1)
    raw = rng.exponential(size=n).astype(np.float32)
    view = View(Ledger(n), Clock(window=3, windows=10, keep=0.3))
    importance = ((np.argsort(np.argsort(raw)) + 0.5) / n).astype(np.float32)
    return Candidates(view=view, ids=np.arange(n), importance=importance, raw_of_all=raw)


UNBIASED = [o.name for o in catalogue("samplers") if card_of(find("samplers", o.name)).unbiased]


@pytest.mark.parametrize("name", UNBIASED)
def test_inclusion_frequencies_match_the_stated_probabilities(name):
    sampler, have, draws = find("samplers", name), candidates(), 4000
    hits, stated = np.zeros(N), np.full(N, np.nan)
    for k in range(draws):
        draw = sampler(have, 60, np.random.default_rng(k))
        hits[draw.positions] += 1
        stated[draw.positions] = draw.inclusion
    p = np.nan_to_num(stated)
    error = np.sqrt(np.maximum(p * (1 - p), 1e-9) / draws)
    assert (np.abs(hits / draws - p) <= 5 * error + 1e-6).all()


@pytest.mark.parametrize("name", UNBIASED)
def test_the_weighted_gradient_of_an_unbiased_sampler_is_the_full_gradient(name):
    """mean over many draws of grad(sum(w*l)/B) lies in the confidence interval around grad(mean(l))."""
    sampler, have, draws = find("samplers", name), candidates(), 1500
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(N, 5, generator=g), torch.randn(N, generator=g)
    theta = torch.zeros(5)
    gradients = -2 * (y - x @ theta).unsqueeze(1) * x  # of (y - x theta)^2, one row a sample
    full = gradients.mean(0).numpy()
    found = []
    for k in range(draws):
        draw = sampler(have, 60, np.random.default_rng(k))
        w = loss_weights(draw.inclusion, len(draw.positions), N)
        found.append((torch.from_numpy(w).unsqueeze(1) * gradients[draw.positions]).sum(0).numpy() / len(w))
    mean, error = np.mean(found, axis=0), np.std(found, axis=0) / np.sqrt(draws)
    assert (np.abs(mean - full) < 4.5 * error).all()
    biased = np.mean(
        [gradients[ratio(have, 60, np.random.default_rng(k)).positions].mean(0).numpy() for k in range(50)], 0
    )
    assert (np.abs(biased - full) > 4.5 * error).any()  # the test can tell


def test_systematic_sampling_draws_exactly_the_budget():
    rng = np.random.default_rng(0)
    for budget in (1, 7, 50, 99, 100):
        p = inclusion_probabilities(rng.random(100) ** 4, budget)
        assert p.max() <= 1
        assert p.sum() == pytest.approx(budget)
        picks = systematic(rng, p)
        assert len(picks) == budget == len(set(picks.tolist()))


def test_ratio_keeps_the_most_important_and_explores_the_rest():
    have = candidates()
    best = set(np.argsort(-have.importance)[:54].tolist())
    seen: set[int] = set()
    for k in range(400):
        draw = set(ratio(have, 60, np.random.default_rng(k), explore=0.1).positions.tolist())
        assert best <= draw
        assert len(draw) == 60
        seen |= draw
    assert len(seen) == N


def six(raw: list[float], learnt_loss: float | None = None) -> Candidates:
    clock = Clock(window=3, windows=10, keep=0.3, learnt_loss=learnt_loss)
    return Candidates(
        view=View(Ledger(6), clock), ids=np.arange(6), importance=np.linspace(0, 1, 6, dtype=np.float32),
        raw_of_all=np.array(raw, dtype=np.float32),
    )  # fmt: skip


def drawn(draw: Draw) -> list[int]:
    return sorted(draw.positions.tolist())


def test_threshold_compares_values_and_sets_its_own_budget():
    have, rng = six([0.2, 0.9, 0.5, np.nan, 0.51, 3.0]), np.random.default_rng(0)
    found = threshold(have, 2, rng, above=0.5)
    assert drawn(found) == [1, 3, 4, 5]
    assert found.note == "4 of 6 score over 0.5"
    assert drawn(threshold(have, 2, rng, above=0.9)) == [3, 5]
    small = dataclasses.replace(have, raw_of_all=have.raw_of_all * np.float32(1e-6))
    assert drawn(threshold(small, 2, rng, above=0.5)) == [3]  # scaled scores are other values
    assert drawn(threshold(have, 2, rng, above=-1)) == list(range(6))


def test_threshold_that_nothing_is_over_draws_a_tenth_of_the_budget_at_random():
    rng = np.random.default_rng(0)
    raw = np.zeros(1000, dtype=np.float32)
    raw[:3] = 1
    have = dataclasses.replace(candidates(1000), raw_of_all=raw)
    draws = [threshold(have, 400, rng) for _ in range(20)]
    assert {len(draw.positions) for draw in draws} == {40}
    assert all(set(range(3)) <= set(drawn(draw)) for draw in draws)
    assert len({tuple(drawn(draw)) for draw in draws}) == 20
    assert draws[0].note == "3 of 1,000 score over 0.5, 37 more at random"


def test_a_calibrated_threshold_leaves_out_nothing_until_it_is_calibrated():
    raw, rng = [0.2, 0.9, 0.5, 0.1, 0.51, 3.0], np.random.default_rng(0)
    assert drawn(threshold(six(raw), 2, rng, above="auto")) == list(range(6))
    assert drawn(threshold(six(raw, learnt_loss=0.6), 2, rng, above="auto")) == [1, 5]
    for wrong in ("mean", float("nan"), True):
        with pytest.raises(ConfigError, match="must be a finite number or 'auto'"):
            threshold(six(raw), 2, rng, above=wrong)


def test_lowest_leaves_out_the_highest_and_keeps_what_nobody_has_seen():
    have, rng = six([0.2, 0.9, 0.5, np.nan, 0.5, 3.0]), np.random.default_rng(0)
    assert drawn(lowest(have, 2, rng)) == [0, 3]
    assert drawn(lowest(have, 5, rng)) == [0, 1, 2, 3, 4]
    assert {tuple(drawn(lowest(have, 3, rng))) for _ in range(20)} == {(0, 2, 3), (0, 3, 4)}  # ties by chance


def test_prune_rescale_drops_half_of_the_easy_ones_and_doubles_the_rest_of_them():
    have = candidates()
    draw = prune_rescale(have, 0, np.random.default_rng(0), drop=0.5)
    easy = have.raw < have.raw.mean()
    kept = np.zeros(N, dtype=bool)
    kept[draw.positions] = True
    assert kept[~easy].all()
    assert kept[easy].sum() == easy.sum() - int(0.5 * easy.sum())
    assert np.allclose(draw.inclusion[easy[draw.positions]], 0.5, atol=0.01)


def test_equal_importance_is_uniform():
    have = candidates()
    flat = Candidates(view=have.view, ids=have.ids, importance=np.full(N, 0.5, np.float32), raw_of_all=have.raw_of_all)
    assert np.allclose(probability(flat, 50, np.random.default_rng(0)).inclusion, 0.25)


def test_options_out_of_range_are_refused():
    with pytest.raises(ConfigError, match="explore is 2"):
        ratio(candidates(), 10, np.random.default_rng(0), explore=2)
    with pytest.raises(ConfigError, match="power is -1"):
        probability(candidates(), 10, np.random.default_rng(0), power=-1)
    with pytest.raises(ConfigError, match="keep: share is 0"):
        Pipeline(SelectConfig(keep=Use(name="constant", options={"share": 0})))


def test_losses_that_are_all_alike_leave_seta_something_to_train_on():
    selector = salience.Selector(100, batch_size=10, epochs=4, select="seta")
    for _ in range(4):
        for ids, _ in selector:
            selector.loss(torch.zeros(len(ids)))
    assert selector.epoch == 4
