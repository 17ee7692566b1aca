"""Tuning a selection: what is better by more than chance is taken, else the default stays, and small validation sets say so."""

from __future__ import annotations

import numpy as np
import pytest

from salience.config import SelectConfig, Use
from salience.decide.tuning import default_space, detectable, paired_gain, read_setting, tune_select, with_settings
from salience.errors import ConfigError
from salience.select import preset

pytest.importorskip("optuna")

BASE = SelectConfig(scores=(Use(name="loss"),), sampler=Use(name="ratio", options={"explore": 0.1}))
SAMPLES = np.random.default_rng(0).random(20_000)


class Task:
    """Right on a sample where a number that belongs to it is under the accuracy, plus chance of the seed."""

    def __init__(self, accuracy, n: int = 20_000) -> None:
        self.accuracy, self.n, self.asked = accuracy, n, []

    def __call__(self, select: SelectConfig, seed: int) -> tuple[np.ndarray, float]:
        self.asked.append((select.sampler.options["explore"], seed))
        rng = np.random.default_rng(seed)
        shaken = SAMPLES[: self.n] + 0.02 * rng.normal(size=self.n)
        return (shaken < self.accuracy(select.sampler.options["explore"])).astype(float), 1.0


def test_a_setting_that_is_better_is_found_and_confirmed_on_fresh_seeds():
    task = Task(lambda explore: 0.8 - 0.4 * (explore - 0.5) ** 2)
    found = tune_select(task, BASE, trials=8, min_gain=0.02, seed=1)
    assert not found.kept_default
    assert abs(found.settings["sampler.explore"] - 0.5) < 0.2
    assert found.config.sampler.options["explore"] == found.settings["sampler.explore"]
    assert 0 < found.interval[0] < found.gain < found.interval[1]
    searched = {seed for _, seed in task.asked[:9]}
    confirmed = {seed for _, seed in task.asked[9:]}
    assert searched.isdisjoint(confirmed)
    assert len(confirmed) == 3


def test_of_two_that_are_as_good_the_cheaper_one_is_found():
    def run(select: SelectConfig, seed: int) -> tuple[np.ndarray, float]:
        explore = select.sampler.options["explore"]
        return (SAMPLES < 0.8).astype(float), 2.0 if explore < 0.3 else 1.0

    found = tune_select(run, BASE, trials=6, min_gain=0.02)
    assert max(found.tried, key=lambda one: one.reward).settings["sampler.explore"] >= 0.3
    assert found.kept_default, "cheaper, but not better"


def test_where_nothing_is_better_the_default_stays():
    found = tune_select(Task(lambda explore: 0.8), BASE, trials=5, min_gain=0.02)
    assert found.kept_default
    assert found.config is BASE
    assert "default stays" in found.reason


def test_a_validation_set_that_is_too_small_decides_nothing_after_a_single_run():
    task = Task(lambda explore: 0.8 if explore < 0.2 else 0.95, n=300)
    found = tune_select(task, BASE, trials=5)
    assert found.kept_default
    assert len(task.asked) == 1
    assert "300 samples" in found.reason
    assert found.detectable == pytest.approx(0.054, abs=0.005)


def test_the_same_seed_asks_for_the_same_settings():
    asked = []
    for _ in range(2):
        task = Task(lambda explore: 0.8)
        tune_select(task, BASE, trials=3, min_gain=0.02, seed=5)
        asked.append(task.asked[1:3])
    assert asked[0] == asked[1]


def test_the_smallest_difference_seen_is_that_of_the_spread():
    results = np.array([0.0, 1.0] * 200)
    assert detectable(results) == pytest.approx(1.65 * 0.5 / 20, abs=0.001)


def test_a_gain_has_the_chance_of_samples_and_of_seeds_in_its_interval():
    old, n = np.zeros(100), 100
    same = [(old, np.full(n, 0.1))] * 3
    assert paired_gain(same) == pytest.approx((0.1, 0.1, 0.1))
    gain, low, high = paired_gain([(old, np.full(n, 0.0)), (old, np.full(n, 0.2))])
    assert gain == pytest.approx(0.1)
    assert (low, high) == pytest.approx((0.1 - 6.314 * 0.1, 0.1 + 6.314 * 0.1), rel=1e-3)


def test_settings_are_read_and_changed_by_name():
    default = preset("default")
    assert set(default_space(default)) == {"sampler.floor", "sampler.temper", "sampler.power"}
    assert read_setting(default, "sampler.power") == 1.0, "not written down: the plug-in's own default"
    changed = with_settings(default, {"sampler.floor": 0.3, "keep.share": 0.7})
    assert (changed.sampler.options["floor"], changed.keep.options["share"]) == (0.3, 0.7)
    two = SelectConfig(scores=(Use(name="loss"), Use(name="variance")), sampler=Use(name="slide"))
    assert default_space(two).keys() == {"sampler.begin", "sampler.until", "scores.0.weight", "scores.1.weight"}
    assert with_settings(two, {"scores.1.weight": 0.25}).scores[1].weight == 0.25


@pytest.mark.parametrize(
    ("space", "says"),
    [
        ({"sampler.explor": (0.0, 1.0)}, "no option 'explor'"),
        ({"nothing.explore": (0.0, 1.0)}, "no setting"),
        ({"scores.3.weight": (0.0, 1.0)}, "no setting .*number of scores: 1"),
        ({"sampler.explore": (1.0, 0.0)}, "must be lower"),
        ({}, "nothing to tune"),
    ],
)
def test_a_space_that_names_nothing_is_refused(space, says):
    with pytest.raises(ConfigError, match=says):
        tune_select(Task(lambda explore: 0.8), BASE, space=space)


def test_results_that_are_no_numbers_per_sample_are_refused():
    with pytest.raises(ConfigError, match="per validation sample"):
        tune_select(lambda select, seed: 0.8, BASE)
