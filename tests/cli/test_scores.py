"""`salience scores` shows, exports and merges what runs learnt."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from folders import photos

from salience import ledger as ledgers
from salience.app import checkpoint
from salience.cli import main
from salience.cli.scores import CHUNK_ROWS, write_csv
from salience.ledger import COLUMNS, Ledger


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run over six samples of two classes."""
    folder = tmp_path / "run"
    folder.mkdir()
    checkpoint.write(folder, {"classes": ["cat", "dog"]})
    ledgers.save(small(1.0), folder / checkpoint.LEDGER)
    return folder


def small(loss: float) -> Ledger:
    ledger = Ledger(6)
    ledger.set_labels([0, 0, 0, 1, 1, 1])
    logits = torch.tensor([[2.0, 1.0]] * 5)
    recorder = ledgers.Recorder(ledger)
    recorder.record(np.arange(5), torch.full((5,), loss), logits, torch.tensor([0, 0, 0, 1, 1]), window=0)
    recorder.flush()
    return ledger


def sentence(capsys: pytest.CaptureFixture[str]) -> str:
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def test_show_says_what_was_learnt_with_the_names_of_the_classes(run: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["scores", "show", str(run)]) == 0
    said = capsys.readouterr().out
    assert "5 of 6 samples seen" in said
    assert "labelled dog, model says cat" in said
    assert main(["scores", "show", str(run / checkpoint.LEDGER), "--epochs", "20"]) == 0
    said = capsys.readouterr().out
    assert "labelled 1, model says 0" in said  # a lone ledger knows no names
    assert "over 20 epochs" in said


def test_show_agrees_with_the_run_on_its_length_and_on_what_was_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    given = [f"--data={photos(tmp_path / 'data')}", "--model=mlp", "--batch-size=4", "--workers=0"]
    for name, epochs, more in (("all", 3, ()), ("less", 8, ("--select=default",))):
        assert main(["train", *given, f"--epochs={epochs}", f"--out={tmp_path / name}", *more]) == 0
    capsys.readouterr()
    assert main(["scores", "show", str(tmp_path / "all")]) == 0
    assert "Forecast: over 3 epochs selection would" in capsys.readouterr().out
    assert main(["report", str(tmp_path / "less")]) == 0
    [saved] = re.findall(r"Over 8 epochs, selection made .*?\)\.", capsys.readouterr().out)
    assert main(["scores", "show", str(tmp_path / "less")]) == 0
    said = capsys.readouterr().out
    assert saved in said
    assert "Forecast" not in said


def test_export_writes_every_column_without_loss(run: Path, tmp_path: Path):
    assert main(["scores", "export", str(run), "-o", str(tmp_path / "out.csv")]) == 0
    with (tmp_path / "out.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["id", *COLUMNS]
    assert [row["id"] for row in rows] == list("012345")
    assert rows[5]["mean_loss"] == ""
    ledger = ledgers.load(run / checkpoint.LEDGER)
    for name in COLUMNS:
        read = np.array([row[name] or "nan" for row in rows], dtype=np.float64).astype(COLUMNS[name].dtype)
        assert np.array_equal(read, ledger[name], equal_nan=True), name


def test_export_of_many_samples_numbers_them_all(tmp_path: Path):
    write_csv(Ledger(CHUNK_ROWS + 3), tmp_path / "many.csv")
    lines = (tmp_path / "many.csv").read_text().splitlines()
    assert [line.partition(",")[0] for line in lines[1:]] == [str(i) for i in range(CHUNK_ROWS + 3)]


def test_merged_ledgers_vote(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    ledgers.save(small(3.0), tmp_path / "b.npz")
    assert main(["scores", "merge", str(run), str(tmp_path / "b.npz"), "-o", str(tmp_path / "both.npz")]) == 0
    assert "2 ledgers over 6 samples" in capsys.readouterr().out
    both = ledgers.load(tmp_path / "both.npz")
    assert both.mean_loss[:5].tolist() == [2.0] * 5
    assert both.seen.tolist() == [2, 2, 2, 2, 2, 0]


def test_what_cannot_be_read_or_written_is_said(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    ledgers.save(Ledger(7), tmp_path / "other.npz")
    (tmp_path / "half.npz").write_bytes((tmp_path / "other.npz").read_bytes()[:200])
    (tmp_path / "empty").mkdir()
    out = str(tmp_path / "out")
    for given, said in (
        (["show", str(tmp_path / "missing.npz")], "There is no ledger at"),
        (["show", str(tmp_path / "half.npz")], "is damaged or not a ledger"),
        (["show", str(tmp_path / "empty")], "holds no ledger.npz"),
        (["merge", str(run), str(tmp_path / "other.npz"), "-o", out], "must come from the same data set"),
        (["export", str(run), "-o", str(tmp_path / "nowhere" / "out.csv")], "cannot be written: No such file"),
        (["merge", str(run), "-o", str(tmp_path / "half.npz" / "out.npz")], "cannot be written: "),
    ):
        assert main(["scores", *given]) == 2
        assert said in sentence(capsys)
    assert not Path(out).exists()
