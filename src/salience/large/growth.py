"""Batches that grow where the learning rate would fall (Smith et al. 2018; Seesaw, 2025).

factor at progress p    k = 2^floor(log2(peak rate so far / rate at p)), at most the cap
rate                    SGD: rate(p) * k     Adam: rate(p) * sqrt(k)

For SGD, doubling the batch where the rate would halve leaves the noise of a step as it was, with half as many steps; for Adam
the rate falls by sqrt(2) instead of 2. The factor is in the Plan (`batch_size`, `lr_scale`), and progress counts samples: a
schedule over progress stays what it is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

from salience.errors import ConfigError, did_you_mean
from salience.shapes import Shape, shape_of

RATES: dict[str, Callable[[float], float]] = {"sgd": lambda k: k, "adam": math.sqrt}


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """How batches grow: `Loader(..., grow=Growth(most=4096, shape="cosine"))` and `ProgressLR(optimizer, loader, "cosine")`."""

    most: int
    """Samples per step over all ranks at the most."""
    shape: str | Shape = "one_cycle"
    """The shape of the schedule, the same that `ProgressLR` gets."""
    rule: str = "sgd"
    """"sgd": the rate is multiplied by the factor; "adam": by its square root."""

    def __post_init__(self) -> None:
        shape_of(self.shape)
        if self.rule not in RATES:
            raise ConfigError(f"grow: there is no rule {self.rule!r}.{did_you_mean(self.rule, RATES)}")
        if self.most < 1:
            raise ConfigError(f"grow: most is {self.most}; it must be at least 1.")

    def factor(self, window: int, windows: int) -> int:
        """How many times larger the batches of a window are, before the cap: a power of 2 that never falls."""
        return _factors(shape_of(self.shape), windows)[min(window, windows - 1)]

    def batch(self, base: int, window: int, windows: int, samples: int) -> int:
        """Samples per step in a window: `base` times the largest power of 2 within the factor, the cap and the samples."""
        k = self.factor(window, windows)
        while k > 1 and base * k > min(self.most, samples):
            k //= 2
        return base * k

    def lr_scale(self, base: int, batch: int) -> float:
        """Factor on the learning rate in a window of such batches."""
        return RATES[self.rule](batch / base)

    @property
    def described(self) -> str:
        """In one line, the same for equal settings."""
        shape = self.shape if isinstance(self.shape, str) else getattr(self.shape, "__qualname__", "function")
        return f"{self.most} {shape} {self.rule}"


@functools.cache
def _factors(shape: Shape, windows: int) -> tuple[int, ...]:
    """The factor of every window: that of the rate at its beginning."""
    found: list[int] = []
    peak, doublings = 0.0, 0
    for window in range(windows):
        rate = max(1e-9, float(shape(window / windows)))
        peak = max(peak, rate)
        doublings = max(doublings, math.floor(math.log2(peak / rate) + 1e-9))
        found.append(2**doublings)
    return tuple(found)
