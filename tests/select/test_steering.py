"""keep = "auto": bands from earlier runs, one notch at a time, state and ranks."""

from __future__ import annotations

import json

import numpy as np
import pytest

import salience
from salience.errors import ConfigError
from salience.events import EventLog
from salience.select.steering import History, Steering, band, less, more, own_noise, read_histories

EPOCHS = 20


def history(metric, progress=None) -> History:
    metric = np.asarray(metric, dtype=np.float64)
    return History(progress=np.linspace(0, 1, len(metric)) if progress is None else np.array(progress), metric=metric)


def test_the_band_is_mean_and_spread_of_the_runs_at_equal_progress():
    found = band([history([0.0, 0.8]), history([0.2, 0.8]), history([0.4, 0.8])], 0.5)
    assert found.mean == pytest.approx(0.5)  # 0.4, 0.5, 0.6
    assert found.spread == pytest.approx(0.1)
    assert found.low == pytest.approx(0.3)
    assert band([history([0.8, 0.8])] * 2, 0.5).spread == pytest.approx(0.002 * 0.8)  # the floor


def test_nothing_is_said_before_the_baseline_begins():
    assert band([history([0.5, 0.8], [0.2, 1.0])], 0.1) is None
    assert band([history([0.5, 0.8], [0.2, 1.0])], 0.2).mean == 0.5


@pytest.mark.parametrize("seed", range(3))
def test_a_single_run_knows_its_own_noise(seed):
    """A learning curve plus noise of 0.01: the estimate from 200 results is inside its 4-sigma interval."""
    rng = np.random.default_rng(seed)
    t = np.sort(rng.random(200))
    noise = own_noise(history(0.9 - 0.5 * np.exp(-6 * t) + rng.normal(0, 0.01, 200), t))
    # The median's relative sd is 1.167 / sqrt(200) = 8%, half as much again since neighbours share results: 12%.
    assert noise == pytest.approx(0.01, rel=0.5)
    assert own_noise(history(0.9 - 0.5 * np.exp(-6 * t), t)) < 0.0005


def test_notches_end_at_both_ends_and_take_any_share():
    assert [less(s) for s in (1.0, 0.45, 0.4, 0.25)] == [0.8, 0.4, 0.33, 0.25]
    assert [more(s) for s in (0.25, 0.45, 0.8, 1.0)] == [0.33, 0.5, 1.0, 1.0]


def test_less_after_two_results_inside_the_band_and_more_after_one_below():
    steering = Steering(0.4, [history([0.5, 0.5])])  # the band begins at 0.5 - 2 * 0.001

    def result(metric):
        steering.evaluated(metric, 0.5)
        return steering.move()

    assert result(0.499) is None
    moved = result(0.7)  # better is inside too
    assert (moved["from"], moved["to"], moved["metric"]) == (0.4, 0.33, 0.7)
    assert steering.move() is None  # no news
    assert result(0.5) is None
    moved = result(0.497)
    assert (moved["from"], moved["to"]) == (0.33, 0.4)
    assert moved["low"] == pytest.approx(0.498)
    assert "under the band" in moved["reason"]
    assert result(0.5) is None  # the count starts anew


def write_log(path, metrics) -> str:
    log = EventLog(path)
    for k, metric in enumerate(metrics):
        log.emit("evaluated", metric=metric, progress=(k + 1) / len(metrics))
    return str(path)


def test_a_baseline_is_read_from_logs_and_folders_and_a_resumed_one_counts_once(tmp_path):
    path = tmp_path / "run.jsonl"
    write_log(path, [0.1, 0.2, 0.3, 0.4])
    EventLog(path).emit("evaluated", metric=0.35, progress=0.75)  # resumed from a checkpoint after the second
    (found,) = read_histories(tmp_path)
    assert found.progress.tolist() == [0.25, 0.5, 0.75]
    assert found.metric.tolist() == [0.1, 0.2, 0.35]
    assert len(read_histories([path, str(path)])) == 2


