"""Loops put together at random: the ledger has each loss that was given exactly once, and nothing else."""

from __future__ import annotations

import contextlib
import io
import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset

import salience
from salience.errors import ConfigError

LOOPS = 60
"""Seeds 0, 1, 2, ..."""
RULES = (None, None, "default", "uniform", "infobatch", "kakurenbo", "epsilon_greedy", "ucb", "selective_backprop")


class Samples(Dataset):
    def __init__(self, n: int, broken: set[int]) -> None:
        self.n, self.broken = n, broken

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> tuple[float, int]:
        if i in self.broken:
            raise OSError(f"sample {i}")
        return i / self.n, i % 3


class Loop:
    """Epochs that end early, fetch ahead, peek, skip, give a second loss, meet broken samples, and are saved and resumed."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.n, self.epochs = rng.randint(5, 60), rng.randint(2, 6)
        size = rng.randint(1, 12)
        self.options: dict[str, Any] = {
            "batch_size": size, "epochs": self.epochs, "select": rng.choice(RULES), "drop_last": rng.random() < 0.3,
            "with_ids": True, "window": rng.randint(size, max(size, self.n + 5)) if rng.random() < 0.3 else None,
        }  # fmt: skip
        self.broken = set(rng.sample(range(self.n), 2)) if rng.random() < 0.3 else set()
        # Losses may come late by two batches, as long as these are of this window and the one before.
        self.ahead = 2 if self.options["window"] is None and rng.random() < 0.3 else 0
        self.losses = np.zeros(self.n, dtype=np.int64)
        self.delivered = 0
        self.loader = self.make()

    def make(self) -> salience.Loader:
        return salience.Loader(Samples(self.n, self.broken), **self.options)

    def give(self, ids: torch.Tensor, batch: Any) -> None:
        x, y = batch
        late, logits = self.ahead > 0, F.one_hot(y, 3).float()
        if not late and self.options["select"] != "selective_backprop" and self.rng.random() < 0.1:
            self.loader.skip()
            return
        for again in [False, True][: 1 + (self.rng.random() < 0.1)]:
            self.loader.loss(x.float(), logits, y, ids=ids if late or again else None, again=again)
            self.losses[ids] += 1

    def resume(self) -> None:
        file = io.BytesIO()
        torch.save(self.loader.state_dict(), file)
        file.seek(0)
        self.loader = self.loader if self.rng.random() < 0.5 else self.make()
        self.loader.load_state_dict(torch.load(file, weights_only=True))

    def epoch(self) -> None:
        rng = self.rng
        most, peeks = rng.choice([None, None, rng.randint(1, 4)]), not self.ahead and rng.random() < 0.3
        save = None if self.ahead else rng.choice([None, rng.randint(1, 4)])
        it, taken, waiting = iter(self.loader), 0, []
        while most is None or taken < most:
            try:
                ids, batch = next(it)
            except StopIteration:
                break
            except OSError:
                continue
            taken, self.delivered = taken + 1, self.delivered + len(ids)
            waiting.append((ids, batch))
            while len(waiting) > self.ahead:
                self.give(*waiting.pop(0))
            if peeks:
                with contextlib.suppress(OSError):
                    next(iter(self.loader), None)
            if taken == save:
                self.resume()
                it = iter(self.loader)
        for ids, batch in waiting:
            self.give(ids, batch)

    def run(self) -> None:
        for _ in range(2 * self.epochs):
            if self.loader.epoch < self.epochs:
                self.epoch()


def test_every_loss_is_in_the_ledger_once():
    finished = 0
    for seed in range(LOOPS):
        loop = Loop(seed)
        try:
            loop.run()
        except ConfigError:  # so few losses were given that none came before the first window that selects
            if loop.losses.any():
                raise
            continue
        finished += 1
        np.testing.assert_array_equal(loop.loader.ledger.seen, loop.losses, f"seed {seed}")
        assert loop.loader.visits == loop.delivered, f"seed {seed}"
    assert finished > 0.9 * LOOPS
