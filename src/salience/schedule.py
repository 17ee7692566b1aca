"""ProgressLR: a learning-rate schedule over the run's progress, so that skipped samples do not leave it unfinished."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from salience.errors import StateError
from salience.shapes import SHAPES, cosine, linear, one_cycle, shape_of
from salience.watch import Steps

__all__ = ["SHAPES", "ProgressLR", "cosine", "linear", "one_cycle"]


class HasProgress(Protocol):
    @property
    def progress(self) -> float: ...


class ProgressLR(LRScheduler):
    """Sets every learning rate to its initial value times `shape(loader.progress)`; call `step()` after each batch.

    If the loader has an `lr_scale` (steps = "constant" shrinks batches), the rate is also multiplied by that.

    `shape` is a function of progress in [0, 1] or the name of one: "one_cycle", "cosine", "linear". Progress
    counts sample visits, so the schedule ends with the run whatever was skipped.
    """

    def __init__(self, optimizer: Optimizer, loader: HasProgress, shape: str | Callable[[float], float] = "one_cycle"):
        self._shape = shape_of(shape)
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