def test_a_baseline_without_results_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="1 validation results"):
        read_histories(write_log(tmp_path / "a.jsonl", [0.5]))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_histories(tmp_path / "nowhere.jsonl")


def train(metrics, baseline, *, stop=None, state=None):
    """Windows of a run whose evaluation after window k gives metrics[k]: visits of each, and the run."""
    selector = salience.Selector(
        100, batch_size=1, epochs=EPOCHS, select={"preset": "uniform", "keep": "auto"}, baseline=baseline
    )
    if state is not None:
        selector.load_state_dict(state)
    visits = []
    for epoch in range(selector.epoch, EPOCHS):
        visits.append(sum(len(ids) for ids, _ in selector))
        selector.evaluated(metrics[epoch])
        if epoch + 1 == stop:
            break
    return visits, selector


def moves(selector):
    return [(e["window"], e["from"], e["to"]) for e in selector.events.recent if e["kind"] == "steered"]


def test_a_run_that_holds_its_metric_keeps_less_and_less_in_its_middle_only(tmp_path):
    baseline = write_log(tmp_path / "full.jsonl", [0.8] * EPOCHS)
    visits, selector = train([0.8] * EPOCHS, baseline)
    assert visits == [100] * 2 + [40] * 2 + [33] * 2 + [25] * 10 + [100] * 4
    assert moves(selector) == [(4, 0.4, 0.33), (6, 0.33, 0.25)]
    assert selector.progress == pytest.approx(1)
    assert selector.visits_expected == sum(visits)


def test_a_run_that_falls_behind_keeps_more_and_comes_back(tmp_path):
    baseline = write_log(tmp_path / "full.jsonl", [0.8] * EPOCHS)
    visits, selector = train([0.8] * 3 + [0.7] * 2 + [0.8] * 15, baseline)
    assert visits[:10] == [100, 100, 40, 40, 50, 65, 65, 50, 50, 40]
    event = next(e for e in selector.events.recent if e["kind"] == "steered")
    assert {"metric": 0.7, "mean": 0.8, "low": 0.8 - 2 * 0.0016, "from": 0.4, "to": 0.5}.items() <= event.items()


def test_results_of_both_ends_move_nothing(tmp_path):
    baseline = write_log(tmp_path / "full.jsonl", [0.8] * EPOCHS)
    visits, selector = train([0.1] * 2 + [0.8, 0.1] * 7 + [0.1] * 4, baseline)
    windows = [window for window, _, _ in moves(selector)]
    assert windows == [4, 6, 8, 10]  # 40% to everything by then; not 2, after the warm-up, and not 16, at the end
    assert visits[-4:] == [100] * 4


def test_without_a_baseline_the_default_curve_stays_and_that_is_said_once(tmp_path):
    visits, selector = train([0.1] * EPOCHS, None)
    assert visits == [100] * 2 + [40] * 14 + [100] * 4
    assert [e["text"] for e in selector.events.recent if e["kind"] == "warning"] == [
        'keep = "auto" has no baseline and stays at its default curve; pass baseline= the event log(s) of earlier runs '
        "that called loader.evaluated(metric)."
    ]
    assert not moves(selector)


@pytest.mark.parametrize("stop", range(2, 9))
def test_a_resumed_run_is_steered_as_if_it_never_stopped(tmp_path, stop):
    baseline = write_log(tmp_path / "full.jsonl", [0.8] * EPOCHS)
    metrics = [0.8] * 5 + [0.7, 0.8, 0.7] + [0.8] * 12
    whole, _ = train(metrics, baseline)
    first, stopped = train(metrics, baseline, stop=stop)
    state = stopped.state_dict()
    assert (
        json.loads(json.dumps(state["parts"]["planning"]["steering"])) == state["parts"]["planning"]["steering"]
    )  # plain numbers
    second, _ = train(metrics, baseline, state=state)
    assert first + second == whole


def test_auto_is_written_as_a_word_in_settings_files(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('[select]\npreset = "uniform"\nkeep = "auto"\n')
    selector = salience.Selector(100, epochs=EPOCHS, select=str(path))
    assert selector.total_steps is None  # nobody can know
