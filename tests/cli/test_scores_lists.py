"""`salience scores RUN --suspects --copies --hard`: what a run found, for people and for programs."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from folders import photos, salience
from PIL import Image

from salience import events
from salience import ledger as ledgers
from salience.app import checkpoint
from salience.cli import main
from salience.ledger import Ledger
from salience.select.findings import save_copies

N, WRONG = 4000, (7, 13, 24, 30, 35)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run over 4,000 samples of two classes, some labels contradicted at every visit, two groups of copies."""
    folder = tmp_path / "run"
    folder.mkdir()
    checkpoint.write(folder, {"classes": ["cat", "dog"]})
    ledgers.save(history(), folder / checkpoint.LEDGER)
    names = [f"{'cat' if i % 2 == 0 else 'dog'}/{i:02}.png".encode() for i in range(N)]
    offsets = np.cumsum([0, *map(len, names)])
    checkpoint.write_names(folder, np.frombuffer(b"".join(names), np.uint8), offsets, np.arange(N))
    group = np.full(N, -1, dtype=np.int32)
    group[[5, 9, 11]], group[[20, 21]] = 0, 1
    save_copies(folder / checkpoint.COPIES, group, np.where(group == 0, np.float32(0.97), np.float32(1)))
    return folder


def history() -> Ledger:
    """An eighth of the labels is wrong, which a model that is sure of all others contradicts, window after window."""
    ledger = Ledger(N)
    wrong = np.isin(np.arange(N) % 40, WRONG)
    ledger.course[:] = [(0.3 - 0.02 * k, 0.125, N / 3, 0.0) for k in range(9)]
    ledger.set_labels(np.arange(N) % 2)
    ledger.seen[:] = ledger.trained[:] = 10
    ledger.right[:] = np.where(wrong, 0, 10)
    ledger.guess[:] = ledger.vote[:, 0] = np.where(wrong, 1 - ledger.label, ledger.label)
    ledger.vote[:, 1] = 1 - ledger.vote[:, 0]
    ledger.vote_p[:, 0], ledger.vote_p[:, 1] = 0.97, 0.03
    ledger.confidence[:] = np.where(wrong, 0.03, 0.97)
    ledger.mean_loss[:] = np.where(wrong, 6, 0.1)
    ledger.mean_loss[12], ledger.right[12], ledger.forgotten[12] = 1.25, 6, 2
    return ledger


