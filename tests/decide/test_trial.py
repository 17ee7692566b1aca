"""The paired test keeps what helps, undoes what does not, and reads windows as they would be without a probe."""

from __future__ import annotations

import math

import numpy as np
import pytest

from salience.decide.levers import Option, Settings
from salience.decide.timing import WindowTiming, measure_window
from salience.decide.trial import Trial, gain
from salience.watch.steps import Step

ON, OFF = Settings(workers=2), Settings(workers=1)


def option(*, remembers: bool = False) -> Option:
    return Option(name="num_workers=2", exact=True, remembers=remembers, settings=ON, predicted=1.5)


def seen(seconds: float, blocks: tuple[float, ...] = ()) -> WindowTiming:
    return WindowTiming(seconds=seconds, step=seconds / 10, blocks=blocks, costs=None)


def tried(seconds: list[float]) -> tuple[Trial, list[Settings]]:
    """A trial whose windows take so long, the first without the lever; and what each window was run with."""
    trial, used = Trial.of(option(), OFF, seen(seconds[0])), []
    for each in seconds[1:]:
        if trial.verdict is not None:
            break
        used.append(trial.next)
        trial = trial.after(seen(each), used[-1])
    return trial, used


def test_the_gain_is_the_textbook_paired_t_test():
    found = gain([2.0, 2.2, 1.9], [1.0, 1.0, 1.0])
    d = np.log([2.0, 2.2, 1.9])
    reach = 2.919986 * d.std(ddof=1) / math.sqrt(3)  # the 95% point with two degrees of freedom
    assert found.speedup == pytest.approx(math.exp(d.mean()))
    assert found.low == pytest.approx(math.exp(d.mean() - reach), rel=1e-3)
    assert found.high == pytest.approx(math.exp(d.mean() + reach), rel=1e-3)
    assert gain([2.0], [1.0]).low == 0  # a single pair bounds nothing


def test_no_more_than_one_in_twenty_useless_levers_passes_two_pairs():
    rng = np.random.default_rng(0)
    noise = np.exp(rng.normal(0, 0.05, (2000, 4)))
    passed = sum(gain(row[:2], row[2:]).low > 1.0 for row in noise)
    assert 0.03 < passed / len(noise) < 0.07


def test_windows_take_turns_and_a_gain_is_kept_after_two_pairs():
    trial, used = tried([1.2, 1.0, 1.21, 1.01, 9.0, 9.0])
    assert used == [ON, OFF, ON]
    assert trial.verdict is not None
    assert trial.verdict[0]


def test_a_gain_that_is_clear_at_once_needs_no_second_pair():
    trial, used = tried([2.0, 1.0, 9.0, 9.0])
    assert used == [ON]
    assert trial.verdict == (True, "its first window was faster by more than a quarter")


def test_a_noisy_gain_gets_more_pairs_and_then_an_end():
    trial, used = tried([1.2, 1.0, 1.0, 1.0, 1.2, 1.0, 1.0, 1.0, 1.0, 1.0])
    assert used == [ON, OFF, ON, OFF, ON, OFF, ON]
    assert trial.verdict is not None
    assert not trial.verdict[0]


@pytest.mark.parametrize(("seconds", "windows"), [([1.0, 1.3, 1.0, 1.0], 1), ([1.0, 1.0, 1.0, 1.0, 1.0], 3)])
def test_what_does_not_help_is_undone_soon(seconds, windows):
    trial, used = tried(seconds)
    assert trial.verdict is not None
    assert not trial.verdict[0]
    assert len(used) == trial.windows == windows


@pytest.mark.parametrize(("after", "kept"), [(1.0, True), (2.0, False)])
def test_a_lever_that_remembers_fills_first_and_is_judged_by_the_parts_of_one_window(after, kept):
    parts = (2.0, 2.1, 1.9, 2.0)
    trial = Trial.of(option(remembers=True), OFF, seen(8.0, parts))
    trial = trial.after(seen(99.0, (9.0,) * 4), ON)
    assert trial.verdict is None  # filling costs what it costs
    assert trial.next == ON
    trial = trial.after(seen(4.0, tuple(after * part / 2 for part in parts)), ON)
    assert trial.verdict is not None
    assert trial.verdict[0] == kept
    assert "weaker evidence" in trial.verdict[1]


def steps(count: int, wait: float, busy: float) -> list[Step]:
    return [Step(wait, forward=busy, work={"load": wait}) for _ in range(count)]


def test_a_window_is_seen_without_its_probe_and_with_the_start_of_its_workers():
    usual = {"batches": 50, "lead": 0.5, "inputs": [0.04], "ahead": 3, "workers": 1}
    plain = steps(50, 0.02, 0.1)
    plain[0].wait = 1.02  # workers start
    found = measure_window(plain, first=False, restarts=True, **usual)
    assert found.seconds == pytest.approx(50 * 0.12 + 0.5 + 1.0)
    assert measure_window(plain, first=False, restarts=False, **usual).seconds == pytest.approx(50 * 0.12 + 0.5)
    held = [Step(9.0, forward=0.1, held=True), *(Step(0.0, forward=0.1, held=True) for _ in range(9))]
    probed = [*plain[:20], *held, *steps(3, 0.0, 0.1), *plain[20:]]  # behind it three batches were ready
    found = measure_window(probed, first=False, restarts=True, **usual)
    assert found.seconds == pytest.approx(50 * 0.12 + 0.5 + 1.0)
    assert (found.costs.input, found.costs.compute) == pytest.approx((0.04, 0.1))
    assert measure_window(plain[:4], first=False, restarts=True, **usual) is None
