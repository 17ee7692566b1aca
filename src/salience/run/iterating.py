"""Iterating: what `iter(loader)` returns, and where its batches come from."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import Any, NoReturn, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from salience.errors import StateError
from salience.plan import Shard
from salience.run.order import Drawn
from salience.run.part import Batch
from salience.run.run import Run


class BatchSource(Protocol):
    """Makes the planned batches: the workers of a DataLoader, or ids alone."""

    @property
    def has_workers(self) -> bool: ...

    @property
    def keeps_workers(self) -> bool:
        """True if worker processes, and with them their seeds, are kept from window to window."""
        ...

    def start(self, shard: Shard, done: frozenset[int]) -> Iterator[Batch]:
        """The batches of `shard` but for those in `done`; an exception from one of them does not end it."""
        ...

    def peek(self, order: npt.NDArray[np.int64], size: int, seeds: Tensor) -> Iterator[Any]:
        """What the loop would receive for these ids, in batches of `size`, apart from the run.

        `seeds` is the state of the generator that workers are seeded from.
        """
        ...


class Iterators:
    """Hands out iterators over one run. At most one at a time counts; one taken beside it is a peek."""

    def __init__(self, run: Run, source: BatchSource) -> None:
        self.run, self.source = run, source
        self.serial = 0
        """Changes when every iterator handed out so far has become stale."""
        self.lock = threading.RLock()
        """Held while an iterator is asked for a batch: several threads may iterate."""
        self._counts: weakref.ref[BatchIterator] | None = None
        self._peeks = 0

    def other(self, one: BatchIterator) -> BatchIterator | None:
        """Another iterator whose batches count and that is still referenced."""
        found = None if self._counts is None else self._counts()
        return None if found is one else found

    def claim(self, one: BatchIterator, *, goes_on: bool, back: bool) -> Iterator[Batch]:
        """Open a window for `one`, whose batches count from now on: the next one, `goes_on` = in the same epoch.

        `back` = the one it had opened before another iterator planned that anew, and delivered no batch.
        """
        other = self.other(one)
        if other is not None:
            other.let_go()
        self._counts = weakref.ref(one)
        run, source = self.run, self.source
        if back:
            shard = run.open_again(one.drawn if source.has_workers else None)
        else:
            draws = not (run.course.started and source.keeps_workers)
            shard = run.open(worker_seed=draws, workers=source.has_workers, goes_on=goes_on)
        return source.start(shard, frozenset(run.course.delivered))

    def peek(self, before: Drawn | None) -> Iterator[Any]:
        """Batches that do not count, in an order of their own: the one drawn `before`, at iter(), if there is one."""
        self._peeks += 1
        setup = self.run.setup
        drawn = self.run.planning.peek(self._peeks, before, workers=self.source.has_workers)
        order = drawn.ids[setup.rank :: setup.world]
        if setup.drop_last:
            order = order[: len(order) // setup.rank_batch * setup.rank_batch]
        if len(order):
            yield from self.source.peek(order, setup.rank_batch, drawn.state)
        next(drawn.rest, None)  # a plain shuffle draws once more at its end


class BatchIterator(Iterator[Any]):
    """The batches of one epoch as the training loop receives them: those of one window, or of several in a row.

    After an exception from `next` the rest of the window can still be had. An iterator that is taken while another one is in
    the middle of its window (`next(iter(loader))` inside the loop, `zip(loader, loader)`) is a peek: its batches come in an
    order of their own, are not recorded and do not count.
    """

    def __init__(self, iterators: Iterators) -> None:
        self._iterators, self._serial = iterators, iterators.serial
        self._arriving: Iterator[Batch] | None = None
        self._peeking: Iterator[Any] | None = None
        self._batch: Batch | None = None
        """The batch the loop is working on."""
        self._done = self._failed = self._ends = self._claimed = self._started = False
        self.drawn: Drawn | None = None
        """The order that a plain shuffle drew for it at iter()."""
        with iterators.lock:
            other = iterators.other(self)
            if other is None or not other.in_use:
                self._claim()

    def __iter__(self) -> BatchIterator:
        return self

    def __len__(self) -> int:
        return len(self._iterators.run)

    @property
    def in_use(self) -> bool:
        """True from its first batch until it has said that there is no more; not if its last `next` raised, after which most
        loops are left."""
        stale = self._serial != self._iterators.serial
        return self._arriving is not None and not self._failed and not stale and not self._iterators.run.course.pending

    @property
    def complete(self) -> bool:
        """True once every batch of the epoch was delivered, whether or not the loop has run into the end."""
        course = self._iterators.run.course
        return self._ends and (course.complete or not course.open)

    def __next__(self) -> Any:
        with self._iterators.lock:
            run, source = self._iterators.run, self._iterators.source
            if self._peeking is None:
                self._begin()
            if self._peeking is not None:
                content = next(self._peeking)
                run.recording.peeked = True
                return content
            self._failed = self._started = True
            if self._batch is not None:
                batch, self._batch = self._batch, None
                run.take_back(batch)
            if self._ends and run.course.left == 1 and (run.setup.short_tail or source.has_workers):
                run.planning.order.finish()  # the sampler of a DataLoader comes to its end before the last batch is read
            while self._batch is None:
                try:
                    self._batch = next(self._arriving)  # pyright: ignore[reportArgumentType]
                except StopIteration:
                    self._next_window()
            content = run.deliver(self._batch)
            self._failed = False
            return content

    def _begin(self) -> None:
        """Have batches to come, if there are any, or peek where another iterator is in the middle of its window."""
        if self._done:
            raise StopIteration
        if self._serial != self._iterators.serial:
            raise StateError("This iterator was taken before load_state_dict(); call iter(loader) again.")
        if self._arriving is not None:
            return
        other = self._iterators.other(self)
        if other is not None and other.in_use:
            self._peeking = self._iterators.peek(self.drawn)
        elif self._started:
            raise StateError("Another iterator of this loader has taken over; call iter(loader) again.")
        else:
            self._claim(back=self._claimed and self._iterators.run.course.pending)

    def _claim(self, *, goes_on: bool = False, back: bool = False) -> None:
        """Open a window, whose batches count."""
        self._arriving, self._claimed = self._iterators.claim(self, goes_on=goes_on, back=back), True
        run = self._iterators.run
        self._ends = run.ends_epoch
        self.drawn = run.planning.order.drawn if run.redraws else None

    def _next_window(self) -> None:
        """Go on with the epoch's next window; StopIteration after its last one."""
        run = self._iterators.run
        self.let_go()
        if self._ends:
            self._done = True
            run.planning.order.finish()
        if run.course.complete or (self._done and run.course.open):
            run.close()
        if self._done:
            raise StopIteration
        self._claim(goes_on=True)

    def let_go(self) -> None:
        """Give the batches up: workers that make them may stop."""
        arriving, self._arriving = self._arriving, None
        if arriving is not None:
            close = getattr(arriving, "close", None)
            if close is not None:
                close()
            self._iterators.run.watching.steps.pause()

    def __reduce__(self) -> NoReturn:
        raise StateError("An iterator over a loader cannot be copied or pickled; call iter(loader) for another one.")

    def __del__(self) -> None:
        if getattr(self, "_arriving", None) is not None:
            self.let_go()
