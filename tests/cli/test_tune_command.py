"""`salience tune` tries settings over one feed, stops the worse ones, and compares those that came to the end."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from folders import photos, salience

from salience.cli import main, parse, searching
from salience.cli.tune import trials_of

from conftest import require


def parsed(*words: str) -> argparse.Namespace:
    args, unknown = parse(["tune", *words])
    assert not unknown
    return args


def test_every_combination_with_every_seed_is_a_run_in_its_own_folder() -> None:
    found = trials_of(parsed("--data", "x", "--lr", "0.1,0.4", "--model", "mlp,cnn", "--seeds", "2", "--out", "o"))
    assert [name for name, _ in found][:3] == ["lr0.1-mlp-seed0", "lr0.1-mlp-seed1", "lr0.4-mlp-seed0"] or [
        name for name, _ in found
    ][:3] == ["mlp-lr0.1-seed0", "mlp-lr0.1-seed1", "mlp-lr0.4-seed0"]
    assert len(found) == len({config.out for _, config in found}) == 8
    assert {(config.lr, config.model, config.seed) for _, config in found} == {
        (lr, model, seed) for lr in (0.1, 0.4) for model in ("mlp", "cnn") for seed in (0, 1)
    }


def test_without_a_list_there_is_one_trial() -> None:
    [(name, config)] = trials_of(parsed("--data", "x", "--select", "default"))
    assert name == "seed0"
    assert config.select == "default"
    assert config.workers == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--lr", "0.1"], "There is nothing to train on"),
        (["--data", "x", "--lr", "0.1,x"], "--lr is '0.1,x'; it must be numbers, separated by commas"),
        (["--data", "x", "--batch-size", "8,8"], "names a value twice"),
        (["--data", "x", "--seeds", "0"], "--seeds is 0; it must be at least 1"),
        (["--data", "x", "--lr", "0.1,-1"], "train.lr is -1.0"),
        (["--data", "x", "--resume"], "takes no '--resume'"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", *words]) == 2
    assert said in capsys.readouterr().err


def test_without_ray_the_extra_is_named(tmp_path: Path) -> None:
    code = "import sys; sys.modules['ray'] = None; from salience.cli import main; sys.exit(main(sys.argv[1:]))"
    words = [sys.executable, "-c", code, "tune", "--data", str(tmp_path), "--lr", "0.1,0.2"]
    found = subprocess.run(words, capture_output=True, text=True, check=False)
    assert found.returncode == 2
    assert found.stderr.strip().endswith(
        "`salience tune` needs 'ray', which is not installed: pip install 'salience[ray]'"
    )


def test_the_table_has_the_furthest_and_best_trial_first() -> None:
    rows = {name: searching.Row() for name in ("a", "b", "c", "d")}
    for name, epochs in {"a": [0.9], "b": [0.5, 0.8], "c": [0.6, 0.5]}.items():
        for epoch, accuracy in enumerate(epochs):
            rows[name].told({
                "training_iteration": epoch + 1, "accuracy": accuracy, "visits": 10, "knowledge": "", "time_total_s": 1,
            })  # fmt: skip
    lines = searching.as_table(rows).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["b", "c", "a", "d"]
    assert lines[2].split() == ["c", "running", "2", "50.0%", "60.0%", "10", "1.0"]
    assert lines[4].split() == ["d", "waiting", "0", "0", "0.0"]


@pytest.fixture
def feeds(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="sf") as folder:
        monkeypatch.setenv("SALIENCE_FEEDS", folder)
        yield Path(folder)


@pytest.mark.slow
def test_a_search_shares_a_feed_and_a_ledger_and_says_how_the_trials_compare(tmp_path: Path, feeds: Path) -> None:
    require(importlib.util.find_spec("ray") is not None, "ray")
    data = photos(tmp_path / "photos")
    words = ["--data", data, "--model", "mlp", "--epochs", 2, "--batch-size", 8, "--device", "cpu", "--lr", "0.01,0.1"]
    done = salience("tune", *words, "--all", "--select", "default", "--ledger", "share", "--out", "o", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "2 of 2 trials were trained to the end" in done.stdout
    assert "Every trial started from the same shared ledger" in done.stdout
    assert "lr0.1 against lr0.01: Accuracy" in done.stdout
    assert not list(feeds.glob("*.sock"))
    for name in ("lr0.01", "lr0.1"):
        assert (tmp_path / "o" / name / "ledger.npz").exists()
        started = json.loads((tmp_path / "o" / name / "run.jsonl").read_text().splitlines()[0])
        assert started["knowledge"] not in ("", "nothing")
    again = salience("tune", *words, "--out", "o", cwd=tmp_path)
    assert again.returncode == 2
    assert "already holds a run; choose another --out" in again.stderr
    stopped = salience("tune", *words, "--seeds", 2, "--at-once", 1, "--out", "p", cwd=tmp_path)
    assert stopped.returncode == 0, stopped.stderr
    assert "stopped" in stopped.stdout
    finished = [path.parent.name for path in tmp_path.glob("p/*/ledger.npz")]
    assert 0 < len(finished) < 4
    assert os.path.exists(tmp_path / "p" / "lr0.01-seed0" / "console.txt")