def said(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    assert main(["scores", *map(str, args)]) == 0
    return capsys.readouterr().out


def test_each_list_has_its_verdict_and_rows_with_files_and_classes(run: Path, capsys: pytest.CaptureFixture[str]):
    out = said(capsys, run, "--suspects", "--copies", "--hard", "--top", 3).splitlines()
    assert out[:2] == [
        "500 of 4,000 labels look wrong; about 500 of them probably are.",
        "The 3 most certain:",
    ]
    rows = [line.split(maxsplit=4) for line in out[4:7]]
    assert {(row[0], row[2], row[3]) for row in rows} == {
        ("7", "dog", "dog/07.png"), ("13", "dog", "dog/13.png"), ("24", "cat", "cat/24.png"),
    }  # fmt: skip
    first = next(row for row in rows if row[0] == "7")
    assert first[4].startswith("the model says cat with p 0.97; it gave the label at 0 of 10 visits")
    assert "3 samples could be represented by a near-copy (2 groups)." in out
    assert "The 2 largest:" in out
    assert any("dog/05.png" in line and "9, 11" in line and "features agree to 0.97" in line for line in out)
    assert any("cat/20.png" in line and "byte-identical" in line for line in out)
    hardest = out[out.index("The 3 hardest:") + 3]
    assert "cat/12.png" in hardest
    assert "mean loss 1.2, right at 6 of 10 visits, forgotten 2 times" in hardest


def test_rows_are_aligned(run: Path, capsys: pytest.CaptureFixture[str]):
    table = said(capsys, run, "--suspects", "--top", 3).splitlines()[3:]
    assert len({line.index(word) for line, word in zip(table, ("why", *["the model"] * 3), strict=True)}) == 1


def test_a_lone_ledger_has_no_names_and_a_run_may_have_looked_for_no_copies(
    run: Path, capsys: pytest.CaptureFixture[str]
):
    out = said(capsys, run / checkpoint.LEDGER, "--suspects", "--copies")
    assert "the model says class 0 with" in out
    assert ".png" not in out
    assert "Near-copies were not looked for in this run." in out


def test_json_is_one_object_and_takes_every_list_when_none_is_named(run: Path, capsys: pytest.CaptureFixture[str]):
    found = json.loads(said(capsys, run, "--json"))
    assert (found["samples"], found["suspected"], found["groups"], found["spare"]) == (4000, 500, 2, 3)
    assert {row["id"] % 40 for row in found["suspects"]["rows"]} == set(WRONG)
    assert found["copies"]["rows"][0]["member_files"] == ["dog/05.png", "dog/09.png", "dog/11.png"]
    assert found["hard"]["rows"][0]["label_name"] == "cat"
    assert all(0 <= row["confidence"] <= 1 for name in ("suspects", "copies", "hard") for row in found[name]["rows"])
    assert "hard" not in json.loads(said(capsys, run, "--json", "--suspects"))


def test_lists_go_to_a_csv_file_whole_with_top_zero(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = said(capsys, run, "--suspects", "--hard", "--top", 0, "-o", tmp_path / "found.csv")
    assert "4,000 rows written to" in out
    with (tmp_path / "found.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["list"] for row in rows] == ["suspects"] * 500 + ["hard"] * 3500
    assert sorted(int(row["id"]) for row in rows) == list(range(N))
    assert rows[0]["file"] == f"{rows[0]['label_name']}/{int(rows[0]['id']):02}.png"


def test_without_a_flag_a_run_is_shown(run: Path, capsys: pytest.CaptureFixture[str]):
    shown = said(capsys, "show", run)
    assert said(capsys, run) == shown
    assert "of samples  of visits" in shown
    assert "4,000 of 4,000 samples seen" in shown


def test_a_run_without_logits_or_losses_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    ledgers.save(Ledger(4), tmp_path / "empty.npz")
    out = said(capsys, tmp_path / "empty.npz", "--suspects", "--hard")
    assert "No label can be judged: give loader.loss() logits and integer targets." in out
    assert "No losses were recorded" in out


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["run", "other"], "takes no 'other'"),
        (["run", "--hard", "--top", "-1"], "--top is -1"),
        (["merge", "run", "--hard", "-o", "x"], "takes no '--hard'"),
        (["show", "run", "--hard"], "takes no '--hard'"),
        (["missing", "--hard"], "There is no ledger at 'missing'"),
        (["run", "--hard", "-o", "nowhere/x.csv"], "cannot be written: No such file"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(
    args: list[str], sentence: str, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(run.parent)
    assert main(["scores", *args]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert sentence in lines[0]


@pytest.mark.parametrize(
    ("args", "missing"), [(["show"], "RUN"), (["export", "run"], "-o/--output"), (["merge", "run"], "-o/--output")]
)
def test_what_an_action_lacks_is_named(args: list[str], missing: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        main(["scores", *args])
    assert end.value.code == 2
    assert f"the following arguments are required: {missing}" in capsys.readouterr().err


def test_a_run_called_like_an_action_is_written_with_its_folder(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(run.parent)
    run.rename("show")
    assert said(capsys, "./show") == said(capsys, "show", "show")
    assert said(capsys, "list", "show", "--hard") == said(capsys, "--hard", "./show")


def test_names_and_copies_of_another_run_are_refused(run: Path, capsys: pytest.CaptureFixture[str]):
    ledgers.save(Ledger(4), run / checkpoint.LEDGER)
    assert main(["scores", str(run), "--hard"]) == 2
    assert "they belong to different runs" in capsys.readouterr().err
    (run / checkpoint.COPIES).unlink()
    assert main(["scores", str(run), "--hard"]) == 2
    assert "names 4000 samples, not 4" in capsys.readouterr().err


def test_a_trained_run_names_the_files_and_its_log_has_the_findings_once(tmp_path: Path):
    data = photos(tmp_path / "data")
    Image.open(data / "0" / sorted(path.name for path in (data / "0").iterdir())[0]).save(data / "1" / "stray.png")
    given = ("--data", data, "--model", "cnn", "--epochs", 2, "--workers", 0, "--batch-size", 8, "--device", "cpu")
    trained = salience("train", *given, "--out", "out", cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    told = salience("scores", "out", "--hard", "--json", "--top", 0, cwd=tmp_path)
    assert (told.returncode, told.stderr) == (0, "")
    rows = json.loads(told.stdout)["hard"]["rows"]
    assert all(row["file"].startswith(f"{row['label_name']}/") for row in rows)
    assert all((data / row["file"]).is_file() for row in rows)
    found = [event for event in events.read(tmp_path / "out" / "run.jsonl") if event["kind"] == "findings"]
    assert len(found) == 1
    assert [row["id"] for row in found[0]["hard"]] == [row["id"] for row in rows[:24]]
    assert all(row["reason"] and row["confidence"] is None for row in found[0]["hard"]), "two epochs judge no label"
