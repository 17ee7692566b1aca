"""`quorum`: an averaging point is over when enough ranks have arrived; what the others send joins the next one.

The first rank keeps the order. Its threads listen to each rank, add up what arrives, and answer with every update that rank has
missed, so that all ranks make the same updates in the same order and share one anchor:

    a round ends    when `quorum` ranks wait in it, and none has missed more than `staleness` rounds
    its update      sum of what they sent / number of ranks that wait
    together        a rank that asks for equal parameters waits until all have asked

Everything travels as bfloat16 with the rounding errors kept, from rank to rank (no collective: a late rank would block it).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from salience.errors import RankError
from salience.gradients.exchange import Averager, rounded
from salience.gradients.link import Link

REGULAR, TOGETHER, LEAVE = range(3)
"""The requests that a rank can make."""


@dataclass(kw_only=True, slots=True)
class Rounds:
    """The order of updates, as values: which ranks wait, what has been added up, and what each rank has not received yet."""

    world: int
    quorum: int
    staleness: int
    waiting: dict[int, int] = field(default_factory=dict[int, int])
    """The request of each waiting rank."""
    total: Tensor | None = None
    """Sum of what has arrived since the last round ended."""
    error: Tensor | None = None
    """Rounding errors of the updates so far."""
    heard: list[int] = field(default_factory=list[int])
    """Number of updates that each rank has."""
    sent: list[int] = field(default_factory=list[int])
    """The round in which each rank last sent something."""
    updates: list[Tensor] = field(default_factory=list[Tensor])

    def __post_init__(self) -> None:
        self.heard, self.sent = [0] * self.world, [0] * self.world

    def come(self, rank: int, asks: int, values: Tensor) -> dict[int, list[Tensor]]:
        """A rank has arrived; returns the answers that can be given now, by rank."""
        self.waiting[rank] = asks
        self.sent[rank] = len(self.updates)
        self.total = values.float() if self.total is None else self.total + values.float()
        late = [
            r for r in range(self.world) if r not in self.waiting and len(self.updates) - self.sent[r] >= self.staleness
        ]
        together = len(self.waiting) == self.world and all(asks == TOGETHER for asks in self.waiting.values())
        if not together and (len(self.waiting) < self.quorum or late):
            return {}
        update, self.error = rounded(self.total / len(self.waiting), self.error)
        self.total = None
        self.updates.append(update)
        answers: dict[int, list[Tensor]] = {}
        for one, asks in list(self.waiting.items()):
            self.sent[one] = len(self.updates)
            if together or asks == REGULAR:
                answers[one] = self.updates[self.heard[one] :]
                self.heard[one] = len(self.updates)
                del self.waiting[one]
        self._forget()
        return answers

    def _forget(self) -> None:
        """Drop updates that all ranks have; their places stay, so that numbers keep their meaning."""
        for i in range(min(self.heard)):
            self.updates[i] = self.updates[i][:0]


class Quorum(Averager):
    """Sends this rank's progress to the first rank and returns the updates to make."""

    residuals = ("own",)

    def __init__(self, link: Link, *, quorum: int | None = None, staleness: int = 2) -> None:
        """`quorum` None = more than half of the ranks. `staleness` is how many rounds a rank may miss in a row."""
        self.link = link
        self.own: Tensor | None = None
        """Rounding errors of what this rank sent."""
        wanted = link.world // 2 + 1 if quorum is None else min(quorum, link.world)
        self._mine: SimpleQueue[list[Tensor] | str] = SimpleQueue()
        self._lock = threading.Lock()
        self._rounds = Rounds(world=link.world, quorum=wanted, staleness=staleness) if link.rank == 0 else None
        self._size = 0

    def __call__(self, vector: Tensor, count: int, *, together: bool = False) -> list[Tensor]:
        del count  # ranks need not be equally far
        if not self._size:
            self._size = len(vector)
            for rank in range(1, self.link.world if self.link.rank == 0 else 0):
                threading.Thread(target=self._serve, args=(rank,), daemon=True, name=f"salience-quorum-{rank}").start()
        values, self.own = rounded(vector, self.own)
        self.link.sent += values.nbytes
        asks = TOGETHER if together else REGULAR
        return [update.float() for update in self._ask(asks, values)]

    def leave(self) -> None:
        """Tell the first rank that nothing more will come."""
        if self._size and self.link.rank:
            dist.send(torch.tensor([LEAVE]), group=self.link.group, group_dst=0)

    def _ask(self, asks: int, values: Tensor) -> list[Tensor]:
        if self.link.rank:
            self._send(torch.tensor([asks]), 0)
            self._send(values, 0)
            self._receive(count := torch.zeros(1, dtype=torch.int64), 0)
            if int(count) < 0:
                raise RankError(self.link.notes.found() or "The first rank could not go on; look for its first error.")
            came = [torch.empty_like(values) for _ in range(int(count))]
            for one in came:
                self._receive(one, 0)
            return came
        self._come(0, asks, values)
        try:
            answer = self._mine.get(timeout=self.link.deadline)
        except Empty:
            answer = (
                f"Too few ranks came to an averaging point in {self.link.deadline:g} s; look for their first error."
            )
        if isinstance(answer, str):
            raise RankError(answer)
        return answer

    def _serve(self, rank: int) -> None:
        """Serve one rank until it leaves."""
        try:
            while True:
                dist.recv(asks := torch.zeros(1, dtype=torch.int64), group=self.link.group, group_src=rank)
                if int(asks) == LEAVE:
                    return
                self._receive(values := torch.empty(self._size, dtype=torch.bfloat16), rank)
                self._come(rank, int(asks), values)
        except RuntimeError as cause:
            said = str(cause) if isinstance(cause, RankError) else f"{_lost(rank)} ({str(cause).splitlines()[0]})."
            self.link.notes.leave(said)
            self._mine.put(said)

    def _come(self, rank: int, asks: int, values: Tensor) -> None:
        assert self._rounds is not None
        with self._lock:
            for one, updates in self._rounds.come(rank, asks, values).items():
                if one == 0:
                    self._mine.put(updates)
                    continue
                self.link.sent += sum(update.nbytes for update in updates)
                for tensor in (torch.tensor([len(updates)]), *updates):
                    self._send(tensor, one)

    def _send(self, tensor: Tensor, rank: int) -> None:
        self._wait(lambda: dist.isend(tensor, group=self.link.group, group_dst=rank), rank)

    def _receive(self, tensor: Tensor, rank: int) -> None:
        self._wait(lambda: dist.irecv(tensor, group=self.link.group, group_src=rank), rank)

    def _wait(self, begin: Callable[[], Any], rank: int) -> None:
        """Until the deadline, in one piece: a time-out of Gloo closes the connection."""
        try:
            begin().wait(timedelta(seconds=self.link.deadline))
        except RuntimeError as cause:
            me, note = self.link.rank, self.link.notes.found()
            if note is None or note.startswith(_lost(me)):  # what the other side made of the closed connection
                note = (
                    f"Rank {me} lost rank {rank}, or waited {self.link.deadline:g} s for it, while parameters were averaged; "
                    "look for its first error."
                )
            raise RankError(note) from cause


def _lost(rank: int) -> str:
    return f"Rank {rank} was lost while parameters were averaged"
