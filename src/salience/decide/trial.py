"""Did it help? Windows with and without a lever alternate, with a paired test unless the first pair is clear.

speed-up        exp(mean d),  d_i = log(seconds of window i without) - log(seconds of window i with)
lower bound     exp(mean d - t * s / sqrt(k)),  t = 95% point of Student's t with k - 1 degrees of freedom, one-sided
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from salience.decide.levers import Option, Settings
from salience.decide.timing import WindowTiming
from salience.stats import paired_interval

MIN_SPEEDUP_TO_KEEP = 1.02
"""A lever stays on if the lower bound of its speed-up is above this."""
MIN_FIRST_SPEEDUP, CLEAR_FIRST_SPEEDUP = 1 / 1.1, 1.25
"""If the first pair shows a speed-up below the first value, or above the second, the trial ends at once.

Of recorded windows with equal settings, only one in fifty is faster than another by more than the second value.
"""
MAX_PAIRS = 4
"""After this many pairs the trial ends, whatever the result."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """A measured speed-up with its interval: the true value is beyond each end with 5% probability."""

    speedup: float
    low: float
    high: float


def gain(off: Sequence[float], on: Sequence[float]) -> Gain:
    """The speed-up from pairs of seconds without and with the lever; a single pair has no interval."""
    k = min(len(off), len(on))
    d = np.log(np.asarray(off[:k], dtype=float)) - np.log(np.asarray(on[:k], dtype=float))
    found = paired_interval(d.tolist(), 0.90)  # 5% on each side
    if found is None or found.low is None or found.high is None:
        return Gain(speedup=math.exp(float(d.mean())), low=0.0, high=math.inf)
    return Gain(speedup=math.exp(found.mean), low=math.exp(found.low), high=math.exp(min(found.high, 700.0)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One lever under test."""

    option: Option
    base: Settings
    """The settings without the lever."""
    off: tuple[float, ...]
    on: tuple[float, ...] = ()
    """Seconds of windows with the lever; for a lever with memory, of the parts of one window."""
    filled: bool = False
    whole: bool = False
    """True if the lever was on from the start: the window that filled it is then compared with the next."""
    windows: int = 0
    """Number of windows that the trial has taken so far."""
    unseen: int = 0
    """Number of windows of the trial that could not be measured."""

    @classmethod
    def of(cls, option: Option, base: Settings, timing: WindowTiming) -> Trial:
        """A trial that begins after a window measured without the lever."""
        return cls(option=option, base=base, off=timing.blocks if option.remembers else (timing.seconds,))

    def after(self, timing: WindowTiming, settings: Settings) -> Trial:
        """This trial with the window that was just measured under `settings`."""
        trial = replace(self, windows=self.windows + 1)
        if settings != self.option.settings:
            return replace(trial, off=(*self.off, timing.seconds))
        if not self.option.remembers:
            return replace(trial, on=(*self.on, timing.seconds))
        if self.whole:
            return replace(trial, on=(timing.seconds,))
        return replace(trial, on=timing.blocks) if self.filled else replace(trial, filled=True)

    @property
    def next(self) -> Settings:
        """The settings of the next window during the trial: the lever is alternately on and off."""
        return self.base if len(self.on) == len(self.off) and not self.option.remembers else self.option.settings

    @property
    def gain(self) -> Gain | None:
        """The speed-up measured so far; None if nothing can be said yet."""
        whole = bool(self.on) and (self.option.remembers or len(self.on) == len(self.off))
        return gain(self.off, self.on) if whole else None

    @property
    def verdict(self) -> tuple[bool, str] | None:
        """True to keep the lever or False to undo it, and the reason; None while the trial continues."""
        found, pairs = self.gain, len(self.on)
        if found is None:
            return None
        if self.whole:
            return self._ruling(found.speedup, "it", "; one window against the one that filled it: weak evidence")
        if self.option.remembers:
            weaker = "; window over window after one of filling: weaker evidence"
            return self._ruling(found.low, "the lower bound", weaker)
        if pairs == 1 and found.speedup < MIN_FIRST_SPEEDUP:
            return False, "its first window was slower by more than a tenth"
        if pairs == 1:
            clear = found.speedup > CLEAR_FIRST_SPEEDUP
            return (True, "its first window was faster by more than a quarter") if clear else None
        ruling = self._ruling(found.low, f"the lower bound of {pairs} pairs of windows")
        over = ruling[0] or found.speedup <= MIN_SPEEDUP_TO_KEEP or pairs >= MAX_PAIRS
        return ruling if over else None

    @staticmethod
    def _ruling(bound: float, what: str, evidence: str = "") -> tuple[bool, str]:
        kept = bound > MIN_SPEEDUP_TO_KEEP
        return kept, f"{what} is {'' if kept else 'not '}above {MIN_SPEEDUP_TO_KEEP}{evidence}"


def windows_needed(option: Option) -> int:
    """Minimum number of windows of a trial after one without the lever: one if the gain is clear; memory is filled first."""
    return 2 if option.remembers else 1
