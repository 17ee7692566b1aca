"""Does the background scorer steal the training's cores?

A slim residual network trains on one core, or on both cores of a two-core machine, while the scorer has more samples to score
than it can manage: one window in two it works, in the other it is stopped (SIGSTOP), in the same run. Seconds per window with
it over seconds without, by pairs of neighbouring windows; and how many samples it scored meanwhile, since a scorer that never
runs slows nobody down. Run it alone on the machine: where others compute too, lowest priority means that it never has its turn.

scorer_slowdown   median ratio of the seconds, with its 95% interval, by the number of threads that train
scorer_scored     samples scored per sample trained on meanwhile

Embarrassing would be more than 1.05 where a core is free, or where none is: then it should wait.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

import salience
from planted import digits, slim

SHOWN = 1000
"""Images that the data set repeats."""
BATCH, STEPS = 64, 12


class Repeated(Dataset[tuple[Tensor, Tensor]]):
    """A few images under many ids, so that there is always something to score."""

    def __init__(self, n: int, seed: int) -> None:
        images = digits(SHOWN, seed)
        self.x, self.y = torch.from_numpy(images.x).float() / 255 - 0.5, torch.from_numpy(images.y)
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i % SHOWN], self.y[i % SHOWN]


def pairs(threads: int, count: int, seed: int) -> tuple[np.ndarray, float]:
    """Ratio of the seconds of each pair of windows, and samples scored per sample trained on while the scorer worked."""
    torch.set_num_threads(threads)
    n = 100 * BATCH * STEPS
    select = {"preset": "uniform", "keep": {"name": "constant", "share": BATCH * STEPS / n}}
    loader = salience.Loader(Repeated(n, seed), BATCH, epochs=2 * count + 2, select=select, seed=seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = slim(1)
    loader.attach(model, background=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    scorer = loader._run.sensing.scorer  # pyright: ignore[reportPrivateUsage]
    assert scorer is not None
    pid = scorer.process.pid
    scored, seconds = 0, {True: list[float](), False: list[float]()}
    for window in range(2 * count + 1):
        works = window == 0 or (window + window // 2) % 2 == 0  # on, off, off, on: neither is always first
        os.kill(pid, signal.SIGCONT if works else signal.SIGSTOP)
        before, begin = 0, 0.0
        for number, (x, y) in enumerate(loader):
            if not number:  # the plan is made, and the scorer has its question
                before, begin = scorer.done, time.perf_counter()
            logits = model(x)
            loss = loader.loss(F.cross_entropy(logits, y, reduction="none"), logits, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if not window:
            while not scorer.done:  # it takes a second or two to start
                time.sleep(0.1)
            continue
        seconds[works].append(time.perf_counter() - begin)
        scored += works * max(0, scorer.done - before)
    os.kill(pid, signal.SIGCONT)
    loader.detach()
    return np.array(seconds[True]) / np.array(seconds[False]), scored / (count * BATCH * STEPS)


def measure(*, quick: bool, seed: int = 0) -> dict[str, Any]:
    count = 30 if quick else 120
    slowdown: dict[str, list[float]] = {}
    scored: dict[str, float] = {}
    for threads in (1, 2):
        ratios, share = pairs(threads, count, seed)
        rng = np.random.default_rng(seed)
        medians = np.median(rng.choice(ratios, (2000, len(ratios))), axis=1)
        ends = (float(np.median(ratios)), *np.quantile(medians, (0.025, 0.975)).tolist())
        slowdown[str(threads)] = [round(end, 3) for end in ends]
        scored[str(threads)] = round(share, 2)
        print(f"  {threads} of {os.cpu_count()} cores train: {slowdown[str(threads)]}, scored {share:.2f}", flush=True)
    torch.set_num_threads(1)
    return {"scorer_slowdown": slowdown, "scorer_scored": scored}
