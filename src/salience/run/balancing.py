"""Balancing: which part of every batch each rank takes, by how fast it was and by what its samples cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from salience.errors import ConfigError
from salience.ledger import Ledger
from salience.plan import Plan, Shard
from salience.run.part import Batch, Part, Setup, Voice
from salience.watch import Steps

MIN_STEPS = 3
"""Steps of a window from which a rank's speed is taken; the first one of a window is never among them."""
SMOOTHING = 0.5
"""Weight of the last window in what is known of a rank's speed."""
WORTH = 0.03
"""Steps must become shorter by this share of their time for the parts to be changed."""
BOUND = 16.0
"""A rank takes at least this fraction, and at most this multiple, of an equal part."""


class Balancing(Part):
    """Measures how fast this rank is, and divides the batches of the next window so that all ranks take as long."""

    name = "balancing"

    def __init__(
        self, setup: Setup, voice: Voice, steps: Steps, costs: npt.ArrayLike | None = None, *, by_speed: bool = True
    ) -> None:
        self._setup, self._voice, self._steps, self._by_speed = setup, voice, steps, by_speed
        self.costs = None if costs is None else _checked(costs, setup.n)
        """Cost of every sample, float64 [n], such as its length; None = all alike."""
        self.shares = np.full(setup.world, 1 / setup.world)
        """Part of every batch that each rank takes."""
        self._pace: npt.NDArray[np.float64] | None = None
        """Seconds that each rank takes per unit of work, smoothed; None until they were measured."""
        self._shard: Shard | None = None
        self._first = 0
        self._device: torch.device | None = None
        """The GPU that losses are on; None on the CPU, or until there was one."""
        self._begun: torch.cuda.Event | None = None
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        """On a GPU: when it had a batch, and when its losses were there."""

    @property
    def in_use(self) -> bool:
        return self._setup.world > 1

    def open(self, shard: Shard, done: frozenset[int]) -> None:
        self._shard, self._first = shard, self._steps.count
        self._begun, self._spans = None, []

    def hand_over(self, batch: Batch) -> None:
        if self._device is not None:
            self._begun = _event(self._device)

    def on_loss(self, batch: Batch, losses: Tensor, kept: Tensor | None, targets: Tensor | None) -> None:
        if losses.is_cuda:
            self._device = losses.device
            if self._begun is not None:
                self._spans.append((self._begun, _event(losses.device)))
                self._begun = None

    def prepare(self, window: int, ledger: Ledger) -> None:
        """Compare the ranks' speeds in the last window, and change their parts if that is worth it."""
        ranks = self._setup.ranks
        if ranks is None or self._shard is None or not self._by_speed:
            return
        mine = np.array([self._seconds()])
        found = torch.stack(ranks.all_gather(torch.from_numpy(mine), name="balance")).numpy()[:, 0]
        if not np.isfinite(found).all() or (found <= 0).any():
            return
        pace = found / self._work()
        self._pace = pace if self._pace is None else self._pace ** (1 - SMOOTHING) * pace**SMOOTHING
        wanted = bounded(1 / self._pace / (1 / self._pace).sum())
        now, then = (self.shares * self._pace).max(), (wanted * self._pace).max()
        if then < (1 - WORTH) * now:
            self.shares = wanted
            self._voice.events.emit("balanced", window=window, shares=wanted.round(4).tolist(), gain=float(now / then))

    def _seconds(self) -> float:
        """Median seconds from having a batch to its loss, in the last window: a pause of the process does not move it."""
        if self._device is not None:
            torch.cuda.synchronize(self._device)  # once per window
            spans = [begun.elapsed_time(lost) / 1000 for begun, lost in self._spans]
            return float(np.median(spans)) if len(spans) >= MIN_STEPS else float("nan")
        count = min(self._steps.count - self._first - 1, len(self._steps.steps) - 1)
        times = [step.copy + step.forward for step in list(self._steps.steps)[-count:]] if count >= MIN_STEPS else []
        return float(np.median(times)) if times else float("nan")

    def _work(self) -> npt.NDArray[np.float64]:
        """Work of a typical batch on each rank in the last window: its cost, or its number of samples."""
        shard = self._shard
        assert shard is not None
        if self.costs is None:
            return np.median(np.diff(shard.cuts, axis=0), axis=1).astype(np.float64)
        padded = [[self._padded(shard.of(rank).ids(k)) for k in range(len(shard))] for rank in range(shard.world)]
        return np.median(np.array(padded), axis=1)

    def _padded(self, ids: npt.NDArray[np.int64]) -> float:
        assert self.costs is not None
        return len(ids) * float(self.costs[ids].max())

    def divide(self, plan: Plan) -> Shard:
        """This rank's part of a new plan."""
        setup = self._setup
        if setup.world == 1:
            given = "balance=True" if self._by_speed else "costs="
            self._voice.warn_once(f"{given} does nothing in a single process: there is nobody to share batches with.")
            return plan.shard()
        shard = plan.shard(setup.rank, setup.world, self.shares.tolist())
        return shard if self.costs is None else by_cost(shard, self.costs, self.shares)

    def attach(self, model: nn.Module) -> None:
        """Say that batch norm sees parts of different sizes."""
        plain = [type(layer).__name__ for layer in model.modules() if _plain_batch_norm(layer)]
        if plain and self._setup.world > 1:
            self._voice.warn_once(
                f"balance=True gives ranks parts of different sizes, and {plain[0]} normalises each by itself, so that the "
                "gradient is not exactly that of the whole batch; use torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)."
            )

    def state_dict(self) -> dict[str, Any]:
        return {
            "shares": torch.from_numpy(self.shares.copy()),
            "pace": None if self._pace is None else torch.from_numpy(self._pace.copy()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if len(state["shares"]) == self._setup.world:  # other ranks: they are measured anew
            self.shares = state["shares"].numpy().copy()
            self._pace = None if state["pace"] is None else state["pace"].numpy().copy()
        self._shard = None


def bounded(shares: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Shares that sum to 1, none below 1/BOUND or above BOUND of an equal one."""
    equal = 1 / len(shares)
    shares = np.clip(shares, equal / BOUND, equal * BOUND)
    return shares / shares.sum()


def by_cost(shard: Shard, costs: npt.NDArray[np.float64], shares: npt.NDArray[np.float64]) -> Shard:
    """The same batches with their samples sorted by cost and cut where all ranks take as long.

    A part costs its number of samples times the dearest of them, as texts padded to the longest do: few long ones go to
    one rank and many short ones to another. The union of the parts stays the batch, and with it the gradient.
    """
    plan, cuts = shard.plan, shard.cuts.copy()
    order = np.arange(len(plan))
    for number in range(len(shard)):
        begin, stop = int(cuts[0, number]), int(cuts[-1, number])
        longest_first = np.argsort(-costs[plan.ids[begin:stop]], kind="stable")
        order[begin:stop] = begin + longest_first
        cuts[:, number] = begin + cut_by_cost(costs[plan.ids[begin:stop]][longest_first], shares)
    moved = {name: getattr(plan, name)[order] for name in ("ids", "weights", "importance", "level")}
    return replace(shard, plan=replace(plan, **moved), cuts=cuts)


def cut_by_cost(costs: npt.NDArray[np.float64], shares: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Where to cut samples of descending cost, int64 [ranks + 1]: the largest time of a rank is least, each has a sample.

    Rank r takes count * dearest / share. The least time in which all samples fit is found by bisection.
    """
    low, high = 0.0, len(costs) * float(costs[0]) / float(shares.min())
    best = np.append(np.arange(len(shares)), len(costs))
    for _ in range(40):
        time = (low + high) / 2
        cuts = _fit(costs, shares, time)
        if cuts is None:
            low = time
        else:
            best, high = cuts, time
    return best


def _fit(costs: npt.NDArray[np.float64], shares: npt.NDArray[np.float64], time: float) -> npt.NDArray[np.int64] | None:
    """Cuts with which no rank takes longer than `time`; None if there are none."""
    n, world, cuts = len(costs), len(shares), [0]
    for rank in range(world):
        left = world - 1 - rank  # samples that the ranks after this one need
        room = int(shares[rank] * time / costs[cuts[-1]]) if costs[cuts[-1]] > 0 else n
        if room < 1:
            return None
        cuts.append(min(cuts[-1] + room, n - left))
    return np.array(cuts) if cuts[-1] == n else None


def _checked(costs: npt.ArrayLike, n: int) -> npt.NDArray[np.float64]:
    found = np.asarray(costs, dtype=np.float64)
    if found.shape != (n,) or not np.isfinite(found).all() or (found < 0).any():
        raise ConfigError(f"costs have shape {found.shape}; pass one number of at least 0 per sample, [{n}].")
    return found


def _event(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _plain_batch_norm(layer: nn.Module) -> bool:
    return isinstance(layer, _BatchNorm) and not isinstance(layer, nn.SyncBatchNorm)
