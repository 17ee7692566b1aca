"""A run in progress writes its page and shows it in a notebook, with names of samples and classes."""

from __future__ import annotations

import html
import importlib
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import salience
from salience.errors import ConfigError
from salience.events import Confusion, EventLog, MachineUse, WindowClosed
from salience.report.html import page
from salience.report.reader import read_log, story_of
from salience.report.story import shown
from salience.report.text import sections, verdict
from salience.select.classes import MAX_CONFUSIONS, confusions
from salience.watch.usage import MAX_SAMPLES_PER_WINDOW, Meter, UsageRecord

from conftest import make_model, require

CLASSES = ["cat", "<b>dog", "bird", "fish"]


def trained(problem: TensorDataset, **options) -> salience.Loader:
    """Three epochs under a ProgressLR."""
    loader = salience.Loader(problem, 50, epochs=3, **options)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = salience.ProgressLR(optimizer, loader, "linear")
    for _ in range(3):
        for x, y in loader:
            logits = model(x)
            loss = loader.loss(F.cross_entropy(logits, y, reduction="none"), logits, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        loader.evaluated(0.5)
    return loader


@pytest.mark.parametrize("logged", [True, False])
def test_report_writes_the_page_with_the_names_that_are_given(problem, tmp_path, logged):
    require(importlib.util.find_spec("jinja2") is not None, "jinja2")
    loader = trained(problem, **({"log": tmp_path / "run.jsonl"} if logged else {}))
    text = loader.report(tmp_path / "x.html", names=lambda i: f"row-{i}.txt", classes=CLASSES)
    page = (tmp_path / "x.html").read_text()
    assert re.search(r"row-\d+\.txt", page)
    assert "&lt;b&gt;dog" in page
    assert "<b>dog" not in page
    assert "labelled <b>dog" in text
    assert re.search(r"row-\d+\.txt \(sample \d+\): labelled", text)
    for title in ("Training loss", "Learning rate at the end of each epoch", "Accuracy in training, by class"):
        assert title in page
    with pytest.raises(ConfigError, match="give one per sample"):
        loader.report(tmp_path / "y.html", names=["only one"])


def test_windows_shorter_than_an_epoch_are_called_windows_and_counted_as_parts_of_it(problem, tmp_path):
    require(importlib.util.find_spec("jinja2") is not None, "jinja2")
    loader = salience.Loader(problem, 10, epochs=4, window=100, select={"preset": "uniform", "keep": 0.5})
    for _ in range(4):
        for x, _ in loader:
            loader.loss(x.sum(1))
    loader.report(tmp_path / "x.html")
    page = (tmp_path / "x.html").read_text()
    assert "The model trained for 4 epochs on 300 samples" in page
    assert f"selection made {loader.visits} visits instead of 1,200 ({1 - loader.visits / 1200:.0%} fewer)" in page
    assert "Seconds per window" in page
    assert "select uniform" in page
    named = salience.Loader(problem, 10, epochs=4, select="uniform")
    assert "select uniform" in html.unescape(named._repr_html_())
    assert "has not finished" not in page


def test_a_source_knows_its_names_and_classes(tmp_path):
    require(importlib.util.find_spec("jinja2") is not None, "jinja2")
    for i in range(40):
        folder = tmp_path / "data" / ("ant", "bee")[i % 2]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{i}.bin").write_bytes(bytes([i]))
    loader = salience.Loader(salience.Source(tmp_path / "data", decode=lambda data: data[0] / 40), 8, epochs=2)
    for _ in range(2):
        for x, y in loader:
            logits = torch.stack([1 - x, x], dim=1)
            loader.loss(F.cross_entropy(logits, y, reduction="none"), logits, y)
    text = loader.report(tmp_path / "x.html")
    assert re.search(r"(ant|bee)/\d+\.bin", (tmp_path / "x.html").read_text())
    assert "labelled bee, model says" in text


def test_a_notebook_shows_the_page_in_a_frame_of_its_own(problem, monkeypatch):
    require(importlib.util.find_spec("jinja2") is not None, "jinja2")
    loader = trained(problem)
    events = len(loader.events.recent)
    shown_as = loader._repr_html_()
    assert shown_as.startswith('<iframe sandbox srcdoc="')
    assert "<!doctype html>" in html.unescape(shown_as).lower()
    assert len(loader.events.recent) == events, "to look at a run changes nothing"
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert loader._repr_html_() is None


def test_windows_tell_their_loss_learning_rate_and_how_busy_the_machine_was(problem, tmp_path, monkeypatch):
    require(importlib.util.find_spec("psutil") is not None, "psutil")
    monkeypatch.setattr("salience.watch.usage.SECONDS_BETWEEN_SAMPLES", 0.0)  # these windows are short
    loader = trained(problem, log=tmp_path / "run.jsonl")
    ends = [event.data for event in loader.events.recent if isinstance(event.data, WindowClosed)]
    assert [end.lr for end in ends] == pytest.approx([1 / 3, 1 / 6, 0])
    losses = [end.loss for end in ends]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] == pytest.approx(float(loader.ledger.last_loss.mean()))
    story = story_of(read_log(tmp_path / "run.jsonl"), name="x")
    assert len(story.usage) >= 3
    assert all(0 <= one.cpu <= 1 and 0 <= one.memory <= 1 for one in story.usage)
    assert [one.seconds for one in story.usage] == sorted(one.seconds for one in story.usage)
    assert shown(story)


