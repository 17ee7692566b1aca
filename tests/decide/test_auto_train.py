"""`salience train --auto`: the command hands it on, and the run's log has what was decided."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from salience.cli import main
from salience.events import read


def test_train_with_auto_logs_its_settings(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rng = np.random.default_rng(0)
    for i in range(20):
        file = tmp_path / "data" / f"c{i % 2}" / f"{i}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(file)
    given = ["--model=mlp", "--epochs=1", "--batch-size=4", "--workers=0", "--device=cpu", f"--out={tmp_path / 'out'}"]
    assert main(["train", f"--data={tmp_path / 'data'}", "--auto", *given]) == 0
    used = [event for event in read(tmp_path / "out" / "run.jsonl") if event["kind"] == "settings"]
    assert [(event["window"], event["workers"], event["select"]) for event in used] == [(0, 0, False)]
