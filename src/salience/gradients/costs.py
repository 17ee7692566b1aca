"""What a step costs, and what each mode would make of it: measured parts, and a prediction from them."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from salience.gradients.exchange import Exchange
from salience.gradients.modes import MAKERS
from salience.gradients.options import resolve

MESSAGES = {"allreduce": 1, "bf16": 1, "lowrank": 2, "topk": 1, "local": 3}
"""Collectives per exchange."""
MILD = 1.05
"""Of modes that are within this factor of the fastest, the first of the candidates is taken."""
FEWEST_STEPS, MOST_STEPS, MARGIN = 4, 64, 1.25
"""Bounds on the number of local steps, and how much longer than the exchange they should take."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Seconds, as the mean over ranks."""

    compute: float
    """Of a step without any exchange."""
    exchange: float
    """Of plain all-reduce of all gradients, in one piece."""
    latency: float
    """Of the smallest message."""
    encode: Mapping[str, float] = field(default_factory=dict[str, float])
    """Of the work of each mode on this machine, nothing sent."""
    share: Mapping[str, float] = field(default_factory=dict[str, float])
    """Bytes that each mode sends, over those of all-reduce."""

    def travel(self, mode: str) -> float:
        """Seconds that one exchange of a mode spends on the link."""
        bare = max(0.0, self.exchange - self.latency)
        return MESSAGES[mode] * self.latency + self.share.get(mode, 1.0) * bare

    @property
    def local_steps(self) -> int:
        """Local steps that hide the exchange of parameters behind computing."""
        wanted = math.ceil(MARGIN * self.travel("local") / max(self.compute, 1e-9))
        return min(max(wanted, FEWEST_STEPS), MOST_STEPS)

    def predict(self, mode: str) -> float:
        """Seconds per step in a mode."""
        if mode == "local":
            return (
                max(self.compute, self.travel(mode) / self.local_steps) + self.encode.get(mode, 0.0) / self.local_steps
            )
        return self.compute + self.encode.get(mode, 0.0) + self.travel(mode)

    def best(self, candidates: Sequence[str]) -> str:
        """The fastest candidate, or an earlier one that is nearly as fast; empty without any."""
        seconds = {mode: self.predict(mode) for mode in candidates}
        least = min(seconds.values(), default=0.0)
        return next((mode for mode in candidates if seconds[mode] <= MILD * least), "")


class Timed:
    """An exchange that also says how long it took."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange, self.lossy = exchange, exchange.lossy
        self.seconds = 0.0

    def begin(self, bucket: Tensor) -> None:
        self.exchange.begin(bucket)

    def finish(self, gradients: Sequence[Tensor]) -> None:
        start = time.perf_counter()
        self.exchange.finish(gradients)
        self.seconds = time.perf_counter() - start

    def state_dict(self) -> dict[str, Any]:
        return self.exchange.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.exchange.load_state_dict(state)


class NoLink:
    """Counts what would be sent and sends nothing: every other rank is taken to be like this one."""

    def __init__(self, world: int) -> None:
        self.world, self.sent = world, 0.0

    def mean(self, tensor: Tensor) -> Tensor:
        self.sent += 2 * (self.world - 1) / self.world * tensor.nbytes
        return tensor

    def gather(self, row: Tensor) -> Tensor:
        self.sent += (self.world - 1) * row.nbytes
        return row.repeat(self.world, 1)


def rehearse(mode: str, world: int, gradients: Sequence[Tensor]) -> tuple[float, float]:
    """Seconds of a mode's own work, and its bytes over those of all-reduce, by exchanging with nobody; second time of two."""
    if mode == "local":
        return 0.0, 0.5
    link: Any = NoLink(world)
    given = {"overlap": False} if mode == "bf16" else {**resolve(mode, {}), "warmup": 0}
    exchange = MAKERS[mode](link, **given)
    seconds = 0.0
    for _ in range(2):
        copies, link.sent = [one.clone() for one in gradients], 0.0
        start = time.perf_counter()
        exchange.finish(copies)
        seconds = time.perf_counter() - start
    whole = 2 * (world - 1) / world * sum(one.numel() * 4 for one in gradients)
    return seconds, link.sent / whole


def some_gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Numbers of the parameters' shapes that all differ, without a generator."""
    return [torch.linspace(-1, 1, p.numel(), device=p.device).sin().view(p.shape) for p in parameters]
