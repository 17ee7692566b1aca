"""Is less enough? Curves whose shorter runs are known: m = P(work) - C(rate), so that F(1) - F(s) = P(1) - P(s)."""

from __future__ import annotations

import numpy as np
import pytest

from salience.curves import Shorter, curve, fewest, level, rise, shorter
from salience.ledger import Ledger
from salience.select.summary import training_fall

T = np.linspace(0.025, 1, 40)
COSINE_WORK = T + np.sin(np.pi * T) / np.pi
"""Share of a cosine schedule's learning rate that is spent by then."""
CONCAVE = {
    "power 0.2": lambda w: 1 - 0.1 * (0.05 + w) ** -0.2,
    "power 1": lambda w: 0.9 - 0.02 / (0.05 + w),
    "exponential": lambda w: 0.9 - 0.5 * np.exp(-3 * w),
    "logarithm": lambda w: 0.5 + 0.1 * np.log(0.05 + w),
}


def noisy(metric: np.ndarray, spread: float, seed: int = 0) -> np.ndarray:
    return metric + np.random.default_rng(seed).normal(0, spread, len(metric))


def asked(metric: np.ndarray, *, share: float = 0.6, progress: np.ndarray = T) -> Shorter:
    return shorter(progress, metric, share=share, epochs=100)


# ---------------------------------------------------------------- still learning


@pytest.mark.parametrize("share", [0.5, 0.7, 0.9])
@pytest.mark.parametrize("learnt", CONCAVE.values(), ids=CONCAVE)
@pytest.mark.parametrize("work", [T, COSINE_WORK], ids=["constant rate", "cosine"])
def test_what_a_shorter_run_loses_is_at_most_what_the_middle_of_the_run_gained(work, learnt, share):
    lost = learnt(1.0) - learnt(share)
    found = asked(learnt(work), share=share)
    assert 0 <= found.loss_low <= lost <= found.loss_high + found.metric_noise


def test_a_run_that_a_decayed_rate_stopped_looks_finished_and_is_not():
    learnt = CONCAVE["exponential"]
    metric = learnt(COSINE_WORK)
    assert metric[-1] - metric[29] < 0.003  # the last quarter moved it by 0.3 points,
    found = asked(metric, share=0.75)
    assert found.rising
    assert found.loss_low < learnt(1.0) - learnt(0.75) < found.loss_high  # and three quarters would lose 2.8
    assert found.enough_epochs is None


@pytest.mark.parametrize("seed", range(5))
def test_a_run_that_still_rises_will_lose_more_than_noise(seed):
    found = asked(noisy(0.8 * np.sqrt(T), 0.01, seed))
    assert found.rising
    assert found.enough_epochs is None
    assert found.loss_low > 2 * found.metric_noise
    assert found.loss_low <= 0.8 - 0.8 * np.sqrt(0.6) <= found.loss_high + 2 * found.metric_noise


def test_a_rise_within_the_noise_is_not_called_learning():
    found = asked(noisy(0.7 + 0.02 * T, 0.03))
    assert not found.rising
    assert found.loss_low == 0


# ---------------------------------------------------------------- enough


def test_a_run_that_settled_early_is_told_how_few_epochs_would_do():
    found = asked(noisy(0.9 - 0.5 * np.exp(-20 * T), 0.003, seed=1))
    assert 20 <= found.enough_epochs <= 80
    assert found.moved <= found.metric_noise
    assert (found.rising, found.cannot_say) == (False, "")


def test_noise_seldom_hides_that_a_run_settled_early_and_never_makes_it_rise():
    found = [asked(noisy(0.9 - 0.5 * np.exp(-20 * T), 0.003, seed)) for seed in range(40)]
    assert sum(one.enough_epochs is not None for one in found) >= 32  # 93% of many; 4 sigma below
    assert not any(one.rising for one in found)


def test_fewer_epochs_do_only_if_every_longer_run_would_do_as_well():
    dip = np.where((T > 0.4) & (T < 0.7), 0.7, 0.8)  # 35 epochs would end where all do, 60 in the dip
    assert fewest(curve(T, dip), 0.005, 100) > 65


def test_what_is_gained_by_annealing_at_the_end_is_not_called_learning():
    found = asked(0.8 + 0.1 * np.clip((T - 0.9) / 0.1, 0, 1))
    assert not found.rising
    assert found.loss_high <= found.metric_noise
    assert found.enough_epochs is None  # though the reader would not believe it of a curve that rises


def test_a_metric_that_falls_at_the_end_loses_nothing_by_a_shorter_run():
    found = asked(0.8 - 0.1 * np.abs(T - 0.2))
    assert found.loss_high == 0
    assert found.enough_epochs is not None
    assert found.moved < 0


def test_a_saving_of_less_than_a_tenth_is_not_mentioned():
    metric = 0.5 + 0.4 * np.minimum(T / 0.5, 1)  # the middle of runs shorter than 95 epochs still rises
    assert asked(metric, share=0.95).enough_epochs is None


