"""The story of a run is what happened in it, also where the log is damaged, doubled, resumed or of another salience."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import NASTY, long_log, looped, steps, trained

import salience
from salience import events
from salience import ledger as ledgers
from salience.app import checkpoint
from salience.cli.opening import open_run
from salience.errors import StateError
from salience.events import EventLog
from salience.report.html import page
from salience.report.reader import read_log, story_of
from salience.report.story import Story, shown
from salience.report.text import verdict
from salience.report.words import loss, seconds, short, size

from conftest import make_model


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("observed"), "all", epochs=3)


@pytest.fixture(scope="module")
def selected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("selected"), "less", select="default")


def story_in(log: Path, **more) -> Story:
    return story_of(read_log(log), name="run", **more)


def add(log: Path, kind: str, **fields) -> None:
    """A line that no EventLog would write."""
    with log.open("a") as file:
        file.write(json.dumps({"kind": kind, **fields}) + "\n")


# ---------------------------------------------------------------- what happened


def test_a_run_that_observes_is_told_with_what_it_could_have_saved(observed):
    story = open_run(str(observed)).story
    tally = checkpoint.read(observed / "last.pt")["tally"]
    assert [one.metric for one in story.evaluations] == tally["accuracies"]
    assert (story.visits, story.share, story.selects) == (tally["visits"], 1.0, False)
    assert 0 < story.seconds < tally["seconds"]
    assert 0 < sum(story.overhead.values()) <= tally["overhead"]
    assert story.classes == tuple(sorted(NASTY))
    said = verdict(story)
    assert said.startswith(f"mlp reached a test accuracy of {story.metric:.1%}")
    assert "Every sample was visited in every epoch." in said
    assert f"({story.forecast['saved']:.0%} fewer)" in said
    assert story.notes == ()


def test_a_run_that_selects_is_told_with_what_it_selected(selected):
    story = open_run(str(selected)).story
    ledger = ledgers.load(selected / "ledger.npz")
    assert story.visits == ledger.trained.sum() < story.full == 5 * ledger.n
    found, known = story.findings, story.findings.visits
    assert known is not None
    assert known.counted
    assert known.always == (ledger.trained >= 5).sum()
    assert known.never == (ledger.trained == 0).sum()
    assert known.always + known.sometimes + known.never == ledger.n
    assert sum(count for *_, count in known.times) == ledger.n
    assert sum(known.often) + sum(known.seldom) == np.isfinite(ledger.mean_loss).sum()
    assert sum(one.samples for one in found.classes) == ledger.n
    assert f"selection made {story.visits:,} visits instead of {story.full:,}" in verdict(story)
    assert [note.name for note in story.windows[0].plan.filters][-1] == "noise"


def test_the_samples_shown_have_names_and_are_at_most_sixty(observed):
    story = open_run(str(observed)).story
    ids = shown(story)
    assert 0 < len(ids) == len(set(ids)) <= 60
    assert set(story.files) == set(ids)
    assert any("again" in name for name in story.files.values())  # the copies among them
    assert {one.id for one in story.findings.hard[:12]} <= set(ids)


def test_the_log_alone_tells_all_but_names(observed):
    alone, whole = story_in(observed / "run.jsonl"), open_run(str(observed)).story
    assert (alone.visits, alone.seconds, alone.evaluations) == (whole.visits, whole.seconds, whole.evaluations)
    assert alone.findings == whole.findings
    assert (alone.classes, alone.files) == (None, {})
    assert "validation metric" in verdict(alone)


def test_a_run_that_told_no_findings_is_told_from_its_ledger(selected, tmp_path):
    for name in ("run.jsonl", "ledger.npz", "copies.npz"):
        (tmp_path / name).write_bytes((selected / name).read_bytes())
    lines = (tmp_path / "run.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "run.jsonl").write_text("".join(line for line in lines if '"kind": "findings"' not in line))
    told, found = open_run(str(selected)).story.findings, open_run(str(tmp_path)).story.findings
    assert found == told


def test_counts_of_a_ledger_that_began_elsewhere_are_not_taken_for_this_runs(selected):
    warm = trained(selected.parent, "warm", epochs=2, ledger=selected)
    story = open_run(str(warm)).story
    assert not story.findings.visits.counted
    assert "How often samples were selected in this run is not known" in page(story)


def test_a_cache_is_told_by_its_own_counts(tmp_path):
    pytest.importorskip("obstore")
    for i in range(40):
        path = tmp_path / "data" / f"c{i % 2}" / f"{i:02}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes([i]) * (100 + i))
    (tmp_path / "data" / "c0" / "00.bin").write_bytes(b"")
    loader = salience.Loader(
        salience.Source(str(tmp_path / "data")),
        8,
        decode=_first,
        cache=2000,
        max_broken=0.1,
        log=tmp_path / "x.jsonl",
        trace=tmp_path / "trace",
    )
    for _ in range(3):
        for x, _y in loader:
            loader.loss(x.float())
    loader.report()
    story = story_in(tmp_path / "x.jsonl")
    counts = [event for event in events.read(tmp_path / "x.jsonl") if event["kind"] == "feed"][-1]
    assert story.feed["requests"] == counts["requests"] > 0
    assert story.feed["cache_bound_bytes"] == counts["cache"]["bound_bytes"] > 0
    assert [one.id for one in story.broken] == [0]
    text = page(story)
    for key in ("bytes", "lru_bytes", "never_evict_bytes", "bytes_used", "bound_bytes"):
        assert size(counts["cache"][key]) in text
    assert "c0/00.bin" in text


def _first(data: bytes) -> int:
    return data[0]


def test_the_share_that_was_steered_is_a_decision(tmp_path):
    log = EventLog(long_log(tmp_path / "x.jsonl", 3))
    moved = {"from": 0.4, "to": 0.6, "metric": 0.5, "mean": 0.7, "spread": 0.01, "reason": "below the band"}
    log.emit("steered", window=2, **moved)
    story = story_in(tmp_path / "x.jsonl")
    assert [(one.before, one.after, one.reason) for one in story.steered] == [(0.4, 0.6, "below the band")]
    assert "40% to 60%" in page(story)


def test_what_was_reused_of_the_augmentation_is_told(tmp_path, problem):
    loader = salience.Loader(
        problem,
        50,
        epochs=4,
        augment=[salience.Stage(_twice, random=False), _noisy],
        treat="reuse",
        log=tmp_path / "x.jsonl",
    )
    model = make_model()
    for _ in range(4):
        steps(loader, model)
    treated = story_in(tmp_path / "x.jsonl").treated
    last = [event for event in events.read(tmp_path / "x.jsonl") if event["kind"] == "treat"][-1]
    assert (treated.visits, treated.reused) == (last["visits"], last["reused"])
    assert list(treated.costs_us) == list(last["costs_us"])
    assert "<h2>Augmentation</h2>" in page(story_in(tmp_path / "x.jsonl"))


def _twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def _noisy(x: torch.Tensor) -> torch.Tensor:
    return x + 0.01 * torch.rand(1)


# ---------------------------------------------------------------- stopped, resumed, doubled


def test_a_resumed_run_has_the_figures_of_one_never_stopped(tmp_path, problem):
    def go(log: Path, stop: bool) -> Story:
        loader, model = looped(log, problem), make_model()
        for window in range(4):
            if stop and window == 1:
                steps(loader, model, 2)
                state = loader.state_dict()
                steps_lost = looped(log, problem)  # a new process, as far as the log can tell
                steps_lost.load_state_dict(state)
                loader = steps_lost
            steps(loader, model)
            loader.evaluated(window / 4)
        return story_in(log)

    whole, resumed = go(tmp_path / "whole.jsonl", False), go(tmp_path / "resumed.jsonl", True)
    assert (resumed.visits, resumed.full) == (whole.visits, whole.full)
    assert resumed.evaluations == whole.evaluations
    assert whole.notes == ()
    assert [note for note in resumed.notes if "resumed 1 time;" in note] == list(resumed.notes)


def test_results_that_were_done_again_after_a_resume_count_once(tmp_path):
    first = EventLog(long_log(tmp_path / "x.jsonl", 3))
    first.emit("run", salience=salience.__version__, population=1000, epochs=4, seed=0, select="observe")
    first.emit("plan", window=2, picked=500, population=1000, progress=0.5, filters=[])
    first.emit("window", window=2, batches=50, of=50, finished=True, seconds=0.5, overhead={"plan": 1.0})
    first.emit("evaluated", metric=0.9, progress=0.75, window=3)
    story = story_in(tmp_path / "x.jsonl")
    assert [one.metric for one in story.evaluations] == [0.5, pytest.approx(2 / 3), 0.9]
    assert story.visits == 1500
    assert story.seconds == pytest.approx(2.0)  # what was done twice took its time twice
    assert sum(story.overhead.values()) == pytest.approx(1.003)


def test_of_runs_one_after_the_other_in_one_log_the_last_is_told(tmp_path, problem):
    for epochs in (3, 2):
        loader, model = looped(tmp_path / "x.jsonl", problem, epochs=epochs), make_model()
        for _ in range(epochs):
            steps(loader, model)
    story = story_in(tmp_path / "x.jsonl")
    assert (len(story.windows), story.run.epochs) == (2, 2)
    assert story.notes == (
        "The log holds 2 runs, one after the other; this is the last. Give each run a log of its own.",
    )


def test_two_runs_that_wrote_one_log_at_once_are_told_apart_from_one(tmp_path):
    both = EventLog(tmp_path / "x.jsonl"), EventLog(tmp_path / "x.jsonl")
    for log in both:
        log.emit("run", salience=salience.__version__, population=3, seed=0, select="observe")
    assert any("two runs wrote to this log at once" in note for note in story_in(tmp_path / "x.jsonl").notes)


@pytest.mark.parametrize("interval", [[], [1.0], ["a", 2], {"low": 1}, 5])
def test_odd_decisions_are_counted_and_left_out(tmp_path, interval):
    long_log(tmp_path / "x.jsonl", 3)
    add(tmp_path / "x.jsonl", "decision", window=1, lever="x", action="try", reason="", interval=interval)
    add(tmp_path / "x.jsonl", "verdict", text="so it is", levers=[{"name": "x"}])
    story = story_in(tmp_path / "x.jsonl")
    assert len(story.decisions) == 2
    assert any(
        "2 events with missing or wrong fields were left out: decision, verdict." in note for note in story.notes
    )
    assert page(story)


def test_a_profile_before_the_run_belongs_to_it(tmp_path, problem):
    EventLog(tmp_path / "x.jsonl").emit("verdict", bound="input", text="Input-bound.", levers=[])
    steps(looped(tmp_path / "x.jsonl", problem, epochs=1), make_model())
    story = story_in(tmp_path / "x.jsonl")
    assert [one.text for one in story.bottlenecks] == ["Input-bound."]
    assert not any("2 runs" in note for note in story.notes)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8, 0.97])
def test_a_log_cut_off_anywhere_is_told_as_far_as_it_goes(selected, tmp_path, share):
    data = (selected / "run.jsonl").read_bytes()
    (tmp_path / "run.jsonl").write_bytes(data[: data.rindex(b"}", 0, int(share * len(data)))])
    cut, whole = story_in(tmp_path / "run.jsonl"), story_in(selected / "run.jsonl")
    assert any("cut off in the middle of a line" in note for note in cut.notes)
    assert cut.evaluations == whole.evaluations[: len(cut.evaluations)]
    done = sum(window.finished for window in cut.windows)
    assert cut.visits == sum(window.visits for window in whole.windows[:done])
    assert (done == 5) != any(f"{done} of 5 epochs are done" in note for note in cut.notes)
    assert page(cut)


# ---------------------------------------------------------------- odd logs


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty: the run has not begun"),
        (b"\x89PNG\r\n\x1a\n\x00\xff", "is not an event log of salience"),
        (b"[1, 2]\n3\nnull\n", "is not an event log of salience"),
        (b'{"v": 99, "seq": 0, "time": 0, "kind": "run"}\n', "was written by a newer salience; upgrade"),
        (b"[" * 100_000, "is not an event log of salience"),
    ],
)
def test_a_file_without_events_is_one_clear_sentence(tmp_path, content, said):
    (tmp_path / "x.jsonl").write_bytes(content)
    with pytest.raises(StateError, match=said):
        read_log(tmp_path / "x.jsonl")


def test_a_log_that_is_not_there_is_one_clear_sentence(tmp_path):
    with pytest.raises(StateError, match="There is no event log at"):
        read_log(tmp_path / "x.jsonl")


def test_what_is_unknown_newer_or_lacks_something_is_left_out_and_counted(tmp_path):
    path = long_log(tmp_path / "x.jsonl", 2)
    before = story_in(path)
    add(path, "levitated", height=3)
    add(path, "levitated", height=4)
    add(path, "plan", window="third")
    add(path, "findings", suspects=[{"id": "<b>"}])
    add(path, "window", v=3)
    with path.open("a") as file:
        file.write('not json\n{"kind": "window", "seconds": NaN}\n')
    story = story_in(path)
    assert (story.visits, story.seconds, story.findings) == (before.visits, before.seconds, None)
    assert story.notes == (
        "2 lines of the log could not be read.",
        "1 event from a newer salience could not be read; upgrade salience to see everything.",
        "2 events of kinds this report does not know: 2 'levitated'.",
        "2 events with missing or wrong fields were left out: findings, plan.",
    )
    assert page(story)


def test_any_field_of_any_event_may_be_wrong(selected, tmp_path):
    whole = (selected / "run.jsonl").read_text().splitlines()
    junk = (None, "x", -1, 0, 10**400, [], {}, {"a": 1}, True, 0.5)
    for event in map(json.loads, whole[1:]):
        for key in event.keys() - {"kind"}:
            value = junk[(event["seq"] + len(key)) % len(junk)]
            others = [line for line in whole if json.loads(line).get("seq") != event["seq"]]
            (tmp_path / "x.jsonl").write_text("\n".join([*others, json.dumps({**event, key: value}), ""]))
            verdict(story_in(tmp_path / "x.jsonl"))
    assert page(story_in(tmp_path / "x.jsonl"))


def test_another_version_and_a_missing_beginning_are_said(tmp_path):
    path = long_log(tmp_path / "x.jsonl", 1)
    _, first, *rest = path.read_text().splitlines(keepends=True)
    path.write_text(first.replace(f'"salience": "{salience.__version__}"', '"salience": "0.0.1"') + "".join(rest))
    assert story_in(path).notes[0].startswith("The run was made with salience 0.0.1; this report was made with ")
    path.write_text("".join(rest))
    story = story_in(path)
    assert story.notes[0].startswith("The log has no `run` event")
    assert story.visits == 500


def test_a_ledger_of_other_data_is_left_out(tmp_path):
    ledgers.save(ledgers.Ledger(7), tmp_path / "ledger.npz")
    story = open_run(str(long_log(tmp_path / "run.jsonl", 1))).story
    assert story.findings is None
    assert "The ledger is of 7 samples, the run of 1,000; it was left out." in story.notes


def test_a_run_that_has_only_begun_has_a_story(tmp_path, problem):
    looped(tmp_path / "x.jsonl", problem)
    story = open_run(str(tmp_path / "x.jsonl")).story
    assert story.arm == "default"
    assert verdict(story) == "The run has planned nothing yet."
    assert page(story)


def test_numbers_are_written_as_people_read_them():
    assert [seconds(s) for s in (0.44, 9.96, 119.4, 200, 7300)] == ["0.4 s", "10 s", "119 s", "3 min 20 s", "2 h 2 min"]
    assert [short(v) for v in (0.25, 1500, 12_000, 3_400_000)] == ["0.25", "1,500", "12k", "3.4M"]
    assert [loss(v) for v in (1.2345, 0.00042, None)] == ["1.23", "0.00042", "-"]
    assert [size(v) for v in (512, 2048, 3 * 2**40)] == ["512 bytes", "2.0 KiB", "3.0 TiB"]
