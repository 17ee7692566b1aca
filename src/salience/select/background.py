"""Work in parallel with the training: prepared at one window's edge, run in a thread, its result taken at the next edge."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Background(Generic[T]):
    """A function without arguments whose result does not depend on when it runs."""

    def __init__(self, work: Callable[[], T]) -> None:
        """`work` must read nothing that changes meanwhile, and spend its time where Python lets other threads run."""
        self._work = work
        self._future: Future[T] | None = None

    def begin(self) -> None:
        """Start, unless that was done before. Not while processes are being forked: they would inherit held locks."""
        if self._future is None:
            pool = ThreadPoolExecutor(1, thread_name_prefix="salience")
            self._future = pool.submit(self._work)
            pool.shutdown(wait=False)

    def result(self) -> T:
        """Wait for the result; work that was never begun is done here and now."""
        if self._future is None:
            self._future = Future()
            self._future.set_result(self._work())
        return self._future.result()
