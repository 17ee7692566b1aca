"""Blocks of steps, with a lever and without it in turns: what is timed, and what follows from it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from salience.decide.trial import CLEAR_FIRST_SPEEDUP, MIN_SPEEDUP_TO_KEEP, gain
from salience.speed.levers import SpeedLever

STEPS_AFTER_SWITCH = 3
"""Steps that do not count after something was switched: they compile, convert and allocate."""
FEWEST_STEPS, MOST_STEPS, SECONDS_PER_BLOCK = 8, 64, 0.3
"""Steps of a block: at least so many, and as many as fill that time, but at most so many."""
MOST_PAIRS = 7
"""Pairs of blocks after which a trial ends."""
DISASTER = 1 / 1.5
"""Speed-up of a first pair of blocks below which a lever is undone at once."""


@dataclass(slots=True)
class Block:
    """Steps in a row under the same levers."""

    skip: int = STEPS_AFTER_SWITCH
    seconds: list[float] = field(default_factory=list[float])
    optimizer: float = 0.0
    wait: float = 0.0


@dataclass(slots=True)
class LeverTrial:
    """A lever under test: seconds per step of blocks without and with it, in turns."""

    lever: SpeedLever
    predicted: float
    off: list[float] = field(default_factory=list[float])
    on: list[float] = field(default_factory=list[float])


def block_verdict(off: Sequence[float], on: Sequence[float]) -> tuple[bool, str] | None:
    """Keep or undo, and why, after pairs of blocks without and with a lever; None while that is open.

    A block is short, so that chance weighs more in it than in a window: one bad pair ends nothing but a disaster. A lever
    is kept if the lower bound of a paired test is above MIN_SPEEDUP_TO_KEEP, or if all but one of MOST_PAIRS pairs are (which
    happens by chance in 6% of all cases).
    """
    pairs, ratios = len(on), [a / b for a, b in zip(off, on, strict=True)]
    if pairs == 1:
        return (False, "its first block was slower by more than a third") if ratios[0] < DISASTER else None
    if pairs == 2 and min(ratios) > CLEAR_FIRST_SPEEDUP:
        return True, "two blocks in a row were faster by more than a quarter"
    if gain(off, on).low > MIN_SPEEDUP_TO_KEEP:
        return True, f"the lower bound of {pairs} pairs of blocks is above {MIN_SPEEDUP_TO_KEEP}"
    if pairs > 2 and statistics.median(ratios) <= MIN_SPEEDUP_TO_KEEP:
        return False, f"the median of {pairs} pairs of blocks is not above {MIN_SPEEDUP_TO_KEEP}"
    if pairs < MOST_PAIRS:
        return None
    faster = sum(ratio > MIN_SPEEDUP_TO_KEEP for ratio in ratios)
    return faster >= MOST_PAIRS - 1, f"{faster} of {MOST_PAIRS} pairs of blocks were faster"
