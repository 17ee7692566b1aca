"""`salience train` trains, says what came out, and loses nothing to a kill or to bad input."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from folders import COMMAND, photos, salience, serving

from salience import events
from salience import ledger as ledgers
from salience.app import checkpoint
from salience.app.data import held_out
from salience.cli import main
from salience.config import TrainConfig
from salience.errors import StateError

FACTORY = '''
"""A model that ends its own process by a signal at a given training step."""
import os, signal
from torch import nn

class Model(nn.Module):
    steps = 0

    def __init__(self, classes, size):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(3 * size * size, 16), nn.Dropout(0.2), nn.Linear(16, classes))

    def forward(self, x):
        name, _, step = os.environ.get("END_BY", "").partition(":")
        self.steps += self.training
        if name and self.steps == int(step):
            os.kill(os.getpid(), signal.Signals[name])
        return self.body(x)
'''


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with images, a model of its own, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "ending.py").write_text(FACTORY)
    photos(tmp_path / "data")
    return tmp_path


def options(**changes: Any) -> list[str]:
    given = {"data": "data", "model": "mlp", "epochs": 2, "batch-size": 8, "workers": 0, "out": "out", **changes}
    return ["train", *(f"--{name}={value}" for name, value in given.items() if value is not None)]


def parameters(out: str = "out") -> dict[str, torch.Tensor]:
    return checkpoint.read(Path(out) / checkpoint.LAST)["model"]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def sentence(capsys: pytest.CaptureFixture[str]) -> str:
    """What the failed command said: one line on stderr."""
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


# ---------------------------------------------------------------- training


def test_a_folder_is_trained_on_and_the_result_shown(capsys: pytest.CaptureFixture[str]):
    before = torch.get_rng_state()
    assert main(options()) == 0
    assert torch.equal(torch.get_rng_state(), before)
    said = capsys.readouterr().out
    assert "epoch   2/2" in said
    assert "observe" in said
    assert "Forecast:" in said
    assert "data/" not in said  # names are below the folder
    assert ".png" in said  # and the hardest samples are named by their files
    left = ["copies.npz", "history.npz", "last.pt", "ledger.npz", "names.npz", "previous.pt", "run.jsonl"]
    assert sorted(path.name for path in Path("out").iterdir()) == left
    kinds = [event["kind"] for event in events.read("out/run.jsonl")]
    first = ["run", "plan", "feed", "window", "evaluated", "copies"]
    assert kinds == [*first, "plan", "feed", "window", "findings", "evaluated", "observed"]
    assert ledgers.load("out/ledger.npz").seen.tolist() == [2] * 44  # 48 less one of the 12 of each class


def test_a_packed_archive_with_splits_is_trained_on_with_selection(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    photos(tmp_path / "packed" / "train")
    photos(tmp_path / "packed" / "test", 16)
    with tarfile.open("data.tar.gz", "w:gz") as archive:
        archive.add("packed", "packed")
    assert main(options(data="data.tar.gz", select="default", epochs=5)) == 0
    said = capsys.readouterr().out
    assert "48 images of 4 classes, tested on 16" in said
    visits = int(ledgers.load("out/ledger.npz").seen.sum())
    assert visits < 5 * 48
    assert f"{visits:,}" in said


def test_what_pack_wrote_is_trained_on_with_a_cache_and_kept_images(capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("xxhash")
    assert main(["pack", "data", "shards"]) == 0
    given = options(data="shards", cache="1MiB", treat="reuse", epochs=4)
    assert main(given) == 0
    said = capsys.readouterr().out
    assert "44 images of 4 classes, tested on 4" in said
    last = {event["kind"]: event for event in events.read("out/run.jsonl")}
    assert last["feed"]["cache"]
    assert last["treat"]["treatment"] == "reuse"
    before = parameters()
    assert main([*given, "--out", "fresh", "--cache", "", "--treat", ""]) == 0
    assert same(parameters("fresh"), before)  # what is kept are decoded images: crops and flips are drawn anew


def test_data_over_http_is_trained_on(capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("obstore")
    pytest.importorskip("xxhash")
    assert main(["pack", "data", "shards"]) == 0
    with serving(Path("shards")) as url:
        assert main(options(data=url, cache="1MiB", epochs=1)) == 0
    assert "44 images of 4 classes, tested on 4" in capsys.readouterr().out
    assert checkpoint.read(Path("out/last.pt"))["config"]["data"] == url


def test_every_tenth_of_each_class_is_held_out_and_one_of_a_small_class():
    labels = np.repeat([0, 1, 2, 3], [25, 3, 1, 10])
    held = held_out(labels)
    assert np.flatnonzero(held).tolist() == [9, 19, 27, 38]
    mixed = np.random.default_rng(0).permutation(labels)
    assert np.bincount(mixed[held_out(mixed)], minlength=4).tolist() == [2, 1, 0, 1]


def test_every_setting_is_an_option():
    assert all(field.metadata["help"] for field in fields(TrainConfig))


def test_the_command_line_wins_over_the_settings_file(tmp_path: Path):
    (tmp_path / "run.toml").write_text(
        "[train]\ndata = 'data'\nmodel = 'mlp'\nepochs = 3\nworkers = 0\nout = 'elsewhere'\nbatch_size = 16\n"
        "[select]\nkeep = 0.5\nfilters = []\n"
    )
    assert main(["train", "--config", "run.toml", "--epochs", "2", "--out", "out"]) == 0
    saved = checkpoint.read(Path("out/last.pt"))["config"]
    assert (saved["epochs"], saved["batch_size"], saved["lr"]) == (2, 16, 0.0125)
    run = next(event for event in events.read("out/run.jsonl") if event["kind"] == "run")
    assert run["select"]["keep"] == {"name": "constant", "share": 0.5}
    assert main(["train", "--config", "run.toml", "--epochs", "2", "--out", "all", "--select", "uniform"]) == 0
    run = next(event for event in events.read("all/run.jsonl") if event["kind"] == "run")
    assert run["select"]["filters"] == []


def test_a_run_starts_from_what_another_learnt(capsys: pytest.CaptureFixture[str]):
    assert main(options()) == 0
    assert main(options(out="warm", ledger="out", epochs=1)) == 0
    assert ledgers.load("warm/ledger.npz").seen.tolist() == [3] * 44
    photos(Path("other"), classes=3)
    capsys.readouterr()
    assert main(options(data="other", out="no", ledger="out")) == 2
    assert "ledger" in sentence(capsys)


# ---------------------------------------------------------------- killed, interrupted, resumed


@pytest.mark.parametrize("select", [None, "default"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_killed_run_ends_with_the_parameters_of_one_never_stopped(place: Path, workers: int, select: str | None):
    given = options(model="ending:Model", epochs=4, select=select, workers=workers, **{"checkpoint-every": 2})
    # The first epoch has six batches, or five whole ones.
    killed = salience(*given, cwd=place, END_BY="SIGKILL:8" if select else "SIGKILL:9")
    assert killed.returncode == -signal.SIGKILL
    left = checkpoint.read(Path("out/last.pt"))["loader"]["course"]
    assert (left["window"], left["delivered"]) == (1, [0, 1])
    assert main(["train", "--resume", "--out", "out", "--model", "ending:Model"]) == 0
    assert main([*given, "--out", "whole"]) == 0
    assert same(parameters("out"), parameters("whole"))
    resumed, whole = ledgers.load("out/ledger.npz"), ledgers.load("whole/ledger.npz")
    assert all(np.array_equal(resumed[name], whole[name], equal_nan=True) for name in whole)
    evaluations = checkpoint.read(Path("out/last.pt"))["tally"]["accuracies"]
    assert evaluations == checkpoint.read(Path("whole/last.pt"))["tally"]["accuracies"]


def test_ctrl_c_says_how_to_go_on(place: Path):
    given = options(model="ending:Model", workers=2)
    stopped = salience(*given, cwd=place, END_BY="SIGINT:8")
    assert stopped.returncode == 130
    assert stopped.stderr.splitlines() == [
        "salience: interrupted; continue from the last checkpoint with: salience train --resume --out out --model ending:Model"
    ]
    early = salience(*given, "--out", "early", cwd=place, END_BY="SIGINT:2")
    assert early.returncode == 130
    assert "before the first checkpoint" in early.stderr


def test_a_checkpoint_alone_imports_no_code(place: Path, capsys: pytest.CaptureFixture[str]):
    (place / "mine.py").write_text(
        "from torch import nn\n\ndef model(classes, size):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(3 * size * size, classes))\n"
    )
    assert main(options(model="mine:model")) == 0
    (place / "mine.py").write_text("raise SystemExit('this code was run')\n")
    sys.modules.pop("mine")
    capsys.readouterr()
    assert main(["train", "--resume", "--out", "out"]) == 2
    assert "names the model 'mine:model', which is code to import" in sentence(capsys)
    for asked in (["--trust"], ["--model", "mine:model"]):
        with pytest.raises(SystemExit, match="this code was run"):
            main(["train", "--resume", "--out", "out", *asked])


def test_two_runs_in_one_folder_are_refused_with_the_number_of_the_other(place: Path):
    (place / "waiting.py").write_text(
        "import time\nfrom pathlib import Path\n\ndef model(classes, size):\n"
        "    Path('begun').touch()\n    time.sleep(60)\n"
    )
    with subprocess.Popen([COMMAND, *options(model="waiting:model")], stdout=subprocess.DEVNULL, cwd=place) as other:
        try:
            while not Path("begun").exists():
                assert other.poll() is None
                time.sleep(0.05)
            refused = salience(*options(), cwd=place)
        finally:
            other.kill()
    assert refused.returncode == 2
    assert refused.stderr == (
        f"salience: Another run (process {other.pid}) is writing to 'out'; let it end, or choose another --out.\n"
    )
    assert main(options()) == 0  # what a killed run left is no obstacle
    assert not Path("out/lock").exists()


def test_names_never_steer_the_terminal(place: Path, capsys: pytest.CaptureFixture[str]):
    odd = "\x1b[31mred\x07" + os.fsdecode(b"\xff")
    Path("data/2").rename(place / "data" / odd)
    assert main(options()) == 0
    assert main(["report", "out", "-o", "report.html"]) == 0
    assert main(["scores", "out", "--hard", "-o", "hard.csv"]) == 0
    assert main(["scores", "out", "--hard", "--json"]) == 0
    for written in ("report.html", "hard.csv"):
        assert "\\udcff" in Path(written).read_text()
    assert "\x1b" not in Path("report.html").read_text()
    (image, *_) = sorted((place / "data" / odd).glob("*.png"))
    image.write_bytes(b"no image")
    assert main(options(out="broken")) == 2
    said = "".join(capsys.readouterr())
    assert "\\x1b[31mred\\x07" in said
    assert not set(said) & {chr(i) for i in (*range(9), *range(11, 32), 127)}
    said.encode()


def test_a_finished_run_resumed_shows_its_result_again(capsys: pytest.CaptureFixture[str]):
    assert main(options()) == 0
    before = Path("out/last.pt").read_bytes()
    capsys.readouterr()
    assert main(["train", "--resume", "--out", "out"]) == 0
    assert "accuracy" in capsys.readouterr().out
    assert Path("out/last.pt").read_bytes() == before


@pytest.mark.parametrize("left", [0, 0.5, 0.99])
def test_a_half_written_checkpoint_is_said_and_the_one_before_used(left: float, capsys: pytest.CaptureFixture[str]):
    assert main(options()) == 0
    whole, last = parameters(), Path("out/last.pt")
    data = last.read_bytes()
    last.write_bytes(data[: int(left * len(data))])
    capsys.readouterr()
    assert main(["train", "--resume", "--out", "out"]) == 0
    said = capsys.readouterr().out.splitlines()[0]
    assert said == (
        "The checkpoint 'out/last.pt' is damaged or half-written. It is kept as last.pt.damaged; continuing from "
        "previous.pt, the previous checkpoint."
    )
    assert same(parameters(), whole)


def test_without_a_whole_checkpoint_nothing_is_resumed(capsys: pytest.CaptureFixture[str]):
    assert main([*options(), "--resume"]) == 2
    assert "There is no checkpoint in 'out'" in sentence(capsys)
    Path("out").mkdir()
    Path("out/last.pt").write_bytes(b"PK")
    assert main([*options(), "--resume"]) == 2
    assert "damaged" in sentence(capsys)
    torch.save({"weights": torch.zeros(3)}, "out/last.pt")
    assert main([*options(), "--resume"]) == 2
    assert "is not a checkpoint of salience train" in sentence(capsys)


def test_a_failed_write_leaves_the_checkpoint_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    checkpoint.write(tmp_path, {"number": 1})

    def full_disk(state: object, file: Any) -> None:
        """A full disk cannot be had otherwise."""
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(StateError, match="No space left on device"):
        checkpoint.write(tmp_path, {"number": 2})
    assert checkpoint.newest(tmp_path, pytest.fail)["number"] == 1
    assert not (tmp_path / checkpoint.PART).exists()


# ---------------------------------------------------------------- bad input


def test_a_run_already_there_is_not_overwritten(capsys: pytest.CaptureFixture[str]):
    assert main(options(epochs=1)) == 0
    before = {path: path.read_bytes() for path in Path("out").iterdir()}
    capsys.readouterr()
    assert main(options(epochs=1)) == 2
    assert "already holds a run" in sentence(capsys)
    assert {path: path.read_bytes() for path in Path("out").iterdir()} == before


def test_a_checkpoint_of_other_data_or_settings_is_refused(capsys: pytest.CaptureFixture[str]):
    assert main(options()) == 0
    before = Path("out/last.pt").read_bytes()
    capsys.readouterr()
    photos(Path("birds"), prefix="bird-")
    assert main([*options(data="birds"), "--resume"]) == 2
    assert "has other data: classes '0', '1', '2', '3' there, 'bird-0'" in sentence(capsys)
    (Path("data/0") / "new.png").write_bytes(next(Path("data/0").glob("*.png")).read_bytes())
    assert main(["train", "--resume", "--out", "out"]) == 2
    assert "was made from other images" in sentence(capsys)
    (Path("data/0") / "new.png").unlink()
    assert main([*options(epochs=3), "--resume"]) == 2
    assert "was made with epochs 2, now it is 3" in sentence(capsys)
    assert main([*options(select="default"), "--resume"]) == 2
    assert "resume with the same select" in sentence(capsys)
    assert Path("out/last.pt").read_bytes() == before


@pytest.mark.parametrize("workers", [0, 2])
def test_an_unreadable_image_stops_the_run_with_its_name_and_loses_nothing(place: Path, workers: int):
    given = options(model="ending:Model", workers=workers)
    assert salience(*given, cwd=place, END_BY="SIGKILL:8").returncode == -signal.SIGKILL
    before = Path("out/last.pt").read_bytes()
    for broken in Path("data/2").glob("*.png"):
        broken.write_bytes(b"no image")
    stopped = salience(*given, "--resume", cwd=place)
    assert stopped.returncode == 2
    assert len(stopped.stderr.splitlines()) == 1
    assert "samples are broken, more than max_broken = 0.01" in stopped.stderr
    assert "'2/" in stopped.stderr
    assert "cannot identify it as an image" in stopped.stderr
    assert Path("out/last.pt").read_bytes() == before


def test_a_broken_image_is_named_and_stood_in_for(capsys: pytest.CaptureFixture[str]):
    broken = sorted(Path("data/2").glob("*.png"))[0]
    broken.write_bytes(b"no image")
    assert main([*options(), "--max-broken", "0.1"]) == 0
    said = capsys.readouterr().out
    assert said.count("is broken and was replaced by another") == 1
    assert f"image '2/{broken.name}'" in said


def test_a_broken_test_image_stops_the_run_with_its_name(capsys: pytest.CaptureFixture[str]):
    held = sorted(Path("data/2").glob("*.png"))[9]  # every tenth
    held.write_bytes(b"no image")
    assert main([*options(), "--max-broken", "0.1"]) == 2
    assert f"image '2/{held.name}' of {Path('data').resolve()} cannot be read" in sentence(capsys)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"epochs": 0}, "train.epochs is 0; it must be at least 1."),
        ({"batch-size": -1}, "train.batch_size is -1"),
        ({"model": "resnt9"}, "Did you mean 'resnet9'"),
        ({"model": "ending:Modle"}, "Did you mean 'Model'"),
        ({"model": "nowhere:Model"}, "module 'nowhere' of model 'nowhere:Model' cannot be imported"),
        ({"select": "defualt"}, "Did you mean 'default'"),
        ({"select": "missing.toml"}, "'missing.toml' cannot be read"),
        ({"treat": "reus"}, "Did you mean 'reuse'"),
        ({"cache": "4 apples"}, "is not a size"),
        ({"data": None}, "There is nothing to train on"),
        ({"data": "missing"}, "there is no file or folder"),
        ({"data": "empty"}, "is empty; make a folder for each class"),
        ({"data": "single"}, "there is none to hold out"),
        ({"data": "ending.py"}, "is not a tar archive"),
        ({"device": "cude"}, "There is no device 'cude' here"),
        ({"out": "ending.py/out"}, "cannot be made or written to: Not a directory"),
        ({"ledger": "missing.npz"}, "There is no ledger at 'missing.npz'"),
        ({"ledger": "empty"}, "holds no ledger.npz"),
        ({"config": "wrong.toml"}, "train has no setting 'epoch'. Did you mean 'epochs'"),
        ({"config": "twice.toml"}, "keep one of them"),
    ],
)
def test_bad_input_gets_one_clear_sentence(changes: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]):
    Path("empty").mkdir()
    photos(Path("single"), 2, classes=2)
    Path("wrong.toml").write_text("[train]\nepoch = 1\n")
    Path("twice.toml").write_text("[train]\nselect = 'default'\n[select]\nkeep = 0.5\n")
    assert main(options(**changes)) == 2
    assert said in sentence(capsys)
    assert not Path("out").exists()


def test_a_model_with_the_wrong_output_is_named(capsys: pytest.CaptureFixture[str]):
    Path("flat.py").write_text("from torch import nn\n\ndef model():\n    return nn.Flatten()\n")
    assert main(options(model="flat:model")) == 2
    assert "Model 'flat:model' returned shape (8, 768)" in sentence(capsys)
