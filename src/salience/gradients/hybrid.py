"""`hybrid`: helper ranks add up a share of every bucket, as shards of a parameter server; the workers all-reduce the rest.

    bucket     [ all-reduced by the workers | helper 0 | helper 1 | ... ]
    a helper   gathers a piece from all workers, takes the mean, and scatters it, while the next piece is on its way

One of n workers sends 2(n-1)/n of a bucket by all-reduce, but only the bucket itself to helpers, so helpers save up to half of
the traffic with many workers, and nothing with two (Jiang et al. 2020, BytePS). The share is measured at the start. Everything
uses gather and scatter of torch.distributed, in groups of the workers and one helper.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from salience.errors import ConfigError, RankError
from salience.gradients.checks import DTYPES, check_helpers
from salience.gradients.exchange import Exchange
from salience.gradients.link import Link, Notes

PIECE = 1 << 16
"""Number of values sent at once: while a helper adds up one piece, the next is on its way."""
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares of a bucket that are measured."""
SAMPLE = 1 << 20
"""Number of values of the message that times them."""
BETTER = 1.03
"""Helpers are left out unless they make the exchange this many times as fast as all-reduce alone."""


class Shard:
    """The links to one helper: up for what workers send, down for its answers."""

    def __init__(self, up: Link, down: Link, workers: Sequence[int], helper: int) -> None:
        self.up, self.down = up, down
        ranks = sorted([*workers, helper])
        self.helper, self.first = helper, workers[0]
        self.workers = [ranks.index(rank) for rank in workers]
        """Number of workers in the group."""

    def announce(self, values: int, dtype: torch.dtype) -> Any:
        """Tell the helper how many values come; 0 = nothing more will come."""
        header = torch.tensor([values, DTYPES.index(dtype)])
        return dist.broadcast(header, self.first, group=self.up.group, async_op=True)

    def send(self, flat: Tensor) -> list[tuple[Link, Any]]:
        """Begin to replace `flat` by its mean over the workers; returns what to wait for."""
        found = [(self.up, self.announce(len(flat), flat.dtype))]
        for piece in flat.split(PIECE):
            self.up.sent += piece.nbytes
            found.append((self.up, dist.gather(piece, None, self.helper, group=self.up.group, async_op=True)))
        for piece in flat.split(PIECE):
            found.append((self.down, dist.scatter(piece, None, self.helper, group=self.down.group, async_op=True)))
        return found

    def serve(self) -> bool:
        """On the helper: compute the mean of what comes next. False if nothing more comes."""
        header = torch.zeros(2, dtype=torch.int64)
        self.up.wait(dist.broadcast(header, self.first, group=self.up.group, async_op=True))
        values, kind = header.tolist()
        if not values:
            return False
        rows = torch.zeros(self.up.world, values, dtype=DTYPES[kind])
        arriving: list[tuple[list[Tensor], Any]] = []
        for pieces in zip(*(row.split(PIECE) for row in rows), strict=True):
            mine = pieces[self.up.rank]
            arriving.append((
                list(pieces), dist.gather(mine, list(pieces), self.helper, group=self.up.group, async_op=True),
            ))  # fmt: skip
        leaving: list[Any] = []
        for pieces, work in arriving:
            self.up.wait(work)
            mean = torch.stack([pieces[i] for i in self.workers]).float().mean(0).to(pieces[0].dtype)
            self.down.sent += mean.nbytes * len(self.workers)
            answers = [mean] * self.down.world
            out = torch.empty_like(mean)
            leaving.append(dist.scatter(out, answers, self.helper, group=self.down.group, async_op=True))
        for work in leaving:
            self.down.wait(work)
        return True


def make_shards(workers: Sequence[int], helpers: Sequence[int], notes: Notes, deadline: float) -> list[Shard]:
    """The shards that this rank takes part in: all for a worker, its own for a helper. Collective over all ranks.

    All ranks create all groups: names of groups created only by their members depend on how many each has, which differs.
    """
    found: list[Shard] = []
    for helper in helpers:
        ranks, patience = sorted([*workers, helper]), timedelta(seconds=deadline)
        groups = [dist.new_group(ranks, timeout=patience, backend="gloo") for _ in range(2)]
        if dist.get_rank() in ranks:
            up, down = (Link(group, notes, deadline) for group in groups)
            found.append(Shard(up, down, workers, helper))
    return found


class Hybrid(Exchange):
    """The exchange of a worker: the mean, bitwise the same on all workers; sums are rounded in a different order."""

    lossy = False

    def __init__(self, link: Link, shards: Sequence[Shard], share: float | None, device: torch.device) -> None:
        """`share` of every bucket goes to the helpers; None measures which is fastest. Collective."""
        self.link, self.shards = link, shards
        self._works: list[tuple[Link, Any]] = []
        self.times: dict[float, float] = {}
        """Seconds of a message, by share."""
        if share is None:
            self.times = {one: self._time(one, device) for one in SHARES}
            share = best_share(self.times)
        self.share = share

    def begin(self, bucket: Tensor) -> None:
        self._send(bucket, self.share)

    def finish(self, gradients: Sequence[Tensor]) -> None:
        works, self._works = self._works, []
        for link, work in works:
            link.wait(work)

    def _send(self, bucket: Tensor, share: float) -> None:
        cut = len(bucket) - round(share * len(bucket))
        if cut:
            self._works.append((self.link, self.link.start_mean(bucket[:cut])))
        for shard, part in zip(self.shards, bucket[cut:].tensor_split(len(self.shards)), strict=True):
            if len(part):
                self._works += shard.send(part)

    def _time(self, share: float, device: torch.device) -> float:
        """Seconds of a message: the better of two, as the mean over workers. Collective."""
        found: list[float] = []
        for _ in range(2):
            message = torch.zeros(SAMPLE, device=device)
            self.link.mean(torch.zeros(1, device=self.link.device)).item()  # begin together
            start = time.perf_counter()
            self._send(message, share)
            self.finish([])
            found.append(time.perf_counter() - start)
        return float(self.link.mean(torch.tensor([min(found)], device=self.link.device)))


def best_share(times: Mapping[float, float]) -> float:
    """The share with the shortest time; 0 unless that is clearly shorter than all-reduce alone."""
    best = min(times, key=lambda share: times[share])
    return best if times[best] * BETTER <= times[0.0] else 0.0


def serve(helpers: Sequence[int], *, deadline: float = 1800.0) -> None:
    """Work as a helper of `sync(mode="hybrid", helpers=helpers)` until the workers close it. Called by each helper rank.

    All other ranks train. `deadline` is the longest pause in seconds between two steps of the workers.
    """
    if not dist.is_initialized():
        raise ConfigError("serve() needs torch.distributed: call dist.init_process_group() before it.")
    me = dist.get_rank()
    workers = [rank for rank in range(dist.get_world_size()) if rank not in helpers]
    if me not in helpers:
        raise ConfigError(f"Rank {me} called serve(), but helpers={list(helpers)!r}; ranks that train call sync().")
    check_helpers(helpers, workers)
    (shard,) = make_shards(workers, helpers, Notes(None, ""), deadline)
    try:
        while shard.serve():
            pass
    except RankError as cause:
        raise RankError(
            f"Helper rank {me} lost the workers ({cause}) They must call close() of their handle at the end of the training."
        ) from cause
