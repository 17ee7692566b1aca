"""`salience feed` starts, shows and stops a feed, and `salience train --feed` reads through it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from folders import photos, salience

from salience.cli import main


@pytest.fixture(autouse=True)
def feeds(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="sf") as folder:
        monkeypatch.setenv("SALIENCE_FEEDS", folder)
        yield Path(folder)


def test_a_feed_is_started_trained_from_shown_and_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    data = photos(tmp_path / "photos")
    assert main(["feed", "start", "glyphs", "--data", str(data), "--cache", "16MiB"]) == 0
    try:
        common = ["--data", data, "--model", "mlp", "--epochs", 1, "--batch-size", 8, "--workers", 0, "--device", "cpu"]
        trained = salience("train", *common, "--feed", "glyphs", "--out", tmp_path / "shared", cwd=tmp_path)
        assert trained.returncode == 0, trained.stderr
        capsys.readouterr()
        assert main(["feed", "status"]) == 0
        assert "44 samples were decoded" in capsys.readouterr().out
    finally:
        assert main(["feed", "stop", "glyphs"]) == 0
    assert main(["feed", "status"]) == 0
    assert "No feed runs here." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["feed", "start"], "Which feed?"),
        (["feed", "start", "x"], "What is it to read?"),
        (["feed", "stop", "nobody"], "No feed 'nobody' runs here"),
        (["feed", "stop", "a/b"], "no name for a feed"),
    ],
)
def test_what_is_missing_is_said(words: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    assert main(words) == 2
    assert said in capsys.readouterr().err