def test_epochs_before_the_first_result_are_not_judged():
    metric = np.full(20, 0.8)
    found = asked(metric, progress=np.linspace(0.2, 1, 20))
    assert found.enough_epochs == 40  # the middle 60% begins at the first result


@pytest.mark.parametrize("epochs", [1, 2, 10**12])
def test_any_number_of_epochs_will_do(epochs):
    found = shorter(T, np.full(40, 0.8), share=0.6, epochs=epochs)
    assert found.enough_epochs is None or 0 < found.enough_epochs <= 0.9 * epochs


# ---------------------------------------------------------------- units and noise


def test_results_that_are_all_equal_have_the_least_noise_there_is():
    found = asked(np.full(40, 0.8))
    assert found.metric_noise == pytest.approx(0.002 * 0.8)
    assert (found.loss_low, found.loss_high) == (0, pytest.approx(0))


@pytest.mark.parametrize(("scale", "offset", "points"), [(1, 0, True), (100, 0, False), (1, -1, False)])
def test_losses_are_in_units_of_the_metric(scale, offset, points):
    """Shares, percentages and losses with the sign turned."""
    metric = noisy(0.8 * np.sqrt(T), 0.01)
    found, plain = asked(offset + scale * metric), asked(metric)
    assert found.points == points
    assert found.loss_high == pytest.approx(scale * plain.loss_high)
    assert found.rising


def test_levels_smooth_the_noise_and_follow_the_curve():
    history = curve(T, noisy(T**2, 0.02))
    found = np.array([level(history, at) for at in (0.1, 0.5, 0.9, 1.0)])
    np.testing.assert_allclose(found, [0.01, 0.25, 0.81, 1.0], atol=0.05)
    assert rise(history, 0.5) == pytest.approx(0.75**2 - 0.25**2, abs=0.05)


# ---------------------------------------------------------------- what results must be like


def test_nan_results_are_passed_over():
    metric = noisy(0.8 * np.sqrt(T), 0.01)
    holes = np.where(np.arange(40) % 7 == 3, np.nan, metric)
    kept = ~np.isnan(holes)
    assert asked(holes) == asked(metric[kept], progress=T[kept])


def test_results_may_come_in_any_order_and_the_last_at_a_progress_counts():
    found = curve([1.0, 0.5, 0.5, 0.1], [0.9, 0.1, 0.7, 0.3])
    assert found.progress.tolist() == [0.1, 0.5, 1.0]
    assert found.metric.tolist() == [0.3, 0.7, 0.9]


@pytest.mark.parametrize(
    ("progress", "metric", "reason"),
    [
        ([], [], "no validation results; call loader.evaluated(metric)"),
        ([0.5, 1.0], [np.nan, np.inf], "none of the 2 validation results is a finite number"),
        ([0.0] * 8, [0.1] * 8, "does not know its length; pass epochs="),
        (T[:16], T[:16], "last reported at 40% of the run"),
        ([0.2, 0.4, 0.6, 0.8, 1.0], [0.5] * 5, "takes 6 validation results and there are 5"),
        (np.linspace(0.5, 1, 20), [0.5] * 20, "first reported at 50% of the run"),
    ],
    ids=["none", "not finite", "no length", "not finished", "too few", "too late"],
)
def test_where_nothing_can_be_said_the_reason_is(progress, metric, reason):
    found = shorter(progress, metric, share=0.6, epochs=100)
    assert (found.loss_low, found.loss_high, found.enough_epochs, found.rising) == (None, None, None, False)
    assert reason in found.cannot_say


# ---------------------------------------------------------------- the training loss


def ledger_of(losses: np.ndarray) -> Ledger:
    """A ledger of n samples that were visited k times, float [k, n]."""
    ledger = Ledger(losses.shape[1])
    for window, row in enumerate(losses.astype(np.float32)):
        ledger.record(np.arange(ledger.n), {"loss": row}, window=window)
    return ledger


def fall_of(losses: np.ndarray) -> float | None:
    ledger = ledger_of(losses)
    return training_fall(ledger.last_loss, ledger.mean_loss, float(ledger.seen.mean()))


def test_a_training_loss_that_falls_in_a_line_falls_by_its_last_fifth():
    fall = fall_of(np.linspace(2.0, 1.0, 20)[:, None] * np.ones(50))
    assert fall == pytest.approx((4 / 19) / (1 + 4 / 19), rel=0.01)


def test_a_training_loss_that_only_swings_does_not_fall():
    assert fall_of(np.random.default_rng(0).gamma(2, 1, (20, 500))) is None


def test_the_training_loss_of_a_visit_or_two_tells_nothing():
    assert fall_of(np.array([[2.0] * 10, [1.0] * 10])) is None
    assert training_fall(np.full(5, np.nan, np.float32), np.full(5, np.nan, np.float32), 0.0) is None


def test_a_steep_training_loss_is_mentioned_where_there_are_no_results():
    steep, flat = shorter([], [], share=0.6, epochs=10, fall=0.3), shorter([], [], share=0.6, epochs=10, fall=0.03)
    assert "training loss still fell by 30% in the last fifth" in steep.cannot_say
    assert "training loss" not in flat.cannot_say
