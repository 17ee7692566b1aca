"""Helper processes: started with a pipe to them, watched, and ended with the process that started them.

`receive` returns what a helper sends through its pipe. If the helper fails or dies, `receive` raises Lost with the reason. A
helper ends when its Child is closed or deleted, and when its parent dies, so that none is left behind.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any, Literal

SECONDS_BETWEEN_CHECKS = 1.0
"""Seconds between two checks of a helper that its parent is still alive."""
MAX_ERROR_CHARS = 500
"""Maximum number of characters of an exception's message that are passed on."""


class Lost(RuntimeError):
    """A helper process failed or has died; the message says how. Callers say what that means for the user."""


@dataclass(frozen=True, slots=True)
class _Failure:
    text: str


class Child:
    """A process that runs `work(pipe, *arguments)`."""

    def __init__(
        self,
        work: Callable[..., None],
        *arguments: Any,
        name: str,
        start: Literal["fork", "spawn"],
        farewell: float = 0.0,
        ends_itself: bool = False,
    ) -> None:
        """`farewell`: seconds it has to end by itself after a None in the pipe, before it is killed.
        `ends_itself`: it checks by itself whether its parent is alive, since it has work to finish when the parent dies."""
        if start == "spawn" and multiprocessing.current_process().name == name:
            raise SystemExit(1)  # a script without a guard, which starts everything again when it is imported
        context: Any = multiprocessing.get_context(start)
        self.pipe, theirs = context.Pipe()
        # A fork has a copy of our end, which would keep the pipe open; a new process has not.
        ours = self.pipe if start == "fork" else None
        arguments = (theirs, ours, None if ends_itself else os.getpid(), work, arguments)
        self.process = context.Process(target=_main, args=arguments, name=name, daemon=True)
        self._owner, self._guard, self._watch = os.getpid(), start == "spawn", None
        try:
            self.process.start()
        except BaseException:
            self.pipe.close()
            raise
        finally:
            theirs.close()
        self.close = weakref.finalize(self, _close, self.pipe, self.process, self._owner, farewell)
        """End the process and release everything it used."""

    @property
    def mine(self) -> bool:
        """True if this process may talk to the helper: it is open, and this very process started it."""
        return self.close.alive and self._owner == os.getpid()

    @property
    def alive(self) -> bool:
        """True until the process has ended. This uses its sentinel, as `on_end` does: `is_alive` still returns True for a
        moment after a process has closed its files."""
        return self.mine and not wait([self.process.sentinel], timeout=0)

    def on_end(self, call: Callable[[], None]) -> None:
        """Call `call` from a thread when the process ends for any reason. It must not hold this Child."""
        ends = os.dup(self.process.sentinel)  # the process object may be gone before the thread looks
        self._watch = threading.Thread(target=_watch, args=(ends, call), daemon=True)
        self._watch.start()

    def end(self) -> None:
        """Close, and wait until the call of `on_end` has returned."""
        self.close()
        if self._watch is not None:
            self._watch.join()

    def send(self, message: Any) -> None:
        """Send a message. Raises Lost if the process has died."""
        try:
            self.pipe.send(message)
        except OSError as cause:
            raise Lost(self._last_words()) from cause

    def receive(self) -> Any:
        """Wait for the next message. Raises Lost if the process failed or has died."""
        try:
            message = self.pipe.recv()
        except (EOFError, OSError) as cause:
            raise Lost(self._how_it_ended()) from cause
        if isinstance(message, _Failure):
            raise Lost(message.text)
        return message

    def _last_words(self) -> str:
        """The reason why it died; messages that it sent before are dropped."""
        try:
            while True:
                self.receive()
        except Lost as words:
            return str(words)

    def _how_it_ended(self) -> str:
        self.process.join(1)  # its pipe is closed: it is gone, or about to be
        code = self.process.exitcode
        guard = ": a script that starts processes trains under `if __name__ == '__main__':`"
        return f"its process ended with code {code}{guard if code == 1 and self._guard else ''}"


def _main(pipe: Any, theirs: Any, parent: int | None, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """The main function of the process."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # those are for the parent, which ends this
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if theirs is not None:
        theirs.close()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    try:
        work(pipe, *arguments)
    except (EOFError, ConnectionError):
        pass  # nobody listens any more
    except Exception as error:
        with contextlib.suppress(OSError):
            pipe.send(_Failure(f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]))


def _end_with(parent: int) -> None:
    """Exit when the parent dies. The pipe alone does not show that while a process forked from the parent holds a copy."""
    while os.getppid() == parent:
        time.sleep(SECONDS_BETWEEN_CHECKS)
    os._exit(1)


def _watch(ends: int, call: Callable[[], None]) -> None:
    wait([ends])
    os.close(ends)
    call()


def _close(pipe: Any, process: Any, owner: int, farewell: float) -> None:
    mine = os.getpid() == owner
    if mine and farewell:
        with contextlib.suppress(OSError):
            pipe.send(None)  # processes forked meanwhile have this end too, so that closing it alone tells nothing
    pipe.close()
    if mine:  # a forked process only lets go of its copy
        if farewell:
            process.join(farewell)
        process.kill()
        process.join()
        process.close()
