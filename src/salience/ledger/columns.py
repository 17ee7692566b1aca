"""The ledger's columns: one table of name, type, first value and meaning. At most 64 bytes per sample."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

LARGEST = float(np.finfo(np.float32).max)
"""Largest loss that is stored; others, and those not finite, are counted in `bad`."""
NOTHING = float("nan")
"""Initial value of every statistic: not known yet. Scores pass it on, and the framework ranks it highest."""


@dataclass(frozen=True, slots=True)
class Column:
    dtype: type[np.generic]
    first: float
    meaning: str
    needs_logits: bool = field(default=False, kw_only=True)
    """Filled only when `loss()` is given logits and integer targets."""
    low: float = field(default=-np.inf, kw_only=True)
    """Smallest value that it can hold."""
    high: float = field(default=np.inf, kw_only=True)
    """Largest value that it can hold."""
    width: int = field(default=1, kw_only=True)
    """Values per sample."""

    @property
    def nbytes(self) -> int:
        """Bytes per sample."""
        return np.dtype(self.dtype).itemsize * self.width


def _logits(*given: Any, **limits: float) -> Column:
    return Column(*given, needs_logits=True, **limits)


COLUMNS: dict[str, Column] = {
    "last_loss": Column(np.float32, NOTHING, "loss at the last visit", low=-LARGEST, high=LARGEST),
    "mean_loss": Column(np.float32, NOTHING, "exponential mean of the loss", low=-LARGEST, high=LARGEST),
    "var_loss": Column(np.float32, NOTHING, "exponential variance of the loss", low=0),
    "margin": _logits(
        np.float32, NOTHING, "exponential mean of the margin: logit of the label minus the largest other logit"
    ),
    "margin_sum": _logits(np.float32, 0, "sum of margins over all visits (AUM = margin_sum / seen)"),
    "el2n": _logits(np.float16, NOTHING, "|softmax - one-hot| at the last visit", low=0, high=1.5),
    "entropy": _logits(np.float16, NOTHING, "entropy of the softmax, last visit"),
    "confidence": _logits(np.float16, NOTHING, "exponential mean of p(label)", low=0, high=1.01),
    "guess_p": _logits(np.float16, NOTHING, "exponential mean of p(guess)", low=0, high=1.01),
    "guess": _logits(np.int32, -1, "class the model gave at the last visit", low=-1),
    "other": _logits(
        np.int16, -1, "strongest class besides the label at the last visit; -1 also for classes above 32,767", low=-1
    ),
    "grad_norm": Column(np.float32, NOTHING, "norm of the sample's gradient, where a signal gives it"),
    "seen": Column(np.uint16, 0, "forward passes recorded"),
    "trained": Column(np.uint16, 0, "visits that went into a gradient"),
    "right": _logits(np.uint16, 0, "visits at which the model gave the label"),
    "forgotten": _logits(np.uint16, 0, "times it went from right to wrong"),
    "bad": Column(np.uint16, 0, "losses that were NaN or infinite, never stored elsewhere"),
    "last_seen": Column(np.int32, -1, "window of the last visit", low=-1),
    "cost_us": Column(np.float32, NOTHING, "microseconds to fetch and decode it"),
    "size": Column(np.uint32, 0, "bytes in storage; 0 where not known"),
    "label": Column(np.int32, -1, "class; -1 where not known or not an integer", low=-1),
}

COUNT_LIMIT = int(np.iinfo(np.uint16).max)
"""Counters stop at this value instead of wrapping around."""
CLASS_LIMIT = int(np.iinfo(np.int16).max)
"""Class numbers above this do not fit into the column `other`."""
VOTES = 4
"""Classes whose averaged probability is kept per sample."""
VOTE_DECAY = 0.7
"""Weight of the old average in the averaged prediction, per window since the last visit (the beta of early-learning
regularisation). It counts windows rather than visits, so that rare visits are not averaged over a longer past."""
VOTE_COLUMNS: dict[str, Column] = {
    "vote": _logits(np.int32, 0, "likeliest classes by all visits, averaged, likeliest first", low=0, width=VOTES),
    "vote_p": _logits(np.float16, 0, "their averaged probabilities; 0 = none", low=0, high=1.01, width=VOTES),
}
"""Columns [n, VOTES]: 24 more bytes per sample, whose memory is only used once logits are recorded."""


def bytes_per_sample() -> int:
    return sum(column.nbytes for column in COLUMNS.values())
