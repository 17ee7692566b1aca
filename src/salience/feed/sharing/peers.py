"""The peers of a shared feed: jobs, which publish plans, and their workers, which take samples."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from salience.feed.sharing.demand import JobPlan
from salience.feed.sharing.pool import Key
from salience.feed.sharing.wire import packed

SECONDS_BETWEEN_CHECKS = 0.5
"""Seconds between two checks that a process is alive, if the system does not report its end."""


@dataclass(slots=True, eq=False)
class Peer:
    """One connection."""

    writer: asyncio.StreamWriter

    def tell(self, kind: str, words: Mapping[str, Any] | None = None, **arrays: npt.ArrayLike) -> None:
        """Send a message; a lost peer is noticed elsewhere."""
        with contextlib.suppress(OSError, RuntimeError):
            self.writer.write(packed(kind, words, **arrays))


@dataclass(slots=True, eq=False)
class Job:
    """A job: what it needs, and what it got."""

    number: int
    peer: Peer
    pid: int
    name: str
    plan: JobPlan
    serial: int = 0
    """Serial number of its window; answers to questions about an earlier one are dropped."""
    window: int = 0
    """Index of that window, as in its plan."""
    ahead: int = 4
    """Number of batches that its workers hold."""
    heard: float = field(default_factory=time.monotonic)
    """Time of its last message."""
    waited: float = 0.0
    """Seconds for which it was held up for slower jobs of its group in this window."""
    held_since: float = 0.0
    """Time since which it waits; 0 if it does not."""
    samples: int = 0
    hits: int = 0
    """Samples that were in memory in its form when it asked."""
    decoded: int = 0
    """Samples that it decoded itself."""


@dataclass(slots=True, eq=False)
class Worker:
    """A worker of a job, and the batch it is making."""

    peer: Peer
    job: Job
    serial: int = 0
    number: int = 0
    """Index of the batch in the window."""
    pending: dict[int, None] = field(default_factory=dict[int, None])
    """Samples of its batch that it has not received yet."""
    available: dict[int, None] = field(default_factory=dict[int, None])
    """Those of them for which there may be news."""
    listening: bool = False
    """True while it waits for an answer."""
    since: float = 0.0
    """Time since which it waits."""
    failed: str = ""
    pinned: list[Key] = field(default_factory=list[Key])
    """Samples that it was shown and has not copied yet."""
    claims: dict[Key, float] = field(default_factory=dict[Key, float])
    """Samples assigned to it, and since when."""
    filling: set[Key] = field(default_factory=set[Key])
    """Samples that it is writing into memory."""


def user_of(writer: asyncio.StreamWriter) -> int | None:
    """Id of the user at the other end; None if the system does not say."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    raw = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", raw)[1])


def watch_end(pid: int, call: Callable[[], None]) -> Callable[[], None]:
    """Call `call` on this event loop when the process ends for any reason; returns a function that stops the watch."""
    loop = asyncio.get_running_loop()
    try:
        descriptor = os.pidfd_open(pid)
    except (AttributeError, OSError):
        task = asyncio.ensure_future(_poll(pid, call))
        return task.cancel  # pyright: ignore[reportReturnType]

    def stop() -> None:
        if loop.remove_reader(descriptor):
            os.close(descriptor)

    loop.add_reader(descriptor, call)
    return stop


async def _poll(pid: int, call: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(SECONDS_BETWEEN_CHECKS)
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return call()
        except OSError:
            pass
