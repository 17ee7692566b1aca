"""The command itself: its help, its version, and how errors leave it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from folders import COMMAND, salience

from salience import __version__
from salience.cli import COMMANDS, main
from salience.cli.text import sentence
from salience.errors import BrokenSample, ConfigError
from salience.report.console import columns

NAMES = (
    "demo",
    "train",
    "feed",
    "profile",
    "report",
    "compare",
    "pack",
    "scores",
    "score",
    "tune",
    "plugins",
    "doctor",
)


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    said = capsys.readouterr().out
    assert all(f"\n    {name} " in said for name in NAMES)
    assert len(COMMANDS) == len(NAMES)


def test_without_a_command_there_is_help(capsys: pytest.CaptureFixture[str]):
    assert main([]) == 0
    assert "\n    train " in capsys.readouterr().out


@pytest.mark.parametrize("asked", [["--help"], ["--version"], *([name, "--help"] for name in NAMES), []])
def test_help_does_not_wait_for_torch(asked: list[str]):
    code = (
        f"import sys; from salience.cli import main\ntry:\n    main({asked!r})\nfinally:\n"
        "    assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_the_docstring_of_a_command_is_its_help(name: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main([name, "--help"])
    module = sys.modules[f"salience.cli.{name}"]
    assert module.__doc__ is not None
    assert module.__doc__.strip() in capsys.readouterr().out


def test_the_version_is_said_and_an_unknown_command_refused(tmp_path: Path):
    told = salience("--version", cwd=tmp_path)
    assert (told.returncode, told.stdout, told.stderr) == (0, f"salience {__version__}\n", "")
    refused = salience("trian", cwd=tmp_path)
    assert refused.returncode == 2
    assert "invalid choice: 'trian'" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_an_error_is_one_sentence_and_debug_shows_where_it_comes_from(tmp_path: Path):
    given = ("train", "--data", "nothing", "--epochs", "0")
    plain = salience(*given, cwd=tmp_path)
    assert (plain.returncode, plain.stdout) == (2, "")
    assert plain.stderr == "salience: train.epochs is 0; it must be at least 1.\n"
    traced = salience("--debug", *given, cwd=tmp_path)
    assert traced.returncode == 1
    assert "Traceback" in traced.stderr
    assert "ConfigError" in traced.stderr


def test_a_reader_that_has_read_enough_is_no_error():
    with subprocess.Popen([COMMAND, "plugins"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.close()
        assert running.stderr.read() == b""
    assert running.returncode == 141


def test_a_workers_error_is_cut_down_to_its_sentence():
    text = (
        "Caught BrokenSample in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
        '  File "folder.py", line 1, in decode\nOSError: no\n\nThe above exception was ...\n\n'
        "Traceback (most recent call last):\n  ...\nsalience.errors.BrokenSample: image 3, x.png, cannot be read\n"
    )
    assert sentence(BrokenSample(text)) == "image 3, x.png, cannot be read"
    assert sentence(ConfigError("epochs is 0;\nuse 1.")) == "epochs is 0; use 1."


def test_columns_are_as_wide_as_their_widest_cell():
    assert columns([("a", "bb", "c"), ("long", "b", "")]) == "a     bb  c\nlong  b"


def test_the_demo_gets_its_options(monkeypatch: pytest.MonkeyPatch):
    given: dict[str, object] = {}

    def demo(**options: object) -> int:
        given.update(options)
        return 0

    monkeypatch.setitem(sys.modules, "salience.app.demo", SimpleNamespace(main=demo))
    monkeypatch.setattr("salience.app.demo", sys.modules["salience.app.demo"], raising=False)
    assert main(["demo", "--quick", "--samples", "50"]) == 0
    assert given == {"samples": 50, "epochs": 0, "seed": 0, "quick": True}


def test_a_mistyped_option_names_the_nearest(capsys: pytest.CaptureFixture[str]):
    assert main(["train", "--data", "x", "--slect", "default"]) == 2
    said = capsys.readouterr().err
    assert "takes no '--slect'" in said
    assert "Did you mean '--select'" in said


def test_a_script_with_a_plain_dataloader_is_told_what_is_missing_before_it_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    script = tmp_path / "plain.py"
    script.write_text("from torch.utils.data import DataLoader\nraise SystemExit('it was run')\n")
    assert main(["profile", str(script)]) == 2
    said = capsys.readouterr().err
    assert "makes no salience.Loader" in said
    assert "in the place of DataLoader" in said


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("import other", True),
        ("from pkg import deep", True),
        ("from pkg.deep import x", True),
        ("exec(open('other.py').read())", True),
        ("import torch, math, fine", False),
    ],
)
def test_profile_follows_what_a_script_imports_and_not_what_lies_beside_it(script, says, tmp_path):
    from salience.cli import profile

    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("")
    (tmp_path / "pkg" / "deep.py").write_text("from . import below\nx = 1")
    (tmp_path / "pkg" / "below.py").write_text("import salience")
    (tmp_path / "other.py").write_text("from salience import Loader")
    (tmp_path / "fine.py").write_text("x = 1")
    (tmp_path / "train.py").write_text(script)
    assert profile._mentions_salience(tmp_path / "train.py") == says
