"""auto in the Loader: whatever is switched, batches stay those of the plan; decisions are logged, resumed and replayed."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset, Subset

import salience
from salience.decide.auto import Auto
from salience.decide.levers import Settings
from salience.errors import ConfigError, StateError
from salience.events import EventLog, read

from conftest import make_model


def script(path: Path, **windows: Settings) -> Path:
    """An event log with settings by window: w3=Settings(...)."""
    log = EventLog(path / "script.jsonl")
    for name, settings in windows.items():
        log.emit("settings", window=int(name[1:]), **asdict(settings))
    return path / "script.jsonl"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for i in range(60):
        file = tmp_path / "set" / f"c{i % 3}" / f"{i:03}.bin"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(rng.bytes(64))
    return tmp_path / "set"


def decode(data: Any) -> torch.Tensor:
    return torch.tensor(list(data)).float()


def go(
    loader: salience.Loader, windows: int, stop: tuple[int, int] | None = None
) -> list[tuple[list[int], torch.Tensor]]:
    """Every batch; `stop` is a window and the batch behind which to end."""
    seen = []
    for _ in range(loader.epoch, windows):
        for number, (ids, (x, _)) in enumerate(loader):
            loader.loss((ids * 7919 % 101 + x.flatten(1).sum(1) % 7).float())
            seen.append((ids.tolist(), x.clone()))
            if stop == (loader.epoch, number):
                return seen
        loader.evaluated(0.5)
    return seen


def same(one: list[Any], two: list[Any]) -> bool:
    return len(one) == len(two) and all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in zip(one, two, strict=True))


EXACT = {
    "w0": Settings(workers=1), "w1": Settings(workers=2), "w2": Settings(workers=1, cache=10**6),
    "w3": Settings(workers=2, cache=10**6), "w4": Settings(workers=1), "w5": Settings(workers=0, cache=2000),
}  # fmt: skip


def test_exact_levers_leave_every_batch_as_it_was(folder, tmp_path):
    options: dict[str, Any] = {"decode": decode, "with_ids": True, "epochs": 6, "num_workers": 1}
    plain = go(salience.Loader(salience.Source(folder), 8, **options), 6)
    loader = salience.Loader(
        salience.Source(folder), 8, auto=script(tmp_path, **EXACT), log=tmp_path / "log", **options
    )
    assert same(go(loader, 6), plain)
    used = [event for event in read(tmp_path / "log") if event["kind"] == "settings"]
    assert [(e["window"], e["workers"], e["cache"] > 0) for e in used] == [
        (0, 1, False), (1, 2, False), (2, 1, True), (3, 2, True), (4, 1, False), (5, 0, True),
    ]  # fmt: skip
    fed = [event["cache"].get("hits", 0) for event in read(tmp_path / "log") if event["kind"] == "feed"]
    assert fed[3] > 0  # the cache was there, and was used


def test_what_cannot_be_switched_is_undone_and_training_goes_on(folder, tmp_path):
    options: dict[str, Any] = {"decode": decode, "with_ids": True, "epochs": 3}
    path = script(tmp_path, w1=Settings(cache=-5), w2=Settings())
    loader = salience.Loader(salience.Source(folder), 8, auto=path, log=tmp_path / "log", **options)
    assert same(go(loader, 3), go(salience.Loader(salience.Source(folder), 8, **options), 3))
    undone = next(event for event in read(tmp_path / "log") if event["kind"] == "decision")
    assert undone["action"] == "undo"
    assert "cache is -5 bytes" in undone["reason"]
    with pytest.raises(ConfigError, match="-5"):
        go(salience.Loader(salience.Source(folder), 8, auto=path, strict=True, **options), 3)


def slow(x: torch.Tensor) -> torch.Tensor:
    time.sleep(0.0005)
    return x + torch.rand(())


def noisy(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand(())


def test_treat_and_select_are_switched_at_window_edges_alone(problem, tmp_path):
    path = script(
        tmp_path, w0=Settings(), w2=Settings(treat=True), w4=Settings(treat=True, select=True), w6=Settings(select=True),
        w7=Settings(),
    )  # fmt: skip
    options: dict[str, Any] = {"with_ids": True, "epochs": 12, "augment": [salience.Stage(slow, freeze=True), noisy]}
    few = Subset(problem, range(60))
    loader = salience.Loader(few, 6, auto=path, log=tmp_path / "log", **options)
    got, plain = go(loader, 12), go(salience.Loader(few, 6, **options), 3)
    visits = [event["picked"] for event in read(tmp_path / "log") if event["kind"] == "plan"]
    assert visits[:4] == [60] * 4
    assert max(visits[4:7]) < 40
    assert visits[7:] == [60] * 5
    kinds = [event["treatment"] for event in read(tmp_path / "log") if event["kind"] == "treat"]
    assert kinds == ["fresh"] * 2 + ["reuse"] * 4 + ["fresh"] * 6
    assert same(got[:20], plain[:20])  # before anything was switched on
    assert [ids for ids, _ in got[20:30]] == [ids for ids, _ in plain[20:30]]  # reuse leaves the order
    assert loader.progress == pytest.approx(1.0)


@pytest.mark.parametrize("stop", [(1, 2), (4, 1), (6, 3), (8, 0)])
def test_a_resumed_run_goes_on_with_its_settings_and_batches(problem, tmp_path, stop):
    path = script(tmp_path, w0=Settings(), w2=Settings(select=True), w5=Settings(), w7=Settings(select=True))

    def make() -> salience.Loader:
        return salience.Loader(problem, 30, epochs=12, with_ids=True, auto=path)

    whole, first = go(make(), 12), make()
    begun = go(first, 12, stop)
    state = first.state_dict()
    resumed = make()
    resumed.load_state_dict(state)
    assert resumed._run.deciding.settings == first._run.deciding.settings
    assert same(begun + go(resumed, 12), whole)
    with pytest.raises(StateError, match="auto"):
        salience.Loader(problem, 30, epochs=12).load_state_dict(state)


class Waiting(Dataset[Any]):
    """Waits for each sample: two workers wait side by side."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 100

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        time.sleep(self.seconds)
        return torch.full((8,), float(i)), i % 4


