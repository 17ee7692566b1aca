"""`salience scores compare` and `history`: text, JSON and a page, and one sentence where something is missing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from salience import ledger as ledgers
from salience.app import checkpoint
from salience.cli import main
from salience.ledger import Ledger, history

N = 60
WRONG = np.arange(N) < 6


def run(folder: Path, seed: int, *, windows: int = 3) -> Path:
    """The folder of a run: losses of the wrong labels stay, those of others come down."""
    folder.mkdir()
    ledger, kept = Ledger(N), history.History(N)
    rng = np.random.default_rng(seed)
    for window in range(windows):
        losses = np.where(WRONG, 3, np.linspace(0.5, 2, N) / (window + 1)) + 0.05 * rng.random(N)
        ledger.record(np.arange(N), {"loss": losses.astype(np.float32)}, window=window)
        kept.note(ledger, window)
    ledgers.save(ledger, folder / checkpoint.LEDGER)
    history.save(kept, folder / checkpoint.HISTORY)
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    return [str(run(tmp_path / name, seed)) for seed, name in enumerate(("a", "b"))]


@pytest.fixture
def wrong(tmp_path: Path) -> str:
    file = tmp_path / "wrong.txt"
    file.write_text("\n".join(str(i) for i in np.flatnonzero(WRONG)))
    return str(file)


def test_compare_says_whether_importance_is_of_the_data_and_writes_a_page(runs, wrong, tmp_path, capsys):
    page = tmp_path / "agree.html"
    assert main(["scores", "compare", *runs, "--wrong", wrong, "-o", str(page)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("Importance is a property mainly of the data here: over 60 samples")
    assert "AUROC of 1.000 by all networks together" in said
    assert "a / b" in said
    assert "Overlap of the hardest" in page.read_text()


def test_compare_as_json_has_every_pair(runs, capsys):
    assert main(["scores", "compare", *runs, runs[0], "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(one["a"], one["b"]) for one in found["pairs"]] == [("a (1)", "b"), ("a (1)", "a (2)"), ("b", "a (2)")]
    assert found["pairs"][1]["correlations"]["ema_loss"] == pytest.approx(1)


def test_history_shows_the_groups_side_by_side_and_what_separates(runs, wrong, tmp_path, capsys):
    page = tmp_path / "history.html"
    assert main(["scores", "history", runs[0], "--wrong", wrong, "-o", str(page)]) == 0
    said = capsys.readouterr().out
    assert "6 wrong, 5 hard, 27 easy" in said
    assert "AUROC 1.00" in said
    assert "What separates" in page.read_text()
    assert main(["scores", "history", runs[0], "--wrong", wrong, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["course"]["loss"]["wrong"][-1] == pytest.approx(3, abs=0.1)
    assert found["separation"]["loss"][-1] == pytest.approx(1)


def test_history_without_suspects_says_that_there_is_nothing_to_tell_apart(runs, capsys):
    assert main(["scores", "history", runs[0]]) == 0
    said = capsys.readouterr().out
    assert "None is suspected" in said
    assert "loss hard" in said
    assert "loss suspected" not in said


def test_history_says_why_a_class_lost_its_share_of_the_visits(runs, tmp_path, capsys):
    kept = ledgers.load(Path(runs[0]) / checkpoint.LEDGER)
    learnt = np.arange(N) < N // 2
    kept.set_labels(np.where(learnt, 0, 1))
    kept.confidence[:] = np.where(learnt, 0.95, 0.4)
    kept.trained[:] = np.where(learnt, 1, 4)
    ledgers.save(kept, Path(runs[0]) / checkpoint.LEDGER)
    page = tmp_path / "history.html"
    assert main(["scores", "history", runs[0], "-o", str(page)]) == 0
    said = capsys.readouterr().out
    lost = next(line for line in said.splitlines() if line.strip().startswith("class 0"))
    assert "50%" in lost
    assert "visited 0.4x its share" in lost
    assert lost.endswith("100% of it is learnt (p(label) over 0.9) against 50%")
    assert "Classes that gained or lost visits" in page.read_text()


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["compare", "{0}"], "nothing to compare"),
        (["compare", "{0}", "{1}", "--wrong", "{0}"], "cannot be read"),
        (["history", "{0}", "--history", "nowhere.npz"], "There is no 'nowhere.npz'"),
        (["history", "{0}", "-o", "x.png"], "ends in .html"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_sentence(args, says, runs, capsys):
    assert main(["scores", *(arg.format(*runs) for arg in args)]) != 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert says in lines[0]
