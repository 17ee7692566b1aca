"""A threshold on the value inside whole plans: with guards, filters, curves, ties, and scores of another scale."""

from __future__ import annotations

import numpy as np
import pytest

from salience.ledger import Ledger
from salience.plan import Plan
from salience.run import resolve
from salience.select import Pipeline, Verdict

N, BATCH = 400, 20
OVER = {"preset": "uniform", "scores": ["ema_loss"], "sampler": {"name": "threshold", "above": 0.5}, "keep": 0.2}
HALF = np.where(np.arange(N) % 2 == 0, 0.9, 0.1)
EVEN = set(range(0, N, 2))


def over(losses: np.ndarray, window: int = 5, **more: object) -> Plan:
    ledger = Ledger(N)
    ledger.record(np.arange(N), {"loss": losses.astype(np.float32)}, window=4)
    pipeline = Pipeline(resolve({**OVER, **more}), strict=True)
    return pipeline.plan(ledger, window=window, windows=10, batch_size=BATCH, seed=0)


def first_fifty(view):
    """Forces fifty samples under the threshold, so that little is left of the budget."""
    return Verdict(force=(np.arange(view.n) % 2 == 1) & (np.arange(view.n) < 100), reason="test")


def guarded(view):
    """Forces as many samples as the curve grants."""
    return Verdict(force=np.arange(view.n) < 80, reason="test")


def few(view):
    """Leaves fewer samples than the curve grants: 30 over the threshold and 30 under it."""
    return Verdict(keep=np.arange(view.n) < 60, reason="test")


def test_it_is_not_held_to_the_budget_of_the_curve_and_the_plan_says_so():
    made = over(HALF)
    assert set(made.ids) == EVEN
    assert (made.notes[-1].name, made.notes[-1].dropped) == ("threshold", 200)
    assert made.notes[-1].reason == "200 of 400 score over 0.5; the curve grants 80"
    assert len(over(np.ones(N))) == N
    assert set(over(HALF, window=9, keep={"name": "step", "share": 0.2}).ids) == set(range(N))  # the curve says all


def test_forced_samples_come_on_top_even_where_they_use_up_the_budget():
    made = over(HALF, filters=[first_fifty])
    forced = set(range(1, 100, 2))
    assert forced <= set(made.ids)
    assert len(made) == 240  # 250 in whole batches
    assert set(made.ids) - forced <= EVEN
    assert set(over(HALF, filters=[guarded]).ids) == set(range(80)) | EVEN


def test_it_is_asked_where_filters_leave_fewer_than_the_curve_grants():
    made = over(HALF, filters=[few])
    assert set(made.ids) <= set(range(0, 60, 2))
    assert len(made) == BATCH  # 30 in whole batches


@pytest.mark.parametrize("scale", [1e-6, 0.0])
def test_scores_of_another_scale_never_make_less_than_a_batch_and_are_seen_in_the_note(scale):
    made = over(scale * HALF)
    assert len(made) == BATCH
    assert made.notes[-1].reason == "0 of 400 score over 0.5, 8 more at random; the curve grants 80"


def test_samples_whose_losses_are_not_finite_stay_in():
    losses = 0.1 * HALF
    losses[:25] = np.nan
    assert len(set(over(losses).ids) & set(range(25))) >= BATCH


def test_a_calibrated_value_comes_with_the_plan():
    ledger = Ledger(N)
    ledger.record(np.arange(N), {"loss": HALF.astype(np.float32)}, window=4)
    pipeline = Pipeline(resolve({**OVER, "sampler": {"name": "threshold", "above": "auto"}}), strict=True)
    known, unknown = (
        pipeline.plan(ledger, window=5, windows=10, batch_size=BATCH, seed=0, learnt_loss=loss) for loss in (0.5, None)
    )
    assert set(known.ids) == EVEN
    assert len(unknown) == N
