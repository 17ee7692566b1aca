"""The forecast: its visits are those of its plans, and its cost comes from the validation results."""

from __future__ import annotations

import numpy as np
import pytest

from salience.config import SelectConfig, Use
from salience.ledger import Ledger
from salience.select import Pipeline, preset
from salience.select.summary import forecast, summarise

N, WINDOWS = 600, 20


def known_ledger(visits: int = 8) -> Ledger:
    """Samples of four classes with losses of all sizes; one in ten is given another class, surely, at every visit."""
    rng = np.random.default_rng(0)
    ledger = Ledger(N)
    label = np.arange(N) % 4
    guess = np.where(np.arange(N) % 10 == 3, (label + 1) % 4, label)
    scale = rng.gamma(2, 0.3, N)
    for window in range(visits):
        loss = (scale * 0.9**window + np.where(guess == label, 0.0, 4.0)).astype(np.float32)
        rows = {
            "loss": loss, "target": label, "guess": guess, "other": np.where(guess == label, (label + 1) % 4, guess),
            "margin": np.where(guess == label, 3.0, -3.0), "el2n": loss, "entropy": loss, "confidence": np.exp(-loss),
            "guess_p": np.full(N, 0.9),
        }  # fmt: skip
        ledger.record(np.arange(N), {k: v.astype(np.float32) for k, v in rows.items()}, window=window)
    return ledger


def planned(ledger: Ledger, config: SelectConfig, batch_size: int) -> int:
    pipeline = Pipeline(config)
    return sum(
        len(pipeline.plan(ledger, window=window, windows=WINDOWS, batch_size=batch_size, seed=0))
        for window in range(WINDOWS)
    )


@pytest.mark.parametrize("batch_size", [1, 32])
@pytest.mark.parametrize("name", ["default", "infobatch", "kakurenbo", "window", "uniform"])
def test_forecast_visits_are_those_of_its_plans(name, batch_size):
    ledger, config = known_ledger(), preset(name)
    found = forecast(ledger, config, windows=WINDOWS, batch_size=batch_size)
    # Rules that drop at random differ from window to window; the last window may fill its last batch.
    assert found["visits"] == pytest.approx(planned(ledger, config, batch_size), rel=0.02)
    assert found["saved"] == pytest.approx(1 - found["visits"] / found["visits_full"])


def test_forecast_of_a_curve_with_many_shares_is_near_its_plans():
    config = SelectConfig(keep=Use(name="cosine", options={"low": 0.3}))
    ledger = known_ledger()
    found = forecast(ledger, config, windows=WINDOWS)
    assert found["visits"] == pytest.approx(planned(ledger, config, 1), rel=0.001)


def test_samples_skipped_in_the_middle_add_up_to_the_visits_saved():
    config = SelectConfig(keep=Use(name="constant", options={"share": 0.4}))
    found = forecast(known_ledger(), config, windows=WINDOWS, batch_size=32)
    assert WINDOWS * found["skipped_in_middle"] == found["visits_full"] - found["visits"]


def test_the_cost_is_that_of_a_run_on_all_data_with_as_many_visits():
    results = [(t, float(np.sqrt(t))) for t in np.linspace(0.05, 1, 20)]
    found = forecast(known_ledger(), preset("default"), windows=WINDOWS, evaluations=results)
    assert found["share"] == pytest.approx(found["visits"] / found["visits_full"])
    assert found["rising"]
    assert found["loss_low"] < 1 - np.sqrt(found["share"]) < found["loss_high"]
    assert found["enough_epochs"] is None


def test_a_run_that_settled_is_forecast_with_the_epochs_that_would_do():
    results = [(t, 0.8) for t in np.linspace(0.05, 1, 20)]
    found = forecast(known_ledger(), preset("default"), windows=WINDOWS, evaluations=results)
    assert found["enough_epochs"] == 4
    assert (found["rising"], found["cannot_say"]) == (False, "")


@pytest.mark.parametrize(("results", "reason"), [((), "no validation results"), (None, "a ledger holds no validation")])
def test_without_results_the_cost_is_unknown_and_the_reason_is_given(results, reason):
    found = summarise(known_ledger(), preset("default"), windows=WINDOWS, evaluations=results)["forecast"]
    assert (found["loss_low"], found["loss_high"], found["enough_epochs"]) == (None, None, None)
    assert found["cannot_say"].startswith(reason)


def test_what_a_selecting_run_saved_is_counted_from_its_visits():
    summary = summarise(known_ledger(), preset("default"), windows=WINDOWS, selected=(10, 4500))
    assert summary["selected"] == {"windows": 10, "visits": 4500, "visits_full": 6000, "saved": pytest.approx(0.25)}


def test_a_run_that_has_finished_no_window_has_saved_nothing_yet():
    assert summarise(known_ledger(), preset("default"), windows=WINDOWS, selected=(0, 0))["selected"] is None
