"""The event log: typed events, whole lines, the version first, and readable after a kill."""

from __future__ import annotations

import json
import shutil
from dataclasses import MISSING, fields
from typing import get_type_hints

import numpy as np
import pytest

import salience
from salience import events
from salience.errors import StateError
from salience.events import KINDS, EventLog, Fault, FilterNote, Steered, Warned, WindowPlanned, read, scan
from salience.events.coding import encode


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---------------------------------------------------------------- typed


def test_an_event_is_written_as_a_json_line_heard_by_listeners_and_read_back_as_it_was(tmp_path):
    path, heard = tmp_path / "deep" / "run.jsonl", []
    log = EventLog(path)
    log.listen(heard.append)
    note = FilterNote(name="noise", dropped=2, reason="so")
    planned = WindowPlanned(window=0, picked=3, population=5, filters=(note,), by_importance=(0.5, 1.0))
    log.emit(planned)
    (event,) = read(path)
    assert event == heard[0] == log.recent[0]
    assert event.data == planned
    assert (event.seq, event.kind) == (0, "plan")


def test_the_fields_of_an_event_can_be_read_by_their_json_names():
    event = EventLog().emit(Steered(window=1, before=0.4, after=0.6))
    assert (event["kind"], event["from"], event["to"], event.get("nothing", 7)) == ("steered", 0.4, 0.6, 7)
    assert dict(event.items()) == {**event}


def test_an_event_given_by_name_becomes_its_dataclass_and_numpy_becomes_plain():
    log = EventLog()
    given = {"name": "noise", "dropped": np.int64(2), "forced": 0, "reason": ""}
    event = log.emit(
        "plan", window=np.int32(1), picked=3, population=5, filters=[given], by_importance=np.ones(2, np.float32)
    )
    note = FilterNote(name="noise", dropped=2)
    assert event.data == WindowPlanned(window=1, picked=3, population=5, filters=(note,), by_importance=(1.0, 1.0))


def test_further_figures_of_an_evaluation_are_kept_and_written_beside_the_metric(tmp_path):
    EventLog(tmp_path / "x.jsonl").emit("evaluated", metric=0.5, progress=1.0, top5=0.9, broken=float("nan"))
    (event,) = read(tmp_path / "x.jsonl")
    assert event.data.more == {"top5": 0.9, "broken": None}
    assert lines(tmp_path / "x.jsonl")[1]["top5"] == 0.9


@pytest.mark.parametrize(
    ("kind", "given", "says"),
    [
        ("pln", {}, "no event of kind 'pln'. Did you mean 'plan'"),
        ("warning", {"texts": ""}, "warning lacks 'text'"),
        ("warning", {"text": "", "txt": ""}, "warning has no field 'txt'. Did you mean 'text'"),
        ("scored", {"window": 0, "samples": "many"}, "scored.samples is 'many', not int"),
        ("plan", {"window": 0, "picked": 1, "population": 1, "filters": [{"nme": "x"}]}, "plan.filters lacks 'name'"),
    ],
)
def test_an_unknown_kind_or_field_is_refused_with_the_nearest_one(kind, given, says):
    with pytest.raises(TypeError, match=says):
        EventLog().emit(kind, **given)


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_of_every_kind_has_a_docstring(kind):
    import ast
    import inspect

    (body,) = ast.parse(inspect.getsource(KINDS[kind])).body
    after = dict(zip(body.body, body.body[1:], strict=False))
    named = [one for one in body.body if isinstance(one, ast.AnnAssign) and one.target.id != "kind"]
    assert [one.target.id for one in named] == [one.name for one in fields(KINDS[kind])]
    assert all(isinstance(after[one], ast.Expr) and after[one].value.value.endswith(".") for one in named)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_survives_writing_and_reading(kind, tmp_path):
    made = KINDS[kind](**{
        one.name: _example(get_type_hints(KINDS[kind])[one.name])
        for one in fields(KINDS[kind])
        if one.default is MISSING and one.default_factory is MISSING
    })  # fmt: skip
    EventLog(tmp_path / "x.jsonl").emit(made)
    (event,) = read(tmp_path / "x.jsonl")
    assert event.data == made
    assert EventLog().emit(kind, **encode(made)).data == made


def _example(hint):
    known = {int: 3, float: 0.5, str: "x", bool: True}
    return known.get(hint, {} if "Mapping" in str(hint) else () if "tuple" in str(hint) else None)


# ---------------------------------------------------------------- on disk


def test_the_first_line_states_the_version_once(tmp_path):
    path = tmp_path / "run.jsonl"
    EventLog(path).emit(Warned(text="a"))
    EventLog(path).emit(Warned(text="b"))
    assert [line["kind"] for line in lines(path)] == ["log", "warning", "warning"]
    assert lines(path)[0] == {"kind": "log", "v": events.VERSION}


