"""Balancing: which part of every batch each rank takes, by the speed of the rank and the cost of the samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
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
from salience.run.speeds import Speeds
from salience.watch import Steps

MIN_STEPS = 5
"""Steps from which a rank's speed is taken, over as many windows as it takes to have them."""
WARM_UP = 2
"""First steps of a run, in which things warm up and DistributedDataParallel rearranges its buckets."""
WORTH = 0.02
"""Steps must become shorter by this share of their time for the parts to be changed."""


@dataclass(slots=True)
class Timed:
    """One step of this rank, without the time it waited for others."""

    work: float
    """The cost of its part of the batch, or the number of samples."""
    forward: float
    """Seconds from having the batch to its loss."""
    whole: float
    """Seconds with the backward pass and the optimizer; NaN where the wait for others is not known."""


class Balancing(Part):
    """Measures the speed of this rank, and divides the batches of the next window so that all ranks take equally long."""

    name = "balancing"

    def __init__(
        self, setup: Setup, voice: Voice, steps: Steps, costs: npt.ArrayLike | None = None, *, by_speed: bool = True
    ) -> None:
        self._setup, self._voice, self._steps, self._by_speed = setup, voice, steps, by_speed
        self.costs = None if costs is None else _checked(costs, setup.n)
        """Cost of every sample, float64 [n], such as its length; None = all alike."""
        self.shares = np.full(setup.world, 1 / setup.world)
        """Part of every batch that each rank takes."""
        self._speeds: Speeds | None = None
        """None until they were measured."""
        self._timed: list[Timed] = []
        """Steps since speeds were measured."""
        self._waits: list[float] = []
        """Seconds that these steps waited for their batch, without the first step of each window."""
        self._sharded = False
        """True if the model makes every rank wait for the slowest one in each step, so that no speed can be measured."""
        self._shard: Shard | None = None
        self._numbers: list[int] = []
        """Batches of this window, in order of arrival."""
        self._first = 0
        self._device: torch.device | None = None
        """The GPU that losses are on; None on the CPU, or until there was one."""
        self._begun: torch.cuda.Event | None = None
        self._spans: list[tuple[int, torch.cuda.Event, torch.cuda.Event]] = []
        """On a GPU: the number of a batch, the event of its arrival, and that of its losses."""

    @property
    def in_use(self) -> bool:
        return self._setup.world > 1

    def open(self, shard: Shard, done: frozenset[int]) -> None:
        self._shard, self._first = shard, self._steps.count
        self._begun, self._spans, self._numbers = None, [], []

    def hand_over(self, batch: Batch) -> None:
        self._numbers.append(batch.number)
        if self._device is not None:
            self._begun = _event(self._device)

    def on_loss(self, batch: Batch, losses: Tensor, kept: Tensor | None, targets: Tensor | None) -> None:
        if losses.is_cuda:
            self._device = losses.device
            if self._begun is not None:
                self._spans.append((batch.number, self._begun, _event(losses.device)))
                self._begun = None

    def close(self, *, finished: bool) -> None:
        """Note the times of the window's steps."""
        if not self._by_speed or self._shard is None:
            return
        if self._device is not None:
            torch.cuda.synchronize(self._device)  # once per window
            nan = float("nan")
            spans = [(n, begun.elapsed_time(ended) / 1000) for n, begun, ended in self._spans]
            self._timed += [Timed(self._work(self._shard, n), seconds, nan) for n, seconds in spans]
            return
        steps = list(self._steps.steps)[-len(self._numbers) :] if self._numbers else []
        for i, (number, step) in enumerate(zip(self._numbers[-len(steps) :], steps, strict=False)):
            if step.busy and not step.trying and self._first + i >= WARM_UP:
                forward = step.copy + step.forward
                whole = forward + step.backward - step.sync if self._steps.knows_waits else float("nan")
                self._timed.append(Timed(self._work(self._shard, number), forward, whole))
                self._waits += [step.wait] * (i > 0 and not step.held)

    def prepare(self, window: int, ledger: Ledger) -> None:
        """Compare the ranks' speeds, and change their parts if that is worth it."""
        ranks = self._setup.ranks
        if ranks is None or self._shard is None or not self._by_speed:
            return
        mine = torch.tensor(self._typical(), dtype=torch.float64)
        work, forward, whole = torch.stack(ranks.all_gather(mine, name="balance")).numpy().T
        seconds = whole if np.isfinite(whole).all() else forward
        if not (seconds > 0).all() or not (work > 0).all():  # NaN: some rank has too few steps yet
            return
        self._timed, self._waits = [], []
        if self._speeds is None:
            self._speeds = Speeds.first(work, seconds)
        else:
            self._speeds.learn(work, seconds)
        wanted = self._speeds.parts()
        now, then = self._speeds.slowest(work), self._speeds.slowest(wanted)
        if then < (1 - WORTH) * now:
            self.shares = wanted / wanted.sum()
            shares = self.shares.round(4).tolist()
            self._voice.events.emit("balanced", window=window, shares=shares, gain=now / then)

    def _typical(self) -> list[float]:
        """Work, and seconds up to the loss and in all, of this rank's median step, which a pause does not move."""
        if self._sharded or len(self._timed) < MIN_STEPS:
            return [float("nan")] * 3
        wait = float(np.median(self._waits)) if self._waits else 0.0
        work, forward, whole = np.median([(one.work, one.forward, one.whole) for one in self._timed], axis=0).tolist()
        return [work, forward, whole + wait]

    def _work(self, shard: Shard, number: int) -> float:
        ids = shard.ids(number)
        return float(len(ids)) if self.costs is None else self._padded(ids)

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
        """Warn if this model hides the speed of a rank (sharded parameters), or makes unequal parts inexact (batch norm)."""
        if self._by_speed and any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
            self._sharded = True
            self._voice.warn_once(
                "balance=True cannot tell how fast ranks are where fully_shard makes them wait for each other inside every "
                "forward and backward pass: parts stay equal. Use DistributedDataParallel, or leave balance out."
            )
        plain = [type(layer).__name__ for layer in model.modules() if _plain_batch_norm(layer)]
        if plain and self._setup.world > 1:
            self._voice.warn_once(
                f"balance=True gives ranks parts of different sizes, and {plain[0]} normalises each by itself, so that the "
                "gradient is not exactly that of the whole batch; use torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)."
            )

    def state_dict(self) -> dict[str, Any]:
        speeds = None if self._speeds is None else self._speeds.state_dict()
        return {"shares": torch.from_numpy(self.shares.copy()), "speeds": speeds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if len(state["shares"]) == self._setup.world:  # other ranks: they are measured anew
            self.shares = state["shares"].numpy().copy()
            self._speeds = Speeds.from_state(state["speeds"]) if state.get("speeds") else None
        self._shard, self._timed, self._waits = None, [], []


def by_cost(shard: Shard, costs: npt.NDArray[np.float64], shares: npt.NDArray[np.float64]) -> Shard:
    """The same batches with their samples sorted by cost, and cut so that all ranks take equally long.

    A part costs its number of samples times the highest cost among them, like texts padded to the longest: a few long ones
    go to one rank and many short ones to another. The parts together are still the batch, so the gradient is the same.
    """
    plan, cuts = shard.plan, shard.cuts.copy()
    order = np.arange(len(plan))
    for number in range(len(shard)):
        begin, stop = int(cuts[0, number]), int(cuts[-1, number])
        longest_first = np.argsort(-costs[plan.ids[begin:stop]], kind="stable")
        order[begin:stop] = begin + longest_first
        cuts[:, number] = begin + cut_by_cost(costs[plan.ids[begin:stop]][longest_first], shares)
    return replace(shard, plan=plan.taken(order), cuts=cuts)


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
