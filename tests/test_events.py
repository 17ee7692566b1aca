"""The event log: whole lines, versioned, and readable after a kill."""

from __future__ import annotations

import json

import numpy as np
import pytest

import salience
from salience.errors import StateError
from salience.events import EventLog, read


def test_events_are_written_as_json_lines_and_heard_by_listeners(tmp_path):
    log, heard = EventLog(tmp_path / "deep" / "run.jsonl"), []
    log.listen(heard.append)
    log.emit("plan", picked=np.int64(3), losses=np.array([1.0, np.nan]), odd={"a": (1, 2)})
    (event,) = read(tmp_path / "deep" / "run.jsonl")
    assert event == heard[0]
    assert (event["picked"], event["losses"], event["odd"]) == (3, [1.0, None], {"a": [1, 2]})


def test_a_torn_line_is_passed_over_and_the_log_goes_on(tmp_path):
    path = tmp_path / "run.jsonl"
    EventLog(path).emit("a")
    with path.open("a") as file:
        file.write('{"v": 1, "seq": 1, "ki')
    EventLog(path).emit("b")
    assert [(e["seq"], e["kind"]) for e in read(path)] == [(0, "a"), (1, "b")]


def test_a_newer_log_is_refused_with_advice(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text(json.dumps({"v": 99, "seq": 0, "kind": "run"}) + "\n")
    with pytest.raises(StateError, match="upgrade salience"):
        list(read(path))


def test_a_run_logs_its_config_plans_and_windows(problem, tmp_path):
    loader = salience.Loader(problem, 64, epochs=3, select="epsilon_greedy", log=tmp_path / "run.jsonl")
    for _ in range(3):
        for x, _ in loader:
            loader.loss(x.sum(1))
        loader.evaluated(0.5)
    kinds = [e["kind"] for e in read(tmp_path / "run.jsonl")]
    assert kinds == ["run"] + ["plan", "window", "evaluated"] * 2 + ["plan", "window", "findings", "evaluated"]