def test_samples_of_a_long_window_are_thinned_and_cover_all_of_it():
    require(importlib.util.find_spec("psutil") is not None, "psutil")
    record = UsageRecord()
    for _ in range(200):
        record.note(now=True)
    taken = record.taken()
    assert MAX_SAMPLES_PER_WINDOW // 2 <= len(taken) <= MAX_SAMPLES_PER_WINDOW
    assert taken[0].seconds < taken[-1].seconds


def test_a_window_that_ends_soon_after_the_last_look_at_the_machine_takes_none_of_its_own():
    require(importlib.util.find_spec("psutil") is not None, "psutil")
    record = UsageRecord()
    assert len(record.taken()) == 1, "the first window, however short"
    record.begin()
    assert record.taken() == ()


def test_a_machine_that_cannot_be_measured_stops_nothing(monkeypatch):
    require(importlib.util.find_spec("psutil") is not None, "psutil")

    def refuses(self: Meter) -> None:
        """A GPU whose driver refuses, which cannot be had otherwise."""
        raise RuntimeError("NVML: not supported")

    monkeypatch.setattr(Meter, "look", refuses)
    assert UsageRecord().taken() == ()


def test_the_classes_confused_most_often_come_first():
    ledger = salience.Ledger(9)
    ledger.set_labels([0, 0, 0, 0, 1, 1, 2, 2, 2])
    ledger.guess[:] = [1, 1, 0, 2, 1, 0, 2, 2, -1]
    assert confusions(ledger) == (
        Confusion(label=0, guess=1, samples=2, share=0.5),
        Confusion(label=0, guess=2, samples=1, share=0.25),
        Confusion(label=1, guess=0, samples=1, share=0.5),
    )
    assert confusions(salience.Ledger(4)) == ()
    many = salience.Ledger(200_000)
    many.set_labels(np.arange(200_000))
    many.guess[:] = np.roll(np.arange(200_000), 1)
    assert len(confusions(many)) == MAX_CONFUSIONS


def test_the_verdict_says_what_auto_did(tmp_path: Path):
    log = EventLog(tmp_path / "run.jsonl")
    log.emit("run", population=10, epochs=1)
    log.emit("plan", window=0, picked=10, population=10)
    log.emit("window", window=0, batches=1, of=1, finished=True, seconds=1.0, usage=[])
    log.emit("settings", window=0, workers=1)
    assert "auto found no lever worth a trial." in verdict(story_of(read_log(tmp_path / "run.jsonl"), name="x"))
    log.emit("decision", window=1, lever="num_workers=2", action="keep", measured=1.5)
    log.emit("decision", window=2, lever='treat="reuse"', action="undo", measured=0.9)
    said = verdict(story_of(read_log(tmp_path / "run.jsonl"), name="x"))
    assert 'auto kept num_workers=2 (1.50x as fast) and tried and undid treat="reuse".' in said


def test_a_resumed_run_continues_the_curve_of_its_machine(tmp_path: Path):
    log = EventLog(tmp_path / "run.jsonl")
    for window, seconds in enumerate((5.0, 9.0, 2.0)):
        used = MachineUse(seconds=seconds, cpu=0.5, memory=0.5, disk=0, network=0)
        log.emit("plan", window=window, picked=10, population=10)
        log.emit(WindowClosed(window=window, batches=1, of=1, finished=True, seconds=1.0, usage=(used,)))
    assert [one.seconds for one in story_of(read_log(tmp_path / "run.jsonl"), name="x").usage] == [5.0, 9.0, 11.0]


def test_the_page_and_the_text_say_how_busy_processors_memory_and_gpus_were(tmp_path: Path):
    log = EventLog(tmp_path / "run.jsonl")
    for window, busy in enumerate((0.4, 0.6)):
        used = MachineUse(seconds=window + 1.0, cpu=busy, memory=0.25, disk=1e6, network=2e6, gpu=(busy + 0.3, 0.1))
        log.emit("plan", window=window, picked=10, population=10)
        log.emit(WindowClosed(window=window, batches=1, of=1, finished=True, seconds=1.0, usage=(used,)))
    story = story_of(read_log(tmp_path / "run.jsonl"), name="x")
    mean = "On average, the processors were 50% busy, GPU 0 was 80% busy, GPU 1 was 10% busy and 25% of the memory was in use"
    assert mean in sections(story)["machine"]
    found = page(story)
    assert mean in found
    assert all(name in found for name in ("processors", "memory", "GPU 0", "GPU 1", "network"))
