"""Iterating: what `iter(loader)` returns."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, NoReturn

from salience.errors import StateError
from salience.run.order import Drawn
from salience.run.part import Batch
from salience.run.run import Run


class BatchIterator(Iterator[Any]):
    """The batches of one epoch as the training loop receives them: those of one window, or of several in a row.

    After an exception from `next` the rest of the window can still be had. An iterator that is taken while another one is in
    the middle of its window (`next(iter(loader))` inside the loop, `zip(loader, loader)`) is a peek: its batches come in an
    order of their own, are not recorded and do not count.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._resumes = run, run.resumes
        self._arriving: Iterator[Batch] | None = None
        self._peeking: Iterator[Any] | None = None
        self._batch: Batch | None = None
        """The batch the loop is working on."""
        self._done = self._failed = self._ends = self._started = False
        self._drawn: Drawn | None = None
        """The order that a plain shuffle drew for it at iter()."""
        with run.lock:
            other = run.iterator()
            if other is None or not other.in_use:
                self._open()
            elif run.plain and not run.source.keeps_workers:
                self._drawn = run.planning.order.beside(workers=run.source.has_workers)

    def __iter__(self) -> BatchIterator:
        return self

    def __len__(self) -> int:
        return len(self._run)

    @property
    def in_use(self) -> bool:
        """True from its first batch until it has said that there is no more; not if its last `next` raised, after which most
        loops are left."""
        stale = self._resumes != self._run.resumes
        return self._arriving is not None and not self._failed and not stale and not self._run.course.pending

    @property
    def complete(self) -> bool:
        """True once every batch of the epoch was delivered, whether or not the loop has run into the end."""
        course = self._run.course
        return self._ends and (course.complete or not course.open)

    def __next__(self) -> Any:
        run = self._run
        with run.lock:
            if self._done:
                raise StopIteration
            if self._peeking is None and self._resumes != run.resumes:
                raise StateError("This iterator was taken before load_state_dict(); call iter(loader) again.")
            if self._peeking is None and self._arriving is None:
                self._begin()
            if self._peeking is not None:
                content = next(self._peeking)
                run.recording.peeked = True
                return content
            self._failed = self._started = True
            if self._batch is not None:
                batch, self._batch = self._batch, None
                run.take_back(batch)
            if self._ends and run.course.left == 1 and not run.cut and (run.setup.short_tail or run.source.has_workers):
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
        """Take the batches of a window, or peek if another iterator is in the middle of one."""
        run, other = self._run, self._run.iterator()
        if other is not None and other is not self and other.in_use:
            self._peeking = run.peek(self._drawn)
        elif self._started:
            raise StateError("Another iterator of this loader has taken over; call iter(loader) again.")
        else:
            self._open()

    def _open(self, *, goes_on: bool = False) -> None:
        """Open a window whose batches count: the next one, or the one opened at iter() if no batch of it was taken."""
        run, other = self._run, self._run.iterator()
        if other is not None and other is not self:
            other.let_go()
        run.iterator = weakref.ref(self)
        self._arriving = run.open(goes_on=goes_on, drawn=self._drawn)
        self._ends = run.ends_epoch
        self._drawn = run.planning.order.drawn if run.redraws else None

    def _next_window(self) -> None:
        """Continue with the epoch's next window; raise StopIteration after its last one."""
        run = self._run
        self.let_go()
        if self._ends:
            self._done = True
            if not run.cut:
                run.planning.order.finish()
        if run.course.complete or (self._done and run.course.open):
            run.close()
        if self._done:
            raise StopIteration
        self._open(goes_on=True)

    def let_go(self) -> None:
        """Give up the batches, so that the workers that make them may stop."""
        arriving, self._arriving = self._arriving, None
        close = getattr(arriving, "close", None)
        if close is not None:
            close()

    def __reduce__(self) -> NoReturn:
        raise StateError("An iterator over a loader cannot be copied or pickled; call iter(loader) for another one.")

    def __del__(self) -> None:
        if getattr(self, "_arriving", None) is not None:
            self.let_go()
