"""The order in which a plain DataLoader would deliver, drawing from its generator what it would draw."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from salience.errors import ConfigError

GLOBAL = "global"
"""Given as `generator`: draw from torch's global generator, as a DataLoader that was given none."""

Generators = torch.Generator | str | tuple[torch.Generator | str, torch.Generator] | None
"""A DataLoader's generator, and if its RandomSampler has another one, that too."""


@dataclass(kw_only=True, slots=True)
class Drawn:
    """The order of one epoch."""

    ids: npt.NDArray[np.int64]
    state: Tensor
    """The generator before it drew; workers are seeded from here."""
    order_state: Tensor | None = None
    """The generator of the order before it drew, where it is another one."""
    worker_seed: bool
    """True if a seed for workers was drawn first."""
    shuffler: torch.Generator | None = None
    """What RandomSampler draws from once more at the epoch's end; None if it does not, or has done so."""
    moved: list[tuple[torch.Generator, Tensor, Tensor]] = field(default_factory=list[Any])
    """Where each generator stood before the order was drawn, and after it."""

    def finish(self) -> None:
        """Draw once more, as a DataLoader does when the loop runs into the end of the epoch."""
        if self.shuffler is not None:
            torch.randperm(len(self.ids), generator=self.shuffler)
            self.shuffler = None


class PlainOrder:
    """Orders samples with a generator whose state moves exactly as under a plain DataLoader.

    `generator` is seeded by `seed` where None is given; "global" does what a DataLoader without a generator does, by two draws
    per epoch from torch's global generator; of two, the second shuffles. Without `shuffle`, samples stay in the order of the
    data set.
    """

    def __init__(self, n: int, generator: Generators = None, *, seed: int = 0, shuffle: bool = True) -> None:
        given, other = generator if isinstance(generator, tuple) else (generator, None)
        if not isinstance(given, torch.Generator | None) and given != GLOBAL:
            raise ConfigError(f"generator is {given!r}; it must be a torch.Generator, {GLOBAL!r} or None.")
        self.n, self.shuffle = n, shuffle
        given = torch.Generator().manual_seed(seed) if given is None else given
        self._own = other or (None if isinstance(given, str) else given)
        """The generator that shuffles; None = one that is seeded anew by each epoch's second draw."""
        self.generator = torch.default_generator if isinstance(given, str) else given
        self._second = other
        """The generator of the order, where it is not `generator`."""
        self.drawn = Drawn(ids=np.empty(0, dtype=np.int64), state=self.generator.get_state(), worker_seed=True)
        """The order of the epoch in progress."""
        self._put_back: Drawn | None = None
        self._put_off = False
        """True while the generators stand where they did before the order was drawn."""
        self._begun = False
        """True once a first batch of the order was asked for."""
        self._finished = True
        """False from the moment an order is drawn until a loop has run into its end."""
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
        self._finished = self.delivered = self._put_off = self._begun = False
        return self.drawn.ids

    def put_off(self) -> None:
        """A DataLoader without workers draws at iter() only a seed for workers, and the order at the first batch."""
        for generator, before, _ in self.drawn.moved:
            generator.set_state(before)
        self._put_off = True

    def begin(self) -> bool:
        """An iterator asks for its first batch. True if the order must be drawn anew: something else drew in the meantime, or
        another iterator began with it and got no batch."""
        (put_off, begun), self._put_off, self._begun = (self._put_off, self._begun), False, True
        if not put_off:
            return begun
        if not all(torch.equal(generator.get_state(), before) for generator, before, _ in self.drawn.moved):
            return True
        for generator, _, after in self.drawn.moved:
            generator.set_state(after)
        return False

    def _draw(self, worker_seed: bool) -> Drawn:
        state = self.generator.get_state()
        if worker_seed:
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        if not self.shuffle:
            return Drawn(ids=np.arange(self.n), state=state, worker_seed=worker_seed)
        generators = [self.generator] if self._second is None else [self.generator, self._second]
        before = [generator.get_state() for generator in generators]
        shuffler = self._own
        if shuffler is None:  # RandomSampler makes one for each epoch
            shuffler = torch.Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_()))
        order_state = None if self._second is None else self._second.get_state()
        ids = torch.randperm(self.n, generator=shuffler).numpy()
        return Drawn(
            ids=ids, state=state, order_state=order_state, worker_seed=worker_seed, shuffler=shuffler,
            moved=[(g, b, g.get_state()) for g, b in zip(generators, before, strict=True)],
        )  # fmt: skip

    def again(self, back: Drawn | None) -> None:
        """The next order is `back`, which was drawn before; a new one if that is None."""
        self._put_back = back

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

        At iter(), a DataLoader without workers draws only a seed; it draws the order at the first batch.
        """
        if before is None:
            return self._draw(True)
        return before if workers else self._draw(False)

    def finish(self) -> None:
        """A loop has run into the end of the order in progress."""
        self.drawn.finish()
        self._finished = True

    def mark(self) -> None:
        """Plain windows continue from the generator's present state."""
        self.drawn.state = self.generator.get_state()
        self.drawn.order_state = None if self._second is None else self._second.get_state()

    def state_dict(self, *, in_window: bool) -> dict[str, Any]:
        """Where the generator stands; between two epochs, where it will when the next one is drawn."""
        now = self.generator.get_state()
        order_now = (self._own or self.generator).get_state()
        ends = not self._finished and not self._stops
        if not in_window and ends and self.shuffle and self._own is not None:
            ahead = torch.Generator()
            ahead.set_state(order_now)
            torch.randperm(self.n, generator=ahead)
            order_now = ahead.get_state()
        now = order_now if self._own is self.generator else now
        state = {"generator": self.drawn.state.clone() if in_window else now, "now": now}
        if self._second is not None:
            before = self.drawn.order_state
            state |= {
                "order": before.clone() if in_window and before is not None else order_now,
                "order_now": order_now,
            }
        return {
            **state, "drew_worker_seed": self.drawn.worker_seed, "stops": self._stops, "put_off": self._put_off,
            "ended": self._finished,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any], *, in_window: bool) -> npt.NDArray[np.int64]:
        """Bring the generator to where it stood; inside an epoch, that is after its draws. Returns the epoch's order."""
        self.generator.set_state(state["generator"])
        if self._second is not None and "order" in state:
            self._second.set_state(state["order"])
        self._finished, self.delivered, self._stops = True, False, bool(state.get("stops", False))
        if not in_window:
            return np.empty(0, dtype=np.int64)
        order = self.draw(worker_seed=bool(state["drew_worker_seed"]))
        if state.get("ended", False):
            self.drawn.shuffler, self._finished = None, True
        if state.get("put_off", False):  # what is resumed is planned already
            return order
        self.generator.set_state(state["now"])  # peeks may have drawn since
        if self._second is not None and "order_now" in state:
            self._second.set_state(state["order_now"])
        return order
