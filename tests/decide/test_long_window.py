"""A window of many minutes: `auto` decides inside it, about workers, and no batch is lost or made twice."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import salience
from salience.decide.levers import AvailableLevers, Settings, options
from salience.events import EventLog, StepCosts
from salience.run import deciding


class Slow(Dataset[Any]):
    """Samples that take a millisecond and a half to read."""

    def __len__(self) -> int:
        return 1600

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        time.sleep(0.0015)
        return torch.full((2,), float(i)), i % 4


@pytest.fixture
def short_stretches(monkeypatch):
    """A stretch is as long as its steps, since no test waits two minutes."""
    monkeypatch.setattr(deciding, "STRETCH_SECONDS", 0.0)
    monkeypatch.setattr(deciding, "cores_of", lambda ranks: 2)


def go(loader: Any) -> list[int]:
    seen: list[int] = []
    for ids, (x, y) in loader:
        assert torch.equal(x[:, 0].long(), ids)
        loader.loss(x.sum(1), None, y)
        seen += ids.tolist()
    return seen


def test_a_lever_is_tried_inside_the_only_window(short_stretches):
    loader = salience.Loader(Slow(), 4, epochs=1, auto=True, num_workers=1, with_ids=True)
    seen = go(loader)
    plain = salience.Loader(Slow(), 4, epochs=1, with_ids=True)
    assert loader.plan is not None
    assert seen == loader.plan.ids.tolist()  # each once, in the order of the plan
    assert len(seen) == len(plain.dataset)
    decisions = [event for event in loader.events.recent if event["kind"] == "decision"]
    assert (decisions[0]["lever"], decisions[0]["action"], decisions[0]["window"]) == ("num_workers=2", "try", 0)
    used = [event["workers"] for event in loader.events.recent if event["kind"] == "settings"]
    assert used[:2] == [1, 2]


def test_a_short_window_has_no_decision_inside():
    loader = salience.Loader(Slow(), 4, epochs=1, auto=True, num_workers=1, with_ids=True)
    go(loader)
    assert not [event for event in loader.events.recent if event["kind"] == "decision"]


def test_levers_that_change_the_plan_wait_for_the_edge(short_stretches):
    loader = salience.Loader(Slow(), 4, epochs=2, auto="lossy", num_workers=1, with_ids=True)
    seen = go(loader)
    assert len(seen) == len(set(seen)) == 1600
    tried = {event["lever"] for event in loader.events.recent if event["kind"] == "decision"}
    assert 'select="default"' not in tried


def test_workers_that_are_fast_on_average_are_given_a_deeper_prefetch():
    bursty = StepCosts(step=1.3, wait=0.3, input=0.8, compute=1.0, workers=2, steps=50)
    found = options(bursty, Settings(workers=2), AvailableLevers(cores=2, prefetch=2), 0)
    assert [(one.name, one.exact) for one in found] == [("prefetch_factor=8", True)]
    assert found[0].predicted == pytest.approx(1.3)
    steady = StepCosts(step=1.0, wait=0.01, input=0.8, compute=1.0, workers=2, steps=50)
    assert not options(steady, Settings(workers=2), AvailableLevers(cores=2, prefetch=2), 0)
    assert not options(bursty, Settings(workers=2), AvailableLevers(cores=2), 0)  # the user gave a number


def test_copies_that_take_time_can_be_pinned():
    copying = StepCosts(step=1.0, wait=0.0, input=0.1, compute=1.0, copy=0.2, workers=1, steps=50)
    found = options(copying, Settings(workers=1), AvailableLevers(cores=1, pin=True), 0)
    assert [(one.name, round(one.predicted, 2)) for one in found] == [("pin_memory=True", 1.25)]


def test_the_settings_reach_the_workers(tmp_path):
    log = EventLog(tmp_path / "run.jsonl")
    log.emit("settings", window=0, workers=1, prefetch=6)
    loader = salience.Loader(Slow(), 100, epochs=1, auto=tmp_path / "run.jsonl", num_workers=1, with_ids=True)
    assert len(go(loader)) == 1600
    assert loader.prefetch_factor == 6
