"""The order in which a plain DataLoader would deliver, drawing from its generator what it would draw."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from salience.errors import ConfigError

GLOBAL = "global"
"""Given as `generator`: draw from torch's global generator, as a DataLoader that was given none."""


class PlainOrder:
    """Orders samples with a generator whose state moves exactly as under a plain DataLoader.

    `generator` is seeded by `seed` where None is given; "global" does what a DataLoader without a generator does, by two draws
    per epoch from torch's global generator. Without `shuffle`, samples stay in the order of the data set.
    """

    def __init__(
        self, n: int, generator: torch.Generator | str | None = None, *, seed: int = 0, shuffle: bool = True
    ) -> None:
        if isinstance(generator, str) and generator != GLOBAL:
            raise ConfigError(f"generator is {generator!r}; it must be a torch.Generator, {GLOBAL!r} or None.")
        self.n, self.shuffle = n, shuffle
        given = torch.Generator().manual_seed(seed) if generator is None else generator
        self._own = None if isinstance(given, str) else given
        """The generator that shuffles; None = one that is seeded anew by each epoch's second draw."""
        self.generator = torch.default_generator if isinstance(given, str) else given
        self.state: Tensor = self.generator.get_state()
        """The generator before the window in progress drew from it; workers are seeded from here."""
        self._drew_worker_seed, self._finished = True, True
        self._last: torch.Generator | None = None
        """What shuffled the epoch in progress, and shuffles once more at its end."""

    def draw(self, *, worker_seed: bool) -> npt.NDArray[np.int64]:
        """The next window's order, int64 [n]; `worker_seed` = DataLoader would first draw a seed for its workers."""
        self.state, self._drew_worker_seed, self._finished = self.generator.get_state(), worker_seed, False
        if worker_seed:
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        self._last = self._shuffler()
        return self._order(self._last)

    def _shuffler(self) -> torch.Generator | None:
        """The generator of an epoch, as RandomSampler has it."""
        if self._own is not None or not self.shuffle:
            return self._own
        return torch.Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_()))

    def _order(self, shuffler: torch.Generator | None) -> npt.NDArray[np.int64]:
        return torch.randperm(self.n, generator=shuffler).numpy() if self.shuffle else np.arange(self.n)

    def peek(self) -> Iterator[npt.NDArray[np.int64]]:
        """An order beside the window in progress, drawn as a second iter() of a DataLoader would; whoever runs into the end
        of its batches asks for it once more."""
        torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        shuffler = self._shuffler()
        while True:
            yield self._order(shuffler)

    def unused(self, *, workers: bool) -> None:
        """Nobody took a batch of that order: DataLoader would have drawn the seed, and with workers the order too."""
        if not workers:
            self.generator.set_state(self.state)
            if self._drew_worker_seed:
                torch.empty((), dtype=torch.int64).random_(generator=self.generator)

    def finish(self) -> None:
        """A plain shuffle draws once more at its end, where a loop runs into it."""
        if self.shuffle and not self._finished:
            self._order(self._last)
        self._finished = True

    def mark(self) -> None:
        """Plain windows go on from here."""
        self.state = self.generator.get_state()

    def state_dict(self, *, in_window: bool) -> dict[str, Any]:
        """Where the generator stands; between two epochs, where it will once the loop runs into the end of the last."""
        now = self.generator.get_state()
        if not in_window and not self._finished and self.shuffle and self._own is not None:
            ahead = torch.Generator()
            ahead.set_state(now)
            torch.randperm(self.n, generator=ahead)
            now = ahead.get_state()
        state = self.state.clone() if in_window else now
        return {"generator": state, "now": now, "drew_worker_seed": self._drew_worker_seed}

    def load_state_dict(self, state: Mapping[str, Any], *, in_window: bool) -> npt.NDArray[np.int64]:
        """Bring the generator to where it stood; inside an epoch, that is after its draws. Returns the epoch's order."""
        self.generator.set_state(state["generator"])
        if not in_window:
            return np.empty(0, dtype=np.int64)
        order = self.draw(worker_seed=bool(state["drew_worker_seed"]))
        self.generator.set_state(state["now"])  # peeks may have drawn since
        return order
