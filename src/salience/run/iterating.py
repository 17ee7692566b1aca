"""Iterating: what `iter(loader)` returns."""

from __future__ import annotations

import gc
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
        self.raised = False
        """True once a `next` has raised."""
        self._drawn: Drawn | None = None
        """The order that a plain shuffle drew for it at iter()."""
        self._asked = 0
        """Batches of a plain epoch that a DataLoader's sampler would have been asked for."""
        with run.lock:
            other = run.iterator()
            if other is not None and other.in_use and other.raised:
                other = None
                gc.collect()  # what was raised in a worker keeps the frames it went through, and their iterator, in a cycle
                other = run.iterator()
            if other is None or not other.in_use:
                self._open()
                if run.redraws and not run.source.has_workers:
                    run.planning.order.put_off()
                self._check_end()
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
            if not self._started:
                self._arriving = run.begin() or self._arriving
            self.raised = self.raised or self._failed
            self._failed = self._started = True
            if self._batch is not None:
                batch, self._batch = self._batch, None
                run.take_back(batch)
            self._asked += 1
            self._check_end()
            if run.deciding is not None and (batches := run.go_on()) is not None:
                self.let_go()
                self._arriving = batches
            while self._batch is None:
                try:
                    self._batch = next(self._arriving)  # pyright: ignore[reportArgumentType]
                except StopIteration:
                    self._next_window()
            content = run.deliver(self._batch)
            self._failed = False
            return content

    def _begin(self) -> None:
        """Take the batches of a window, or peek if another iterator is in the middle of one or has taken over."""
        run, other = self._run, self._run.iterator()
        if self._started:
            if self._drawn is None or run.setup.pieces > 1:
                raise StateError("Another iterator of this loader has taken over; call iter(loader) again.")
            self._peeking = Peek(run, self._drawn, asked=self._asked)
        elif other is not None and other is not self and other.in_use:
            self._peeking = Peek(run, run.planning.peek(self._drawn, workers=run.source.has_workers))
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
        if not goes_on:
            self._asked = _asked(run)

    def _check_end(self) -> None:
        """Draw once more where the sampler of a DataLoader, which is asked for batches ahead, comes to its end."""
        run = self._run
        early = run.course.left == 1 and (run.setup.short_tail or run.source.has_workers)
        ends = _ends_after(run, self._asked) if run.plain else self._ends and early
        if ends and not run.cut:
            run.planning.order.finish()

    def _next_window(self) -> None:
        """Continue with the epoch's next window; raise StopIteration after its last one."""
        run = self._run
        self.let_go()
        if self._ends:
            self._done = True
            if not run.cut:
                run.planning.order.finish()
        if run.course.open:  # also where one of its batches, or every one, could not be made
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


class Peek(Iterator[Any]):
    """Batches that do not count, in an order of their own. Of an order that was begun, those after the first `asked`, which
    counts what workers are given ahead."""

    def __init__(self, run: Run, drawn: Drawn, asked: int | None = None) -> None:
        setup, source = run.setup, run.source
        if run.streaming is not None:
            raise StateError("A stream is read by one iterator at a time; let go of the other one first (del it).")
        self._run, self._drawn, self._asked = run, drawn, source.ahead if asked is None else asked
        order = drawn.ids[setup.rank :: setup.world]
        if setup.drop_last:
            order = order[: len(order) // setup.rank_batch * setup.rank_batch]
        order = order[(self._asked - source.ahead) * setup.rank_batch :]
        self._batches = source.peek(order, setup.rank_batch, drawn.state) if len(order) else iter(())

    def __next__(self) -> Any:
        """The next batch. An exception from one does not end it."""
        self._asked += 1
        if _ends_after(self._run, self._asked):
            self._drawn.finish()
        return next(self._batches)


def _asked(run: Run) -> int:
    """Batches of the epoch that a DataLoader's sampler has been asked for before the next one is."""
    course, setup = run.course, run.setup
    before = course.window % setup.pieces * setup.piece_size // setup.global_batch
    return before + len(course.delivered) + run.source.ahead


def _ends_after(run: Run, asked: int) -> bool:
    """True if the sampler of a DataLoader comes to its end when it is asked for that many batches."""
    return asked > run.setup.n // run.setup.global_batch
