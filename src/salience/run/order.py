"""The order in which a plain DataLoader would deliver, drawing from its generator what it would draw."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from salience.errors import ConfigError

GLOBAL = "global"
"""Given as `generator`: draw from torch's global generator, as a DataLoader that was given none."""


@dataclass(kw_only=True, slots=True)
class Drawn:
    """The order of one epoch."""

    ids: npt.NDArray[np.int64]
    state: Tensor
    """The generator before it drew; workers are seeded from here."""
    worker_seed: bool
    """True if a seed for workers was drawn first."""
    shuffler: torch.Generator | None = None
    """What RandomSampler draws from once more at the epoch's end; None if it does not, or has done so."""

    def finish(self) -> None:
        """Draw once more, where a loop runs into the epoch's end."""
        if self.shuffler is not None:
            torch.randperm(len(self.ids), generator=self.shuffler)
            self.shuffler = None


class PlainOrder:
    """Orders samples with a generator whose state moves exactly as under a plain DataLoader.

    `generator` is seeded by `seed` where None is given; "global" does what a DataLoader without a generator does, by two draws
    per epoch from torch's global generator. Without `shuffle`, samples stay in the order of the data set.
    """

    def __init__(
        self, n: int, generator: torch.Generator | str | None = None, *, seed: int = 0, shuffle: bool = True
    ) -> None:
        if not isinstance(generator, torch.Generator | None) and generator != GLOBAL:
            raise ConfigError(f"generator is {generator!r}; it must be a torch.Generator, {GLOBAL!r} or None.")
        self.n, self.shuffle = n, shuffle
        given = torch.Generator().manual_seed(seed) if generator is None else generator
        self._own = None if isinstance(given, str) else given
        """The generator that shuffles; None = one that is seeded anew by each epoch's second draw."""
        self.generator = torch.default_generator if isinstance(given, str) else given
        self.drawn = Drawn(ids=np.empty(0, dtype=np.int64), state=self.generator.get_state(), worker_seed=True)
        """The order of the epoch in progress."""
        self._put_back: Drawn | None = None
        self._finished = True
        """True unless an order was drawn whose end no loop has run into."""
        self.delivered = False
        """True if every batch of the last epoch was delivered."""
        self._stops = False
        """True if the loop stops at an epoch's last batch instead of running into the end, as far as it has shown."""

    def draw(self, *, worker_seed: bool) -> npt.NDArray[np.int64]:
        """The next window's order, int64 [n]; `worker_seed` = DataLoader would first draw a seed for its workers."""
        if self.delivered:
            self._stops = not self._finished
        drawn, self._put_back = self._put_back, None
        self.drawn = drawn or self._draw(worker_seed)
        self._finished = self.delivered = False
        return self.drawn.ids

    def _draw(self, worker_seed: bool) -> Drawn:
        state = self.generator.get_state()
        if worker_seed:
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        if not self.shuffle:
            return Drawn(ids=np.arange(self.n), state=state, worker_seed=worker_seed)
        shuffler = self._own
        if shuffler is None:  # RandomSampler makes one for each epoch
            shuffler = torch.Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_()))
        ids = torch.randperm(self.n, generator=shuffler).numpy()
        return Drawn(ids=ids, state=state, worker_seed=worker_seed, shuffler=shuffler)

    def unused(self, back: Drawn | None = None, *, workers: bool) -> None:
        """Nobody took a batch of the last order: the next one is `back`, which was drawn before, or else drawn anew.

        Then a DataLoader would have drawn the seed, and with workers the order too.
        """
        self._put_back = back
        if back is None and not workers:
            self.generator.set_state(self.drawn.state)
            if self.drawn.worker_seed:
                torch.empty((), dtype=torch.int64).random_(generator=self.generator)

    def beside(self, *, workers: bool) -> Drawn:
        """What an iterator draws at iter() beside one in the middle of its epoch: a seed, and with workers the order too."""
        if workers:
            return self._draw(True)
        state = self.generator.get_state()
        torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        return Drawn(ids=np.empty(0, dtype=np.int64), state=state, worker_seed=True)

    def take(self, before: Drawn, *, workers: bool) -> None:
        """The next order is that of an iterator that drew `before` at its iter(), and has become the one that counts."""
        self._put_back = before if workers else self._draw(False)

    def peek(self, before: Drawn | None, *, workers: bool) -> Drawn:
        """An order beside the one in progress, as a second iter() of a DataLoader draws it; `before` = what iter() drew then.

        Without workers a DataLoader draws at iter() a seed alone, and the order at the first batch.
        """
        if before is None:
            return self._draw(True)
        return before if workers else self._draw(False)

    def finish(self) -> None:
        """A loop has run into the end of the order in progress."""
        self.drawn.finish()
        self._finished = True

    def mark(self) -> None:
        """Plain windows go on from here."""
        self.drawn.state = self.generator.get_state()

    def state_dict(self, *, in_window: bool) -> dict[str, Any]:
        """Where the generator stands; between two epochs, where it will when the next one is drawn."""
        now = self.generator.get_state()
        ends = not self._finished and not self._stops
        if not in_window and ends and self.shuffle and self._own is not None:
            ahead = torch.Generator()
            ahead.set_state(now)
            torch.randperm(self.n, generator=ahead)
            now = ahead.get_state()
        state = self.drawn.state.clone() if in_window else now
        return {"generator": state, "now": now, "drew_worker_seed": self.drawn.worker_seed, "stops": self._stops}

    def load_state_dict(self, state: Mapping[str, Any], *, in_window: bool) -> npt.NDArray[np.int64]:
        """Bring the generator to where it stood; inside an epoch, that is after its draws. Returns the epoch's order."""
        self.generator.set_state(state["generator"])
        self._finished, self.delivered, self._stops = True, False, bool(state.get("stops", False))
        if not in_window:
            return np.empty(0, dtype=np.int64)
        order = self.draw(worker_seed=bool(state["drew_worker_seed"]))
        self.generator.set_state(state["now"])  # peeks may have drawn since
        return order
