"""The pilot's fit on curves whose answer is known, with and without noise."""

from __future__ import annotations

import numpy as np
import pytest

import salience
from salience.errors import ConfigError
from salience.select.pilot import choose_share, student

SHARES = (0.15, 0.25, 0.4, 0.6, 0.8, 1.0)


def curve(share, a=0.92, b=0.005, c=1.5):
    return a - b * share**-c


@pytest.mark.parametrize(("b", "c"), [(0.005, 1.5), (0.01, 1.0), (0.002, 0.5), (0.001, 3.0)])
def test_without_noise_the_share_is_the_one_that_loses_the_tolerance(b, c):
    found = choose_share(SHARES, [curve(s, b=b, c=c) for s in SHARES], 0.002)
    true = max(SHARES[0], (1 + 0.002 / b) ** (-1 / c))
    assert found.tells, found.reason
    assert found.share == pytest.approx(true, abs=0.01)
    assert curve(1.0, b=b, c=c) - curve(found.share, b=b, c=c) < 0.0021


@pytest.mark.parametrize("sd", [0.0005, 0.002])
def test_the_interval_holds_the_true_share_as_often_as_it_says(sd):
    """200 pilots: 90% intervals cover the truth in 90% of them, give or take 4 standard errors (2.1% each)."""
    true, runs = (1 + 0.002 / 0.005) ** (-1 / 1.5), 200
    covered = 0
    for seed in range(runs):
        noise = np.random.default_rng(seed).normal(0, sd, len(SHARES))
        found = choose_share(SHARES, [curve(s) + e for s, e in zip(SHARES, noise, strict=True)], 0.002)
        covered += found.low <= true <= found.high
    assert covered / runs == pytest.approx(0.9, abs=4 * np.sqrt(0.9 * 0.1 / runs))


def test_noise_that_hides_the_answer_is_said():
    noise = np.random.default_rng(0).normal(0, 0.02, len(SHARES))
    found = choose_share(SHARES, [curve(s) + e for s, e in zip(SHARES, noise, strict=True)], 0.002)
    assert not found.tells
    assert "repeat runs" in found.reason


def test_too_few_shares_cannot_tell():
    assert not choose_share(SHARES[:3], [curve(s) for s in SHARES[:3]]).tells
    found = choose_share((0.5, 1.0) * 3, [curve(s) for s in (0.5, 1.0) * 3])
    assert not found.tells
    assert "2 different shares are too few" in found.reason


def test_a_metric_that_does_not_depend_on_the_share_needs_the_smallest_one_tried():
    rising_with_less = [0.9 - 0.01 * s for s in SHARES]
    for metrics in ([0.9] * 6, rising_with_less):
        assert choose_share(SHARES, metrics).share == SHARES[0]


def test_one_broken_run_is_left_out_and_named():
    shares = SHARES * 2
    noise = np.random.default_rng(1).normal(0, 0.0003, len(shares))
    metrics = [curve(s) + e for s, e in zip(shares, noise, strict=True)]
    clean = choose_share(shares, metrics)
    assert clean.outlier is None
    metrics[4] = 0.5  # diverged
    found = choose_share(shares, metrics)
    assert found.outlier == 4
    assert found.share == pytest.approx(clean.share, abs=0.02)


def test_students_t_is_that_of_the_tables():
    assert [student(dof, 0.95) for dof in (1, 2, 5, 30)] == pytest.approx([12.706, 4.303, 2.571, 2.042], rel=2e-3)


def test_a_pilot_trains_once_for_each_budget():
    asked = []

    def train(share):
        asked.append(share)
        return curve(share)

    found = salience.pilot(train, budgets=SHARES, tolerance=0.002)
    assert tuple(asked) == SHARES == found.shares
    assert found.metrics == pytest.approx([curve(s) for s in SHARES])
    assert found.share == pytest.approx(0.8, abs=0.01)


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ConfigError, match=r"train\(0\.5\) returned nan"):
        salience.pilot(lambda share: float("nan"), budgets=(0.5, 1.0))
    with pytest.raises(ConfigError, match="above 0 and at most 1"):
        salience.pilot(curve, budgets=(0.5, 1.5))
    with pytest.raises(ConfigError, match="tolerance is 0"):
        salience.pilot(curve, tolerance=0)
    with pytest.raises(ConfigError, match="2 shares and 1 metrics"):
        choose_share((0.5, 1.0), (0.9,))
