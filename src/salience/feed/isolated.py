"""Runs work in a separate forked process.

The threads of obstore do not survive a fork: a worker forked from a process that has used it would hang. A process that
may fork loader workers therefore sends its requests through another one.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from salience.child import Child, Lost
from salience.errors import SalienceError, StoreError

A = TypeVar("A")
Q = TypeVar("Q")

_user: int | None = None
"""Id of the process that first used obstore; inherited by processes forked from it."""


def needed() -> bool:
    """True if this process may fork workers (on Linux, and not as a worker) and has not used obstore itself."""
    return sys.platform == "linux" and not multiprocessing.current_process().daemon and _user != os.getpid()


def use(url: str) -> None:
    """Note that this process uses obstore; refuses if that would hang."""
    global _user
    if _user not in (None, os.getpid()):
        raise StoreError(
            f"A store was used in the main process before this one was forked from it, and obstore does not survive a fork; "
            f"to read {url} here, pass multiprocessing_context='forkserver' (or 'spawn') to the Loader."
        )
    _user = os.getpid()


class Isolated(Generic[Q, A]):
    """`work` as a function that runs in a separate process, until `close`."""

    def __init__(self, work: Callable[[Q], A]) -> None:
        self._child = Child(_serve, work, name="salience-store", start="fork")
        self._lock = threading.Lock()
        self.close = self._child.close

    @property
    def alive(self) -> bool:
        """True if this process may talk to it: it is open, and this very process started it."""
        return self._child.mine

    def __call__(self, question: Q) -> A:
        with self._lock:
            try:
                self._child.send(question)
                done, answer = self._child.receive()
            except (
                BaseException
            ) as error:  # also an interrupt, after which the next answer would belong to this question
                self.close()
                if isinstance(error, Lost):
                    raise StoreError("The process that reads from the store died; try again.") from None
                raise
        if not done:
            raise answer
        return answer


def once(work: Callable[[], A]) -> A:
    """The result of `work`, run in a separate process."""
    if not needed():
        return work()
    process = Isolated[None, A](lambda _: work())
    try:
        return process(None)
    finally:
        process.close()


def _serve(pipe: Any, work: Callable[[Any], Any]) -> None:
    while True:
        question = pipe.recv()
        try:
            answer = True, work(question)
        except SalienceError as error:
            answer = False, error
        except Exception as error:
            answer = False, StoreError(f"The store could not be asked: {type(error).__name__}.")
        pipe.send(answer)
