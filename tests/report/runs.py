"""Short real runs for the tests of reports: rendered images under class names that would like to be markup."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.utils.data import TensorDataset

import salience
from salience.cli import main
from salience.events import EventLog

NASTY = ("<script>alert(1)", "<img src=x onerror=alert(2)>", "a & b \"c\" 'd'", "naïve")
"""Names of the classes, in their order on disk."""


def photos(root: Path, n: int = 160) -> Path:
    """Noise of four shades, a class each: some labels wrong, some images copied byte by byte."""
    rng = np.random.default_rng(0)
    for i in range(n):
        image = np.clip(rng.normal(40 + 60 * (i % 4), 20, (16, 16)), 0, 255).astype(np.uint8)
        folder = root / NASTY[(i + (i % 10 == 3)) % 4]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{i:03}.png")
        if i % 20 == 0:
            Image.fromarray(image).save(folder / f"{i:03} <b>again.png")
    return root


def trained(folder: Path, name: str, **options: Any) -> Path:
    """A run of `salience train` on `folder`/data, in `folder`/`name`."""
    data = folder / "data"
    if not data.exists():
        photos(data)
    given = {"data": data, "model": "mlp", "epochs": 5, "batch-size": 8, "lr": 0.02, "workers": 0, "out": folder / name}
    given |= options
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "XDG_CACHE_HOME", str(folder / "cache"))
        assert main(["train", *(f"--{key}={value}" for key, value in given.items())]) == 0
    return folder / name


def looped(log: Path | EventLog, problem: TensorDataset, *, epochs: int = 4, **options: Any) -> salience.Loader:
    """A Loader on the small problem, its events in `log`."""
    return salience.Loader(problem, 50, epochs=epochs, select="default", log=log, **options)


def steps(loader: salience.Loader, model: nn.Module, count: int | None = None) -> None:
    """Go through a window, or `count` batches of it."""
    for number, (x, y) in enumerate(loader, 1):
        logits = model(x)
        loader.loss(F.cross_entropy(logits, y, reduction="none"), logits, y).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * (0 if p.grad is None else p.grad)
                p.grad = None
        if number == count:
            return


def long_log(path: Path, epochs: int, *, filters: int = 2) -> Path:
    """The log of a run of any length, as an EventLog writes it; nothing is trained."""
    log = EventLog(path)
    log.emit(
        "run", salience=salience.__version__, torch="2", population=1000, batch_size=10, epochs=epochs, seed=0,
        select={"sampler": {"name": "ratio"}, "keep": {"name": "constant", "share": 0.5}},
    )  # fmt: skip
    for window in range(epochs):
        notes = [
            {"name": f"filter_{k}", "dropped": 10 * k + window % 7, "forced": k, "reason": f"over 0.{window}"}
            for k in range(filters)
        ]
        done = {"batches": 50, "of": 50, "finished": True, "seconds": 0.5, "overhead": {"plan": 0.001 * (window + 1)}}
        shares = [round(0.05 + 0.1 * k, 2) for k in range(10)]
        log.emit(
            "plan", window=window, picked=500, population=1000, progress=window / epochs, filters=notes, by_importance=shares
        )  # fmt: skip
        work = {"fetch": 0.1, "<b>burn": 0.3}
        log.emit(
            "window",
            window=window,
            **done,
            steps={"steps": 50, "wait": 0.2, "forward": 0.1, "backward": 0.15, "work": work},
        )
        log.emit("evaluated", metric=1 - 1 / (window + 2), progress=(window + 1) / epochs, window=window + 1)
    levers = [{"name": "num_workers=2", "exact": True, "speedup": 1.6, "low": 1.2, "high": 2.0}]
    log.emit(
        "verdict", window=1, bound="input", cause="burn", share=0.8, text="Input-bound: <i>so</i> it is.", levers=levers
    )
    common = {"lever": "num_workers=2", "predicted": 1.6, "reason": "the lower bound of 2 pairs is above 1.02"}
    log.emit("decision", window=1, action="try", measured=None, interval=None, **common)
    log.emit("decision", window=3, action="keep", measured=1.5, interval=[1.4, 1.61], **common)
    return path
