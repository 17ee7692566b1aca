"""ProgressLR: a learning-rate schedule over the run's progress, so that skipped samples do not leave it unfinished."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from salience.errors import ConfigError, StateError, did_you_mean
from salience.watch import Steps


class HasProgress(Protocol):
    @property
    def progress(self) -> float: ...


def one_cycle(progress: float, *, warmup: float = 0.25, start: float = 0.05) -> float:
    """Linear from `start` to 1 over the first `warmup` of the run, then linear to 0."""
    if progress < warmup:
        return start + (1 - start) * progress / warmup
    return (1 - progress) / (1 - warmup)


def cosine(progress: float) -> float:
    """From 1 to 0 along half a cosine."""
    return 0.5 * (1 + math.cos(math.pi * progress))


def linear(progress: float) -> float:
    """From 1 to 0 in a straight line."""
    return 1 - progress


SHAPES: dict[str, Callable[[float], float]] = {"one_cycle": one_cycle, "cosine": cosine, "linear": linear}


class ProgressLR(LRScheduler):
    """Sets every learning rate to its initial value times `shape(loader.progress)`; call `step()` after each batch.

    If the loader has an `lr_scale` (steps = "constant" shrinks batches), the rate is also multiplied by that.

    `shape` is a function of progress in [0, 1] or the name of one: "one_cycle", "cosine", "linear". Progress
    counts sample visits, so the schedule ends with the run whatever was skipped.
    """

    def __init__(self, optimizer: Optimizer, loader: HasProgress, shape: str | Callable[[float], float] = "one_cycle"):
        if isinstance(shape, str) and shape not in SHAPES:
            raise ConfigError(f"There is no schedule shape {shape!r}.{did_you_mean(shape, SHAPES)}")
        self._shape = SHAPES[shape] if isinstance(shape, str) else shape
        # Weak, because torch ties schedule and optimizer in a circle, on which a loader's workers must not hang.
        self._loader = weakref.ref(loader)
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:  # pyright: ignore[reportIncompatibleMethodOverride]
        loader = self._loader()
        if loader is None:
            raise StateError("The loader of this ProgressLR is gone; keep it as long as the schedule.")
        factor = self._shape(loader.progress) * float(getattr(loader, "lr_scale", 1.0))
        rates = [float(base) * factor for base in self.base_lrs]
        if isinstance(steps := getattr(loader, "steps", None), Steps):
            steps.lr = rates[0]  # for the report
        return rates

    def state_dict(self) -> dict[str, Any]:
        return {key: value for key, value in super().state_dict().items() if key not in ("_loader", "_shape")}
