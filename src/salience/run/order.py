"""The order in which DataLoader(shuffle=True, generator=g) would deliver, drawing from g what it would draw."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import RandomSampler


class PlainOrder:
    """Shuffles with a generator whose state moves exactly as under a plain DataLoader."""

    def __init__(self, n: int, generator: torch.Generator) -> None:
        self.n, self.generator = n, generator
        self.state: Tensor = generator.get_state()
        """The generator before the window in progress drew from it; workers are seeded from here."""
        self._drew_worker_seed = True
        self._rest: Iterator[int] = iter(())

    def draw(self, *, worker_seed: bool) -> npt.NDArray[np.int64]:
        """The next window's order, int64 [n]; `worker_seed` = DataLoader would first draw a seed for its workers."""
        self.state, self._drew_worker_seed = self.generator.get_state(), worker_seed
        if worker_seed:
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        self._rest = iter(RandomSampler(range(self.n), generator=self.generator))
        return np.fromiter(itertools.islice(self._rest, self.n), dtype=np.int64, count=self.n)

    def peek(self) -> npt.NDArray[np.int64]:
        """An order beside the window in progress, drawn as a second iter() of a DataLoader would."""
        torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        return torch.randperm(self.n, generator=self.generator).numpy()

    def unused(self, *, workers: bool) -> None:
        """Nobody took a batch of that order: DataLoader would have drawn the seed, and with workers the order too."""
        if not workers:
            self.generator.set_state(self.state)
            if self._drew_worker_seed:
                torch.empty((), dtype=torch.int64).random_(generator=self.generator)

    def finish(self) -> None:
        """A plain shuffle draws once more at its end."""
        next(self._rest, None)

    def mark(self) -> None:
        """Plain windows go on from here."""
        self.state = self.generator.get_state()

    def state_dict(self, *, in_window: bool) -> dict[str, Any]:
        state = self.state if in_window else self.generator.get_state()
        return {
            "generator": state.clone(), "now": self.generator.get_state(), "drew_worker_seed": self._drew_worker_seed,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any], *, in_window: bool) -> None:
        """Bring the generator to where it stood; inside a window, that is after the window's draws."""
        self.generator.set_state(state["generator"])
        if in_window:
            self.draw(worker_seed=bool(state["drew_worker_seed"]))
            self.generator.set_state(state["now"])  # peeks may have drawn since