def test_a_run_measures_itself_tries_what_it_lacks_and_logs_why(tmp_path):
    options: dict[str, Any] = {"epochs": 10, "with_ids": True}
    loader = salience.Loader(Waiting(0.001), 2, num_workers=1, auto=True, log=tmp_path / "log", **options)
    assert same(go(loader, 10), go(salience.Loader(Waiting(0), 2, **options), 10))
    held = sum(step.held for step in loader.steps.steps)
    assert 0 < held <= 0.01 * 50 * 10
    events = list(read(tmp_path / "log"))
    verdict = next(event for event in events if event["kind"] == "verdict")
    assert (verdict["bound"], verdict["cause"]) == ("input", "load")
    assert verdict["text"].startswith("Input-bound")
    decisions = [event for event in events if event["kind"] == "decision"]
    tried = next(event for event in decisions if event["action"] == "try")
    assert tried["lever"].startswith("num_workers=")
    assert tried["predicted"] > 1.05
    ended = [event for event in decisions if event["action"] in ("keep", "undo")]
    assert ended
    assert all(event["measured"] > 0 and event["reason"] for event in ended)
    assert not any(event["select"] or event["treat"] for event in events if event["kind"] == "settings")


def test_a_verdict_names_no_lever_that_is_on(tmp_path):
    for select in (None, "default"):
        loader = salience.Loader(
            Waiting(0.001),
            2,
            num_workers=1,
            epochs=6,
            auto=True,
            with_ids=True,
            select=select,
            log=tmp_path / f"{select}",
        )
        go(loader, 6)
        verdict = next(event for event in read(tmp_path / f"{select}") if event["kind"] == "verdict")
        assert ('select="default"' in [lever["name"] for lever in verdict["levers"]]) == (select is None)


def test_without_workers_their_number_stays_and_it_says_why(problem, tmp_path):
    loader = salience.Loader(problem, 10, epochs=3, auto=True, log=tmp_path / "log")
    model = make_model()
    for _ in range(3):
        for x, y in loader:
            loader.loss(F.cross_entropy(model(x), y, reduction="none"))
    said = [event for event in read(tmp_path / "log") if event["kind"] == "decision"]
    assert [(event["lever"], event["action"]) for event in said] == [("num_workers", "skip")]
    assert "pass num_workers=1" in said[0]["reason"]


def test_lossy_levers_need_a_baseline_or_leave(problem, tmp_path):
    log = EventLog(tmp_path / "run.jsonl")
    for k in range(4):
        log.emit("evaluated", metric=0.9, progress=k / 3, window=k)
    assert not Auto(True, None, epochs=3).lossy
    assert Auto("lossy", None, epochs=3).lossy
    assert Auto(True, tmp_path, epochs=3).lossy
    assert salience.Loader(problem, 10, epochs=3, auto=True)._run.planning._offered is None
    assert salience.Loader(problem, 10, epochs=3, auto=True, baseline=tmp_path)._run.planning._offered is not None


def test_a_lossy_lever_is_rolled_back_when_the_metric_leaves_the_baselines_band(tmp_path):
    log = EventLog(tmp_path / "run.jsonl")
    for k in range(4):
        log.emit("evaluated", metric=0.9, progress=k / 3, window=k)
    options: dict[str, Any] = {"epochs": 12, "with_ids": True, "auto": True, "baseline": tmp_path}
    loader = salience.Loader(Waiting(0.0002), 5, log=tmp_path / "log", **options)
    go(loader, 12)  # which reports 0.5
    said = [event for event in read(tmp_path / "log") if event["kind"] == "decision" and event["action"] != "skip"]
    assert [event["action"] for event in said] == ["try", "undo"]
    assert "left the baseline's band: 0.5" in said[1]["reason"]
    visits = [event["picked"] for event in read(tmp_path / "log") if event["kind"] == "plan"]
    assert [window for window, count in enumerate(visits) if count < 100] == [said[0]["window"]]


@pytest.mark.parametrize(
    ("auto", "epochs", "said"), [(True, None, "needs epochs="), ("lossi", 3, "'lossy' or the event log")]
)
def test_wrong_arguments_are_said_in_one_sentence(problem, auto, epochs, said):
    with pytest.raises(ConfigError, match=said):
        salience.Loader(problem, 10, epochs=epochs, auto=auto)
