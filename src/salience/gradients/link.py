"""The ranks that exchange gradients: the few collectives they use, each with a deadline, and a way to report trouble.

A rank that cannot continue leaves a note in the store of the process group before it raises. Ranks that wait for it check the
store every half second and raise the same error, instead of waiting for the group's timeout. They leave a mark there too, so
that at the deadline the ranks without one can be named.
"""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from salience.errors import RankError

LOOK_EVERY = 0.5
"""Seconds between two checks for a note of another rank."""


class Notes:
    """Notes about trouble that one rank leaves for the others, in the store of the process group."""

    def __init__(self, group: Any, key: str) -> None:
        self._store: Any = None
        self._key = f"salience/sync/{key}"
        with contextlib.suppress(RuntimeError):  # a group without a store: then the time-out must do
            group = dist.group.WORLD if group is None else group
            self._store = group.get_group_store() if hasattr(group, "get_group_store") else None

    def leave(self, sentence: str) -> None:
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # the store went with the rank that kept it
                self._store.set(self._key, sentence)

    def found(self) -> str | None:
        """The message that another rank has left, or None."""
        with contextlib.suppress(RuntimeError):
            if self._store is not None and self._store.check([self._key]):
                return self._store.get(self._key).decode()
        return None

    def mark(self, place: str, rank: int, count: int) -> None:
        """Say that a rank waits in the `count`th collective of a place."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                self._store.set(f"{self._key}/{place}/{rank}", str(count))

    def missing(self, place: str, world: int, count: int) -> list[int]:
        """Ranks that have not said so; empty if that cannot be known."""
        found: list[int] = []
        with contextlib.suppress(RuntimeError):
            for key, rank in ((f"{self._key}/{place}/{rank}", rank) for rank in range(world if self._store else 0)):
                if not self._store.check([key]) or int(self._store.get(key)) < count:
                    found.append(rank)
        return found


class Link:
    """One process group, as seen by exchanges. Every method except `wait` is collective."""

    def __init__(self, group: Any, notes: Notes, deadline: float) -> None:
        self.group, self.notes, self.deadline = group, notes, deadline
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        nccl = dist.get_backend(group) == "nccl"
        self.device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
        """The device that tensors must be on to be sent."""
        self.sent = 0.0
        """Bytes that this rank has sent, by the arithmetic of a ring."""
        self._waits = 0
        """Number of collectives that were waited for, in the same order on all ranks."""

    def start_mean(self, tensor: Tensor) -> Any:
        """Start replacing `tensor` by its mean over the ranks; pass the result to `wait`."""
        tensor.div_(self.world)
        self.sent += 2 * (self.world - 1) / self.world * tensor.nbytes
        return dist.all_reduce(tensor, group=self.group, async_op=True)

    def mean(self, tensor: Tensor) -> Tensor:
        """Replace `tensor` by its mean over the ranks, bitwise the same on all."""
        self.wait(self.start_mean(tensor))
        return tensor

    def gather(self, row: Tensor) -> Tensor:
        """The rows of all ranks, [world, n]."""
        out = torch.empty(self.world, row.numel(), dtype=row.dtype, device=row.device)
        self.sent += (self.world - 1) * row.nbytes
        self.wait(dist.all_gather(list(out.unbind()), row, group=self.group, async_op=True))
        return out

    def shuffle(self, rows: Tensor) -> Tensor:
        """Send row i of [world, n] to rank i; returns the rows that arrived, by rank."""
        out = torch.empty_like(rows)
        self.sent += (self.world - 1) * rows[0].nbytes
        self.wait(dist.all_to_all_single(out.view(-1), rows.reshape(-1), group=self.group, async_op=True))
        return out

    def start_broadcast(self, tensor: Tensor) -> Any:
        """Start to replace `tensor` by the tensor of the group's first rank; pass the result to `wait`."""
        self.sent += tensor.nbytes if self.rank == 0 else 0
        return dist.broadcast(tensor, dist.get_global_rank(self.group, 0), group=self.group, async_op=True)

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Replace `tensor` by the tensor of the group's first rank."""
        self.wait(self.start_broadcast(tensor))
        return tensor

    def start_collect(self, tensor: Tensor) -> Any:
        """Start turning `tensor` into the mean over the ranks on the group's first rank; on the others it becomes invalid."""
        self.sent += tensor.nbytes if self.rank else 0
        return dist.reduce(
            tensor.div_(self.world), dist.get_global_rank(self.group, 0), group=self.group, async_op=True
        )

    def check_equal(self, digest: int) -> None:
        """Check that all ranks have the same parameters."""
        digests: list[int] = self.gather(torch.tensor([digest])).flatten().tolist()
        if len(set(digests)) > 1:
            raise RankError(
                f"Parameters differ between ranks after averaging (checksums {digests}); did the loop change them between "
                "steps on one rank only? Start from one checkpoint on all ranks."
            )

    def wait(self, work: Any) -> None:
        """Wait for a collective until the deadline, or until a rank reports that it cannot take part.

        On a GPU this makes the current stream wait, not the host: nothing is synchronised.
        """
        if self.device.type == "cuda":
            work.wait()
            return
        end, name = time.monotonic() + self.deadline, str(getattr(self.group, "group_name", ""))
        self._waits += 1
        while True:
            try:
                work.wait(timedelta(seconds=LOOK_EVERY))
                return
            except RuntimeError as cause:
                said = self.notes.found()
                if said is not None:
                    raise RankError(said) from None
                if work.is_completed():
                    self._settle(work)
                    return
                self.notes.mark(name, self.rank, self._waits)
                if time.monotonic() > end:
                    missing = self.notes.missing(name, self.world, self._waits)
                    whom = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}" if missing else "the others"
                    raise RankError(
                        f"Rank {self.rank} of {self.world} waited {self.deadline:g} s for gradients of {whom}; look for the "
                        "first error there. Every rank must make the same number of steps."
                    ) from cause

    def _settle(self, work: Any) -> None:
        """Handle a collective that is over: it ended while we checked for notes, or it failed."""
        try:
            work.wait(timedelta(seconds=LOOK_EVERY))
        except RuntimeError as cause:
            time.sleep(LOOK_EVERY)  # a note may be on its way
            raise RankError(
                self.notes.found()
                or f"Rank {self.rank} of {self.world} lost another rank while gradients travelled; look for its first error."
            ) from cause