def test_a_torn_line_is_skipped_and_the_log_continues(tmp_path):
    path = tmp_path / "run.jsonl"
    EventLog(path).emit(Warned(text="a"))
    with path.open("a") as file:
        file.write('{"seq": 1, "ki')
    EventLog(path).emit(Warned(text="b"))
    assert [(e.seq, e.data.text) for e in read(path)] == [(0, "a"), (1, "b")]


def test_a_log_of_version_1_is_read_and_continued(tmp_path):
    path = tmp_path / "run.jsonl"
    old = [
        {"v": 1, "seq": 0, "time": 1.0, "kind": "run", "population": 3, "select": "observe", "since_removed": 1},
        {"v": 1, "seq": 1, "time": 2.0, "kind": "steered", "window": 2, "from": 0.4, "to": 0.6, "reason": "why"},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in old))
    EventLog(path).emit(Warned(text="c"))
    run, steered, warned = read(path)
    assert run.data == events.RunStarted(population=3)
    assert steered.data == Steered(window=2, before=0.4, after=0.6, reason="why")
    assert (warned.seq, warned.data.text) == (2, "c")


@pytest.mark.parametrize(
    "content",
    ['{"v": 99, "seq": 0, "kind": "run"}\n', '{"kind": "log", "v": 99}\n{"seq": 0, "kind": "levitated"}\n'],
    ids=["on every line", "in the first line"],
)
def test_a_newer_log_is_refused_in_one_sentence(tmp_path, content):
    path = tmp_path / "run.jsonl"
    path.write_text(content)
    with pytest.raises(StateError, match="version 99; this one reads up to version 2\\); upgrade salience"):
        list(read(path))
    with pytest.raises(StateError, match="upgrade salience"):
        EventLog(path)


def test_a_scan_says_what_is_wrong_with_each_line(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text(
        '{"kind": "levitated"}\n{"kind": "plan", "window": "third"}\n[1]\n{"kind": "warning", "text": "a"}\n'
    )
    *faults, event = scan(path)
    assert faults == [Fault(why="unknown", kind="levitated"), Fault(why="malformed", kind="plan"), Fault(why="torn")]
    assert event.data == Warned(text="a")


@pytest.mark.parametrize(
    "content",
    [
        b"\x89PNG\r\n\x1a\n",
        b"epoch,loss\n1,2\n",
        b'{"epoch": 1, "loss": 0.5}\n',
        b'{\n  "model": "cnn"\n}\n',
        b'{"kind": "scalar"}\n',
    ],
    ids=["picture", "table", "JSON lines", "JSON", "JSON lines with a kind"],
)
def test_a_file_that_is_no_log_is_refused_and_left_as_it_was(tmp_path, content):
    (tmp_path / "mine").write_bytes(content)
    with pytest.raises(StateError, match=r"mine' exists and is not an event log"):
        EventLog(tmp_path / "mine")
    assert (tmp_path / "mine").read_bytes() == content


@pytest.mark.parametrize("left", ["", '{"kind": "lo', '{"kind": "log", "v"'])
def test_a_log_whose_first_line_is_torn_is_continued(tmp_path, left):
    (tmp_path / "run.jsonl").write_text(left)
    for text in ("a", "b"):
        EventLog(tmp_path / "run.jsonl").emit(Warned(text=text))
    assert [event.data.text for event in read(tmp_path / "run.jsonl")] == ["a", "b"]


def test_training_continues_when_the_log_can_no_longer_be_written_and_that_is_said_once(tmp_path, caplog):
    log = EventLog(tmp_path / "runs" / "run.jsonl")
    log.emit(Warned(text="a"))
    shutil.rmtree(tmp_path / "runs")
    log.emit(Warned(text="b"))
    log.emit(Warned(text="c"))
    assert [event.data.text for event in log.recent] == ["a", "b", "c"]
    assert [record.message.partition("run.jsonl'")[2] for record in caplog.records] == [
        " can no longer be written (No such file or directory); training continues without it."
    ]


# ---------------------------------------------------------------- of a run


def test_a_run_logs_its_config_plans_and_windows(problem, tmp_path):
    loader = salience.Loader(problem, 64, epochs=3, select="epsilon_greedy", log=tmp_path / "run.jsonl")
    for _ in range(3):
        for x, _ in loader:
            loader.loss(x.sum(1))
        loader.evaluated(0.5)
    kinds = [e.kind for e in read(tmp_path / "run.jsonl")]
    assert kinds == ["run"] + ["plan", "window", "evaluated"] * 2 + ["plan", "window", "findings", "evaluated"]
