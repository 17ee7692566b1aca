"""What a step costs, and what each mode would make of it: measured parts, and a prediction from them."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from salience.gradients.exchange import RoundedMean, join
from salience.gradients.modes import MODES, WHOLE, resolve
from salience.gradients.rules import matrix_shape

MESSAGES = {"allreduce": 1, "bf16": 1, "lowrank": 2, "topk": 1, "local": 3}
"""Collectives per exchange."""
MILD = 1.05
"""The first candidate within this factor of the fastest is chosen."""
FEWEST_STEPS, MOST_STEPS, MARGIN = 4, 64, 1.25
"""Bounds on the number of local steps, and how much longer than the exchange they should take."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Seconds, as the mean over ranks."""

    plain: float
    """Seconds of a step with plain all-reduce."""
    compute: float
    """Seconds of a step without any exchange."""
    exchange: float
    """Seconds of a plain all-reduce of all gradients, in one piece."""
    busy: float
    """Seconds in which that exchange keeps a processor busy, which cannot be hidden by computing if no core is idle."""
    latency: float
    """Seconds of the smallest message."""
    encode: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds of each mode's work on this machine, without sending."""
    share: Mapping[str, float] = field(default_factory=dict[str, float])
    """Bytes that each mode sends, divided by those of all-reduce."""

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
        encode = self.encode.get(mode, 0.0)
        if mode == "local":
            own = encode + self.share.get(mode, 1.0) * self.busy
            return max(self.compute, self.travel(mode) / self.local_steps) + own / self.local_steps
        return self.compute + encode + self.travel(mode)

    def speedup(self, mode: str) -> float:
        """Speed-up over plain all-reduce."""
        return self.plain / max(self.predict(mode), 1e-9)

    def best(self, candidates: Sequence[str]) -> str:
        """The fastest candidate, or an earlier one that is nearly as fast; empty without any."""
        seconds = {mode: self.predict(mode) for mode in candidates}
        least = min(seconds.values(), default=0.0)
        return next((mode for mode in candidates if seconds[mode] <= MILD * least), "")


class NoLink:
    """Counts what would be sent and sends nothing; every other rank is assumed to equal this one."""

    def __init__(self, world: int) -> None:
        self.world, self.sent = world, 0.0

    def mean(self, tensor: Tensor) -> Tensor:
        self.sent += 2 * (self.world - 1) / self.world * tensor.nbytes
        return tensor

    def gather(self, row: Tensor) -> Tensor:
        self.sent += (self.world - 1) * row.nbytes
        return row.repeat(self.world, 1)

    def shuffle(self, rows: Tensor) -> Tensor:
        return rows


def rehearse(mode: str, world: int, gradients: Sequence[Tensor]) -> float:
    """Seconds of a mode's own work on some gradients, without other ranks; the second of two runs."""
    link: Any = NoLink(world)
    mean = RoundedMean(link)
    given = {"overlap": False} if mode in WHOLE else {**resolve(mode, {}), "warmup": 0}
    exchange = None if mode == "local" else MODES[mode].make(link, **given)
    start = 0.0
    for copies in [[one.clone() for one in gradients] for _ in range(2)]:
        start = time.perf_counter()
        if exchange is None:
            mean(join(copies), 1)
        else:
            exchange.finish(copies)
    return time.perf_counter() - start


def share_of(mode: str, world: int, parameters: Sequence[Tensor]) -> float:
    """Bytes that a mode sends with its default options, divided by those of all-reduce; each rank counts its own."""
    if mode in ("bf16", "local"):
        return 0.5
    sizes = [p.numel() for p in parameters]
    ring = 2 * (world - 1) / world * 4
    options = resolve(mode, {})
    sent = 0.0
    for p, size in zip(parameters, sizes, strict=True):
        thin = matrix_shape(p.shape, options["rank"]) if mode == "lowrank" else None
        if mode == "lowrank":
            sent += ring * (size if thin is None else options["rank"] * sum(thin))
        else:  # values and where they lie, to every other rank
            whole = size <= options["small"] or p.dim() < 2
            sent += (world - 1) * (4 * size if whole else 6 * options["rate"] * size)
    return sent / (ring * sum(sizes))


def some_gradients(parameters: Sequence[Tensor], limit: int = 1 << 20) -> tuple[list[Tensor], float]:
    """About `limit` numbers in the shapes of the largest parameters, rows cut off where one is too large, and how many times
    as many there are in all. The numbers all differ, without a generator."""
    found: list[Tensor] = []
    left = limit
    for p in sorted(parameters, key=lambda p: -p.numel()):
        row = max(1, p[0].numel()) if p.dim() > 1 else 1
        rows = min(p.numel() // row, max(1, left // row))
        shape = (rows, *p.shape[1:]) if p.dim() else ()
        found.append(torch.linspace(-1, 1, rows * row, device=p.device).sin().view(shape))
        left -= rows * row
        if left <= 0:
            break
    return found, sum(p.numel() for p in parameters) / max(1, sum(one.numel() for one in found))
