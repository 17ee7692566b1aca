"""The delivered batches of a window: which of them losses belong to, and the weight of each loss."""

from __future__ import annotations

import functools
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from salience.plan import Shard

if TYPE_CHECKING:
    from salience.run.part import Batch

MAX_BATCHES_AHEAD = 32
"""Number of recent batches that are searched first for the one that losses belong to."""


@dataclass(slots=True, eq=False)
class Visits:
    """The delivered batches of one window, and what is needed to handle their losses."""

    shard: Shard
    delivered: set[int]
    all_ones: bool = field(init=False)
    """True if every loss weight is 1."""
    plain_mean: bool = field(init=False)
    """True if the mean of a batch's losses is what its gradient is taken of, unless there are stand-ins."""
    no_doubles: bool = field(init=False)
    """True if no sample is visited twice."""
    recorded: set[int] = field(default_factory=set[int])
    """Batches that have their loss."""
    rows: dict[int, npt.NDArray[np.int64]] = field(default_factory=dict[int, npt.NDArray[np.int64]])
    """Batch -> positions of its rows among its planned samples, where a collate function changed them."""
    reordered: bool = False
    """True once a batch was delivered whose rows are in an unknown order."""
    stand_ins: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    """Batch -> rows where another sample stands in for a broken one."""
    _latest: deque[int] = field(default_factory=functools.partial(deque[int], maxlen=MAX_BATCHES_AHEAD))
    """Numbers of the most recent batches: losses that come with ids nearly always belong to one of them."""
    _weights: dict[torch.device, Tensor] = field(default_factory=dict[torch.device, Tensor])

    def __post_init__(self) -> None:
        plan = self.shard.plan
        visited = np.zeros(plan.population, dtype=bool)
        visited[plan.ids] = True
        self.no_doubles = int(np.count_nonzero(visited)) == len(plan)
        self.all_ones = bool((plan.weights == 1).all())
        plain = plan.robust == 0 and self.shard.fill is None
        self.plain_mean = self.all_ones and plain and self.shard.world == 1

    def deliver(self, batch: Batch) -> None:
        """A batch reaches the loop."""
        self.delivered.add(batch.number)
        self._latest.appendleft(batch.number)
        if batch.rows is not None:
            self.rows[batch.number] = batch.rows
        self.reordered |= batch.reordered
        if batch.broken:
            at = range(len(batch.ids)) if batch.rows is None else batch.rows.tolist()
            self.stand_ins[batch.number] = [row for row, position in enumerate(at) if position in batch.broken]

    def find(self, ids: npt.NDArray[np.int64]) -> int | None:
        """Number of the delivered batch with exactly these ids; None if there is none."""
        for number in self._latest:
            if np.array_equal(self.ids(number), ids):
                return number
        spots = np.flatnonzero(self.shard.plan.ids == ids[0]) if len(ids) else np.empty(0, dtype=np.int64)
        near = (np.searchsorted(self.shard.start, spots, side="right") - 1).tolist()
        fitting = (k for k in near if k in self.delivered and np.array_equal(self.ids(k), ids))
        return next(fitting, None)

    def ids(self, number: int) -> npt.NDArray[np.int64]:
        """The samples of a batch's rows."""
        ids, rows = self.shard.ids(number), self.rows.get(number)
        return ids if rows is None else ids[rows]

    def first_views(self, batch: Batch) -> npt.NDArray[np.int64] | None:
        """Rows to record: the first view of each sample, and no stand-ins. None = all rows."""
        stand_ins = self.stand_ins.get(batch.number)
        if self.no_doubles and not stand_ins:
            return None
        views = self.shard.plan.views[self.shard.span(batch.number)]
        wanted = (views if batch.rows is None else views[batch.rows]) == 0
        wanted[stand_ins or []] = False
        return None if wanted.all() else np.flatnonzero(wanted)

    def weights(self, batch: Batch, device: torch.device) -> Tensor | None:
        """Loss weights of a batch, float32 [B]; None = all are 1."""
        stand_ins = self.stand_ins.get(batch.number)
        if self.all_ones and not stand_ins:
            return None
        if device not in self._weights:
            weights = torch.from_numpy(self.shard.plan.weights.copy())
            if device.type == "cuda":  # from memory that is not pinned, the copy would wait for the device
                weights = weights.pin_memory()
            self._weights[device] = weights.to(device, non_blocking=True)
        weights = self._weights[device][self.shard.span(batch.number)]
        if batch.rows is not None:
            weights = weights[torch.from_numpy(batch.rows).to(device)]
        if stand_ins:
            weights = weights.clone()
            weights[stand_ins] = 0
        return weights

    def divisor(self, batch: Batch, count: int) -> float:
        """What the sum of a batch's weighted losses is divided by, so that DDP's mean over ranks is the batch's gradient."""
        world = self.shard.world
        if self.shard.fill is not None:  # a sample in a small batch counts as much as one in a large batch
            return float(self.shard.global_sizes.mean()) * batch.picks / world
        if world == 1:
            return count
        if batch.picks == 1:
            return int(self.shard.global_sizes[batch.number]) / world
        picked = np.maximum(1, np.rint(batch.picks * self.shard.sizes(batch.number)))  # as each rank picks
        return float(picked.sum()) / world
