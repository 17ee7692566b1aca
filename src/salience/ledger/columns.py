"""The ledger's columns: one table of name, type, first value and meaning. At most 64 bytes per sample."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

LARGEST = float(np.finfo(np.float32).max)
"""Losses are finite: others are counted in `bad`."""
NOTHING = float("nan")
"""First value of every statistic, for "not known yet". Scores pass it on, and the framework ranks it highest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    dtype: type[np.generic]
    first: float
    meaning: str
    needs_logits: bool = False
    """Filled only when `loss()` is given logits and integer targets."""
    low: float = -np.inf
    """Smallest value that can stand in it."""
    high: float = np.inf
    """Largest value that can stand in it."""


COLUMNS: dict[str, Column] = {
    "last_loss": Column(dtype=np.float32, first=NOTHING, low=-LARGEST, high=LARGEST, meaning="loss at the last visit"),
    "mean_loss": Column(
        dtype=np.float32, first=NOTHING, low=-LARGEST, high=LARGEST, meaning="exponential mean of the loss"
    ),
    "var_loss": Column(dtype=np.float32, first=NOTHING, low=0, meaning="exponential variance of the loss"),
    "margin": Column(
        dtype=np.float32,
        first=NOTHING,
        needs_logits=True,
        meaning="exponential mean of the margin: logit of the label minus the largest other logit",
    ),
    "margin_sum": Column(
        dtype=np.float32, first=0, needs_logits=True, meaning="sum of margins over all visits (AUM = margin_sum / seen)"
    ),
    "el2n": Column(
        dtype=np.float16,
        first=NOTHING,
        low=0,
        high=1.5,
        needs_logits=True,
        meaning="|softmax - one-hot| at the last visit",
    ),
    "entropy": Column(dtype=np.float16, first=NOTHING, needs_logits=True, meaning="entropy of the softmax, last visit"),
    "confidence": Column(
        dtype=np.float16, first=NOTHING, low=0, high=1.01, needs_logits=True, meaning="exponential mean of p(label)"
    ),
    "guess_p": Column(
        dtype=np.float16, first=NOTHING, low=0, high=1.01, needs_logits=True, meaning="exponential mean of p(guess)"
    ),
    "guess": Column(
        dtype=np.int32, first=-1, low=-1, needs_logits=True, meaning="class the model gave at the last visit"
    ),
    "other": Column(
        dtype=np.int16,
        first=-1,
        low=-1,
        needs_logits=True,
        meaning="strongest class besides the label at the last visit; -1 also for classes above 32,767",
    ),
    "grad_norm": Column(
        dtype=np.float32, first=NOTHING, meaning="norm of the sample's gradient, where a signal gives it"
    ),
    "seen": Column(dtype=np.uint16, first=0, meaning="forward passes recorded"),
    "trained": Column(dtype=np.uint16, first=0, meaning="visits that went into a gradient"),
    "right": Column(dtype=np.uint16, first=0, needs_logits=True, meaning="visits at which the model gave the label"),
    "forgotten": Column(dtype=np.uint16, first=0, needs_logits=True, meaning="times it went from right to wrong"),
    "bad": Column(dtype=np.uint16, first=0, meaning="losses that were NaN or infinite, never stored elsewhere"),
    "last_seen": Column(dtype=np.int32, first=-1, low=-1, meaning="window of the last visit"),
    "cost_us": Column(dtype=np.float32, first=NOTHING, meaning="microseconds to fetch and decode it"),
    "size": Column(dtype=np.uint32, first=0, meaning="bytes in storage; 0 where not known"),
    "label": Column(dtype=np.int32, first=-1, low=-1, meaning="class; -1 where not known or not an integer"),
}

COUNT_LIMIT = int(np.iinfo(np.uint16).max)
"""Counters stay at this value instead of wrapping round."""


CLASS_LIMIT = int(np.iinfo(np.int16).max)
"""Class numbers above this do not fit into the column `other`."""


VOTES = 4
"""Classes whose averaged probability is kept per sample: `vote` int32 and `vote_p` float16, [n, VOTES], the likeliest first.

They have memory of their own, 24 bytes per sample, which the system hands out only once logits are recorded.
"""
VOTE_DECAY = 0.7
"""Weight of what was known before in the averaged prediction, per window since the last visit (the beta of early-learning
regularisation). It counts windows rather than visits: rare visits are not averaged over a longer past."""


def bytes_per_sample() -> int:
    return sum(np.dtype(column.dtype).itemsize for column in COLUMNS.values())


def vote_bytes_per_sample() -> int:
    return VOTES * (np.dtype(np.int32).itemsize + np.dtype(np.float16).itemsize)
