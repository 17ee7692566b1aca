"""What does a search gain if its trials start from a shared ledger?

Successive halving over 12 learning rates (1 epoch for all, 3 for the best third, 9 for the best of those), one trial after the
other in one process, so that CPU seconds tell and not Ray's start-up. Images are rendered glyphs, with 5% wrong labels.

- none: `default`, each trial with a ledger of its own, as it is (two windows of everything, then half of the samples);
- share: the same, all trials from the ledger of a scout (one window with the middle rate, counted), without a warm-up;
- control: the same without a warm-up and without any knowledge: what leaving out the warm-up alone gives;
- all: no selection.

It would embarrass us if `share` were no better than `control`: then the ledger is worth nothing here, only the shorter warm-up.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import salience
from salience.app import models
from salience.app.glyphs import render
from salience.select import preset

RATES = tuple(float(rate) for rate in np.geomspace(0.01, 1.0, 12))
RUNGS = (1, 3, 9)
CLASSES = 20


@dataclass(frozen=True, slots=True)
class Found:
    """A search."""

    seconds: float
    """Of the processor, evaluation not included."""
    visits: int
    accuracy: float
    """Of the winner, at the end, on the test images."""
    rate: float


class Trial:
    """One learning rate, trained as far as it is wanted."""

    def __init__(self, rate: float, seed: int, data: Data, select: Any, ledger: Any) -> None:
        self.rate, self.data, self.accuracy, self.seconds = rate, data, 0.0, 0.0
        self.model = models.seeded("cnn", CLASSES, size=32, seed=seed)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=rate, momentum=0.9, weight_decay=5e-4)
        self.loader = salience.Loader(data.train, 64, epochs=RUNGS[-1], select=select, seed=seed, ledger=ledger)
        self.schedule = salience.ProgressLR(self.optimizer, self.loader, "one_cycle")

    def train(self, until: int) -> None:
        while self.loader.epoch < until:
            begin = time.process_time()
            self.model.train()
            for x, y in self.loader:
                logits = self.model(x)
                loss = self.loader.loss(F.cross_entropy(logits, y, reduction="none"), logits, y)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.schedule.step()
            self.seconds += time.process_time() - begin
        self.model.eval()
        with torch.no_grad():
            x, y = self.data.test
            self.accuracy = float((self.model(x).argmax(1) == y).float().mean())


@dataclass(frozen=True, slots=True)
class Data:
    train: TensorDataset
    test: tuple[torch.Tensor, torch.Tensor]


def images(n: int, seed: int) -> Data:
    def tensors(count: int, split: str, wrong: float) -> tuple[torch.Tensor, torch.Tensor]:
        copies = 0.15 if split == "train" else 0.0
        found = render(count, classes=CLASSES, size=32, seed=seed, split=split, wrong=wrong, copies=copies)
        grey = torch.from_numpy(found.images).float().div(255).sub(0.5)
        return grey.unsqueeze(1).repeat(1, 3, 1, 1), torch.from_numpy(found.labels)

    return Data(TensorDataset(*tensors(n, "train", 0.05)), tensors(1000, "test", 0.0))


def search(arm: str, data: Data, seed: int) -> Found:
    """Successive halving with one arm's way to start."""
    spent, visits = 0.0, 0
    with tempfile.TemporaryDirectory() as folder:
        select: Any = None if arm == "all" else "default"
        if arm == "control":
            select = {"preset": "default", "keep": {**preset("default").keep.to_dict(), "warmup": 0}}
        if arm == "share":
            scout = Trial(RATES[len(RATES) // 2], seed, data, select, salience.SharedLedger(folder))
            scout.train(1)
            spent, visits = scout.seconds, scout.loader.visits

        def ledger(k: int) -> Any:
            return salience.SharedLedger(folder, comparison="rates", job=str(k)) if arm == "share" else None

        trials = left = [Trial(rate, seed, data, select, ledger(k)) for k, rate in enumerate(RATES)]
        for rung in RUNGS:
            for trial in left:
                trial.train(rung)
            best = sorted(left, key=lambda trial: -trial.accuracy)
            left = best[: -(-len(best) // 3)] if rung != RUNGS[-1] else best
        spent += sum(trial.seconds for trial in trials)
        visits += sum(trial.loader.visits for trial in trials)
    return Found(spent, visits, left[0].accuracy, left[0].rate)


def searches(n: int, seeds: int) -> dict[str, float]:
    """All arms with every seed; prints a row for each, and returns the ratios."""
    rows: dict[str, list[Found]] = {arm: [] for arm in ("none", "share", "control", "all")}
    for seed in range(seeds):
        data = images(n, seed)
        for arm, found in rows.items():
            found.append(search(arm, data, seed))
    for arm, found in rows.items():
        accuracies = ", ".join(f"{one.accuracy:.1%}" for one in found)
        rates = ", ".join(f"{one.rate:.2g}" for one in found)
        print(
            f"search, {arm:<8} {statistics.fmean(one.seconds for one in found):7.1f} CPU s "
            f"{statistics.fmean(one.visits for one in found):9,.0f} visits  winners {accuracies} (rates {rates})",
            flush=True,
        )

    def ratio(arm: str, against: str) -> float:
        pairs = zip(rows[arm], rows[against], strict=True)
        return statistics.geometric_mean([one.seconds / other.seconds for one, other in pairs])

    def gain(arm: str, against: str) -> float:
        return statistics.fmean(
            one.accuracy - other.accuracy for one, other in zip(rows[arm], rows[against], strict=True)
        )

    return {
        "search_time_ratio": ratio("share", "none"), "search_accuracy_gain": gain("share", "none"),
        "search_time_control": ratio("control", "none"), "search_accuracy_control": gain("control", "none"),
        "search_time_vs_all": ratio("share", "all"), "search_accuracy_vs_all": gain("share", "all"),
    }  # fmt: skip
