"""The state machine on a machine of known costs: right levers in the right order, bounded trials, a guard on quality."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

import numpy as np
import pytest

from salience.decide.auto import Auto
from salience.decide.controller import Controller
from salience.decide.levers import AvailableLevers, Settings, options, recorded
from salience.decide.timing import WindowTiming, measure_window
from salience.errors import ConfigError
from salience.events import EventLog, LeverDecided, StepCosts
from salience.select.steering import History
from salience.watch.steps import Step, Steps

WINDOWS = 30
KEEP = (1.0, 1.0, *[0.4] * 22, *[1.0] * 6)


@dataclass
class Machine:
    """A window takes max(input, compute); what levers do to it, they do."""

    work: dict[str, float]
    compute: float = 0.02
    cores: int = 2
    useless: tuple[str, ...] = ()
    """Settings without effect."""
    noise: float = 0.003
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(1))

    def seen(self, window: int, settings: Settings, *, warm: bool = True) -> WindowTiming:
        work = dict(self.work)
        if settings.cache and warm and "cache" not in self.useless:
            work["fetch"] = 0.0
        if settings.treat and warm and "treat" not in self.useless:
            work["augment"] *= 0.25
        workers = 1 if "workers" in self.useless else settings.workers
        d = sum(work.values()) / workers
        step = max(d, self.compute) * float(np.exp(self.rng.normal(0, self.noise)))
        share = KEEP[window] if settings.select and "select" not in self.useless else 1.0
        costs = StepCosts(
            step=step, wait=max(0.0, step - self.compute), input=d, compute=self.compute, work=work,
            workers=settings.workers, steps=50,
        )  # fmt: skip
        blocks = tuple(step * np.exp(self.rng.normal(0, self.noise, 8)))
        return WindowTiming(seconds=50 * step * share, step=step, blocks=blocks, costs=costs)


def go(
    machine: Machine,
    controller: Controller,
    reach: AvailableLevers,
    *,
    metric: float | None = None,
    windows: int = WINDOWS,
) -> tuple[list[LeverDecided], list[Settings]]:
    said, used = [], [controller.settings]
    for window in range(1, windows):
        warm = len(used) > 1 and used[-1] == used[-2]
        found = machine.seen(window - 1, used[-1], warm=warm)
        if metric is not None:
            controller.evaluated(metric, window / WINDOWS)
        said += controller.edge(window, found, reach)
        used.append(controller.settings)
    return said, used


def controller(**more) -> Controller:
    return Controller(Settings(workers=1), windows=WINDOWS, batches=50 * WINDOWS, **more)


def actions(said: list[LeverDecided]) -> list[tuple[str, str]]:
    return [(d.action, d.lever.partition("=")[0]) for d in said if d.action != "skip"]


def test_a_storage_bound_run_gets_a_cache_and_nothing_it_does_not_need():
    said, used = go(Machine({"fetch": 0.1, "decode": 0.01}), controller(), AvailableLevers(cores=2, cache=1 << 20))
    assert actions(said) == [("try", "cache"), ("keep", "cache")]
    assert used[-1] == Settings(workers=1, cache=1 << 20)
    kept = next(d for d in said if d.action == "keep")
    assert "weaker evidence" in kept.reason
    assert kept.measured > 2
    assert 1.02 < kept.interval[0] <= kept.measured <= kept.interval[1]
    assert kept.window == 3  # measured, filled, judged


def adopting(**more) -> Controller:
    return Controller(Settings(workers=1, cache=1 << 20), windows=WINDOWS, batches=50 * WINDOWS, adopted=True, **more)


def test_a_cache_that_is_on_from_the_start_is_judged_against_the_window_that_filled_it():
    said, used = go(Machine({"fetch": 0.1, "decode": 0.01}), adopting(), AvailableLevers(cores=1))
    assert actions(said) == [("try", "cache"), ("keep", "cache")]
    assert [d.window for d in said if d.action != "skip"] == [1, 2]
    assert {*used} == {Settings(workers=1, cache=1 << 20)}
    assert said[0].reason == "on from the first window, which filled it"


def test_one_that_gains_nothing_goes():
    machine = Machine({"fetch": 0.01, "decode": 0.1}, useless=("cache",))
    said, used = go(machine, adopting(), AvailableLevers(cores=1))
    assert actions(said)[:2] == [("try", "cache"), ("undo", "cache")]
    assert used[2:] == [Settings(workers=1)] * (WINDOWS - 2)


def test_where_the_window_that_filled_it_was_not_seen_it_stays_unjudged():
    machine, auto = Machine({"fetch": 0.1, "decode": 0.01}), adopting()
    assert auto.edge(0, None, AvailableLevers(cores=1)) == []  # before the first window
    assert auto.fills
    assert auto.edge(1, None, AvailableLevers(cores=1)) == []
    assert not auto.fills
    for window in range(2, 6):
        said = auto.edge(window, machine.seen(window - 1, auto.settings), AvailableLevers(cores=1))
        assert not actions(said)
    assert auto.settings.cache


def test_a_resumed_run_does_not_judge_by_the_window_that_fills_the_cache_again():
    machine = Machine({"fetch": 0.1, "decode": 0.01})
    for auto, reach in (
        (adopting(), AvailableLevers(cores=1)),
        (controller(), AvailableLevers(cores=1, cache=1 << 20)),
    ):
        said = auto.edge(1, machine.seen(0, auto.settings, warm=False), reach)
        if not auto.settings.cache or not said[-1].reason.startswith("on from"):
            said += auto.edge(2, machine.seen(1, auto.settings, warm=False), reach)  # which fills it
        again = adopting() if auto.settings == adopting().settings and auto._trial.whole else controller()
        again.load_state_dict(json.loads(json.dumps(auto.state_dict())))
        said = again.edge(3, machine.seen(2, again.settings, warm=False), reach)  # fills it again
        assert "undo" not in [d.action for d in said]
        said = again.edge(4, machine.seen(3, again.settings), reach)
        assert ("keep", "cache") in actions(said)


def test_what_warms_up_while_a_cache_fills_is_not_taken_for_reading():
    slow, usual = Step(wait=0.02, forward=3.0, backward=0.0), Step(wait=0.02, forward=0.01, backward=0.0)
    steps = [slow] * 3 + [usual] * 60
    found = measure_window(
        steps, batches=63, lead=0.0, inputs=(), ahead=2, workers=1, first=True, restarts=True, fills=True
    )  # fmt: skip
    assert found.step == pytest.approx(0.03)
    assert found.seconds == pytest.approx(63 * 0.03)
    assert found.costs.compute == pytest.approx(0.01)


def test_exact_levers_go_on_before_lossy_ones_and_one_at_a_time():
    machine, auto = Machine({"load": 0.02, "augment": 0.3}), controller(lossy=True)
    said, used = go(machine, auto, AvailableLevers(cores=2, reusable=("load", "augment"), keep=KEEP))
    assert actions(said)[:4] == [("try", "num_workers"), ("keep", "num_workers"), ("try", "treat"), ("keep", "treat")]
    assert "quality unproven" in next(d for d in said if (d.action, d.lever[:5]) == ("keep", "treat")).reason
    assert [settings.workers for settings in used[:4]] == [1, 2, 2, 2]
    assert not any(settings.treat for settings in used[:3])  # kept behind window 1, measured in window 2
    assert used[-1].treat


def test_what_does_not_help_is_undone_and_not_tried_again():
    machine = Machine({"fetch": 0.05, "decode": 0.05}, useless=("workers", "cache"))
    said, used = go(machine, controller(), AvailableLevers(cores=2, cache=1 << 20))
    assert sorted(actions(said)) == [
        ("try", "cache"),
        ("try", "num_workers"),
        ("undo", "cache"),
        ("undo", "num_workers"),
    ]
    assert used[-1] == Settings(workers=1)
    assert sum(settings != used[0] for settings in used) <= 0.3 * WINDOWS


def test_where_nothing_could_help_nothing_is_tried():
    said, used = go(Machine({"load": 0.002}, compute=0.1), controller(), AvailableLevers(cores=2, keep=KEEP))
    assert actions(said) == []
    assert set(used) == {Settings(workers=1)}
    assert any("baseline" in d.reason for d in said if "select" in d.lever)


def test_a_compute_bound_run_may_select_less_where_that_was_allowed():
    said, used = go(Machine({"load": 0.002}, compute=0.1), controller(lossy=True), AvailableLevers(cores=2, keep=KEEP))
    assert actions(said) == [("try", "select"), ("keep", "select")]
    assert not any(s.select for s in used[:2])  # not while everything is visited anyway
    assert used[-1].select


def baseline() -> list[History]:
    progress = np.linspace(0.01, 1, 20)
    return [History(progress=progress, metric=0.9 + noise * progress) for noise in (0.0, 0.002, 0.004)]


def test_a_metric_under_the_baselines_band_undoes_lossy_levers_for_good():
    machine, reach = Machine({"load": 0.002}, compute=0.1), AvailableLevers(cores=2, keep=KEEP)
    said, used = go(machine, controller(histories=baseline()), reach, metric=0.8)
    assert actions(said) == [("try", "select"), ("undo", "select")]
    assert "left the baseline's band" in next(d for d in said if d.action == "undo").reason
    assert not any(s.select for s in used[5:])


def test_a_metric_in_the_band_proves_them():
    machine, reach = Machine({"load": 0.002}, compute=0.1), AvailableLevers(cores=2, keep=KEEP)
    said, used = go(machine, controller(histories=baseline()), reach, metric=0.91)
    assert ("keep", "select") in actions(said)
    assert not any("unproven" in d.reason for d in said if d.action == "keep")
    assert used[-1].select


def test_drift_of_the_step_time_is_measured_again_and_levers_return_under_another_verdict():
    machine, auto, reach = (
        Machine({"fetch": 0.001, "decode": 0.01}),
        controller(),
        AvailableLevers(cores=1, cache=1 << 20),
    )
    said, _ = go(machine, auto, reach, windows=8)
    assert actions(said) == []
    machine.work = {"fetch": 0.1, "decode": 0.01}  # the store became slow
    more: list[LeverDecided] = []
    for window in range(8, 14):
        more += auto.edge(window, machine.seen(window, auto.settings), reach)
        assert window != 8 or auto.probing
    assert actions(more) == [("try", "cache"), ("keep", "cache")]


@pytest.mark.parametrize(("windows", "tries"), [(3, 0), (4, 1), (10, 1), (30, 1)])
def test_short_runs_are_left_alone(windows, tries):
    auto = Controller(Settings(workers=1), windows=windows, batches=50 * windows)
    said, _ = go(Machine({"fetch": 0.1}), auto, AvailableLevers(cores=1, cache=1 << 20), windows=windows)
    assert len([d for d in said if d.action == "try"]) == tries
    assert len({(d.lever, d.reason) for d in said}) == len(said)  # nothing is said twice


def test_a_resumed_controller_goes_on_where_it_was():
    """With levers that remember nothing: those are filled again first."""
    reach = AvailableLevers(cores=2, keep=KEEP)
    machine, whole = Machine({"fetch": 0.05, "augment": 0.1, "decode": 0.05}), controller(lossy=True)
    _, used = go(machine, whole, reach)
    machine, one = Machine({"fetch": 0.05, "augment": 0.1, "decode": 0.05}), controller(lossy=True)
    again = [one.settings]
    for window in range(1, WINDOWS):
        warm = len(again) > 1 and again[-1] == again[-2]
        state = json.loads(json.dumps(one.state_dict()))  # nothing but plain values
        one = controller(lossy=True)
        one.load_state_dict(state)
        one.edge(window, machine.seen(window - 1, again[-1], warm=warm), reach)
        again.append(one.settings)
    assert again == used
    assert len(set(used)) > 2


def test_a_window_that_was_broken_off_decides_nothing_and_a_second_one_ends_a_trial():
    auto, reach = controller(), AvailableLevers(cores=1, cache=1 << 20)
    assert auto.edge(1, None, reach) == []
    assert auto.probing
    assert actions(auto.edge(2, Machine({"fetch": 0.1}).seen(1, auto.settings), reach)) == [("try", "cache")]
    assert auto.edge(3, None, reach) == []
    assert auto.settings.cache
    assert actions(auto.edge(4, None, reach)) == [("undo", "cache")]
    assert auto.settings == Settings(workers=1)


def test_a_run_is_replayed_from_its_log(tmp_path):
    log = EventLog(tmp_path / "run.jsonl")
    for window, settings in ((0, Settings(workers=1)), (3, Settings(workers=2, cache=5)), (7, Settings(workers=1))):
        log.emit("settings", window=window, **asdict(settings))
    replay, steps = Auto(tmp_path, None, epochs=9), Steps()
    replay.start(Settings(), 100)
    used = []
    for window in range(9):
        assert replay.edge(window, steps, AvailableLevers()) == []
        used.append((replay.controller.settings.workers, replay.controller.settings.cache))
    assert used == [(1, 0)] * 3 + [(2, 5)] * 4 + [(1, 0)] * 2
    (tmp_path / "empty.jsonl").touch()
    for path, said in (("empty.jsonl", "no settings to replay"), ("nowhere.jsonl", "cannot be read")):
        with pytest.raises(ConfigError, match=said):
            recorded(tmp_path / path)


def test_a_cache_that_holds_half_of_the_source_promises_half():
    costs = StepCosts(step=0.1, wait=0.1, input=0.1, compute=0.0, work={"fetch": 0.1}, workers=1, steps=9)
    whole, half = (
        options(costs, Settings(workers=1), AvailableLevers(cache=9, share=s), 0)[0].predicted for s in (0.9, 0.45)
    )
    assert whole == pytest.approx(10)
    assert half == pytest.approx(1 / 0.55)
