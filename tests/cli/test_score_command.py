"""`salience score`: a process of its own answers a run's questions with the model and the images that its checkpoint names."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from folders import COMMAND, photos

from salience.app import checkpoint
from salience.app.scoring import Asked, scoring_model
from salience.cli import main
from salience.signals.remote import RemoteScorer
from salience.signals.scorer import SCORE_ROWS


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder of images, and that of a run over them."""
    place = tmp_path_factory.mktemp("scored")
    data, run = photos(place / "photos"), place / "run"
    given = ["--data", str(data), "--model", "cnn", "--epochs", "2", "--workers", "0", "--batch-size", "16"]
    assert main(["train", *given, "--select", "uniform", "--remote-scores", "--out", str(run)]) == 0
    return data, run


def test_the_process_scores_what_the_run_asks_and_ends_with_it(trained: tuple[Path, Path]):
    data, run = trained
    saved = checkpoint.read(run / checkpoint.LAST)
    model, ids = scoring_model(saved, "cpu"), np.arange(0, 40, 3)
    question = RemoteScorer(model.model, run / checkpoint.SCORER, n=44)
    question.ask(ids, window=7)
    process = subprocess.Popen([COMMAND, "score", "--source", str(data), "--watch", str(run)], stdout=subprocess.PIPE)
    killed = threading.Timer(100, process.kill)
    killed.start()
    found = question.take()
    while not len(found[0]) and process.poll() is None:
        found = question.take()
    question.close()
    said, _ = process.communicate()
    killed.cancel()
    assert process.returncode == 0
    assert b"The run is over; 14 samples were scored." in said
    x, y = Asked(str(data), saved)(ids)
    with torch.no_grad():
        losses = torch.nn.functional.cross_entropy(model.eval()(x), y, reduction="none")
    np.testing.assert_array_equal(found[0], ids)
    np.testing.assert_allclose(found[1][SCORE_ROWS.index("loss")], losses, rtol=1e-4)
    assert found[2] == 7


def test_other_data_and_code_from_a_checkpoint_are_refused(
    trained: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    _, run = trained
    other = photos(tmp_path / "other", 24)
    assert main(["score", "--source", str(other), "--watch", str(run)]) == 2
    assert "was made from other images" in capsys.readouterr().err
    saved = checkpoint.read(run / checkpoint.LAST)
    saved["config"]["model"] = "os:getcwd"
    torch.save(saved, tmp_path / "harm.pt")
    given = ["score", "--source", str(other), "--watch", str(run), "--model", str(tmp_path / "harm.pt")]
    assert main(given) == 2
    assert "which is code to import; --trust it to do so" in capsys.readouterr().err
