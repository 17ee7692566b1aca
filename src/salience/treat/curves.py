"""How strong augmentation is over the run: curves over progress, and a strength that follows the gap to validation.

    amount of a stage = its curve at the run's progress * the strength that adapts      each from 0 to 1

The classic is to fade out augmentation near the end, so that the model finally sees the data unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from salience.errors import ConfigError, did_you_mean
from salience.ledger import Ledger

Curve = Callable[[float], float] | str
"""A function from the run's progress (0 to 1) to an amount (0 to 1), or its name."""

FADE_FROM, RISE_UNTIL = 0.7, 0.3
CURVES: dict[str, Callable[[float], float]] = {
    "fade": lambda progress: min(1.0, max(0.0, (1 - progress) / (1 - FADE_FROM))),
    "rise": lambda progress: min(1.0, progress / RISE_UNTIL),
    "early": lambda progress: float(progress < FADE_FROM),
}
"""fade: full until 70% of the run, then down to zero. rise: from zero to full at 30%. early: off from 70% on."""

AMOUNTS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""The possible values of an adaptive strength."""
MUCH, LITTLE = 0.05, 0.01
"""Gap between training and validation above which augmentation becomes stronger, and below which it becomes weaker."""
RESULTS_TO_MOVE = 2
"""Number of results in a row that must agree before the strength changes."""
MIN_JUDGED = 100
"""Minimum number of samples with a known guess for a training accuracy."""


def amount_at(curve: Curve | None, progress: float | None) -> float:
    """The amount from a curve, clipped to [0, 1]; 1 without a curve, or if progress is not known."""
    if curve is None or progress is None:
        return 1.0
    value = float(CURVES[curve](progress) if isinstance(curve, str) else curve(progress))
    if not np.isfinite(value):
        raise ConfigError(
            f"A stage's curve gave {value} at progress {progress:.3g}; it must give a number from 0 to 1."
        )
    return min(1.0, max(0.0, value))


def check_curve(curve: Any) -> None:
    """Raise ConfigError unless this is a curve."""
    if isinstance(curve, str) and curve not in CURVES:
        raise ConfigError(f"There is no curve {curve!r}.{did_you_mean(curve, CURVES)}")
    if curve is not None and not isinstance(curve, str) and not callable(curve):
        raise ConfigError(f"A curve is a function of progress, or one of {', '.join(CURVES)}; not {curve!r}.")


def training_accuracy(ledger: Ledger, window: int) -> float | None:
    """Share of the samples visited in `window` or later that the model classified correctly; None if too few are known."""
    known = (ledger.guess >= 0) & (ledger.label >= 0) & (ledger.last_seen >= window)
    count = int(np.count_nonzero(known))
    return float((ledger.guess[known] == ledger.label[known]).mean()) if count >= MIN_JUDGED else None


class Adapting:
    """A strength that follows the gap between training accuracy (as augmented) and validation accuracy."""

    def __init__(self) -> None:
        self.amount = 1.0
        self._wish = 0
        """+n or -n: the last n results asked for more, or for less."""

    def evaluated(self, training: float, validation: float) -> str:
        """Take a pair of accuracies; returns why the amount changed, or nothing.

        A model that does better in training than in validation learns by heart, and harder views help. A model that does not,
        although training is augmented, does not need more.
        """
        gap = training - validation
        asked = 1 if gap > MUCH else -1 if gap < LITTLE else 0
        self._wish = asked if asked * self._wish <= 0 else self._wish + asked
        if abs(self._wish) < RESULTS_TO_MOVE:
            return ""
        at, before = AMOUNTS.index(self.amount) + asked, self.amount
        self._wish, self.amount = 0, AMOUNTS[min(max(at, 0), len(AMOUNTS) - 1)]
        if self.amount == before:
            return ""
        return (
            f"accuracy {training:.1%} in training and {validation:.1%} in validation, {RESULTS_TO_MOVE} results in a row: "
            f"augmentation from {before:.0%} to {self.amount:.0%}"
        )

    @property
    def numbers(self) -> list[float]:
        """The numbers that all ranks must agree on."""
        return [self.amount, float(self._wish)]

    @numbers.setter
    def numbers(self, numbers: list[float]) -> None:
        self.amount, self._wish = float(numbers[0]), int(numbers[1])

    def state_dict(self) -> dict[str, Any]:
        return {"numbers": self.numbers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.numbers = list(state["numbers"])
