"""The learning rate of a larger batch: scaling rules by name, and warm-up.

linear   lr * B / B0          SGD (Goyal et al. 2017)
sqrt     lr * sqrt(B / B0)    Adam and its kin (Krizhevsky 2014; Malladi et al. 2022)
"""

from __future__ import annotations

from collections.abc import Callable

from salience.errors import ConfigError, did_you_mean
from salience.shapes import Shape, shape_of

RULES: dict[str, Callable[[float], float]] = {"linear": lambda k: k, "sqrt": lambda k: k**0.5, "none": lambda k: 1.0}


def scaled_rate(lr: float, batch: int, base: int, rule: str = "linear") -> float:
    """The rate for steps of `batch` samples over all ranks, if `lr` was found for steps of `base`."""
    if rule not in RULES:
        raise ConfigError(f"There is no scaling rule {rule!r}.{did_you_mean(rule, RULES)}")
    if batch < 1 or base < 1:
        raise ConfigError(f"batch is {batch} and base is {base}; both must be at least 1.")
    return lr * RULES[rule](batch / base)


def warmup(shape: str | Shape = "cosine", share: float = 0.1, start: float = 0.0) -> Shape:
    """A shape for `ProgressLR`: in a straight line from `start` to what `shape` has at progress `share`, then `shape`."""
    if not 0 < share < 1:
        raise ConfigError(f"share is {share}; the warm-up takes a share of the run above 0 and below 1.")
    after = shape_of(shape)

    def warmed(progress: float) -> float:
        if progress >= share:
            return after(progress)
        return start + (after(share) - start) * progress / share

    return warmed
