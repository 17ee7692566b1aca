"""Life cycle: the share of the samples that a window visits, as a pure function of the clock."""

from __future__ import annotations

import math

from salience.errors import ConfigError
from salience.registry import card
from salience.select.view import Clock


def constant(clock: Clock, *, share: float = 0.5) -> float:
    """The same share in every window."""
    return _share("share", share)


def step(clock: Clock, *, share: float = 0.5, warmup: int = 0, end: float = 0.125) -> float:
    """`share`, then everything for the last part `end` of the run (InfoBatch's annealing with end = 0.125)."""
    if clock.window < warmup or _at_the_end(clock, end):
        return 1.0
    return _share("share", share)


def cosine(clock: Clock, *, high: float = 1.0, low: float = 0.3) -> float:
    """From `high` down to `low` along half a cosine."""
    turn = 0.5 * (1 + math.cos(math.pi * clock.window / max(1, clock.windows - 1)))
    return _share("low", low) + (_share("high", high) - low) * turn


def all_less_all(clock: Clock, *, share: float = 0.4, warmup: float = 2, end: float = 0.2) -> float:
    """Everything for `warmup` windows, `share` in the middle, everything for the last part `end` of the run.

    In short runs the warm-up is at most a fifth of the windows, so that there is a middle.
    """
    first = min(warmup, clock.windows / 5)
    if clock.window < math.ceil(first) or _at_the_end(clock, end):
        return 1.0
    return _share("share", share)


def alternate(clock: Clock, *, drop: float = 0.25, prune: int = 4, regular: int = 3) -> float:
    """`regular` windows of everything, then `prune` windows without the share `drop`, over and over; the last one is whole.

    Data fine-pruning (Li et al. 2018). The saving is known in advance: drop * prune / (prune + regular), a seventh by default.
    """
    if not 0 < drop < 1 or prune < 1 or regular < 1:
        raise ConfigError(
            f"alternate: drop is {drop} (above 0, below 1), prune {prune}, regular {regular} (at least 1 each)."
        )
    whole = clock.window % (regular + prune) < regular or clock.window >= clock.windows - 1
    return 1.0 if whole else 1.0 - drop


@card(exact=False)
def auto(clock: Clock, *, share: float = 0.4, warmup: float = 2, end: float = 0.2) -> float:
    """`all_less_all` with a `share` in the middle that follows the validation results, if there is a baseline."""
    steered = share if clock.steered is None else clock.steered
    return all_less_all(clock, share=steered, warmup=warmup, end=end)


def _at_the_end(clock: Clock, end: float) -> bool:
    """True if the window belongs to the last part `end` of the run, which is at least one window."""
    return clock.window >= clock.windows - max(1, round(clock.windows * _share("end", end)))


def _share(name: str, value: float) -> float:
    if not 0 < value <= 1:
        raise ConfigError(f"keep: {name} is {value}; a share must be above 0 and at most 1.")
    return float(value)
