"""Shapes of a schedule: the learning rate over progress from 0 to 1, relative to its peak."""

from __future__ import annotations

import math
from collections.abc import Callable

from salience.errors import ConfigError, did_you_mean

Shape = Callable[[float], float]


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


SHAPES: dict[str, Shape] = {"one_cycle": one_cycle, "cosine": cosine, "linear": linear}


def shape_of(shape: str | Shape) -> Shape:
    """The shape of that name, or the function itself."""
    if not isinstance(shape, str):
        return shape
    if shape not in SHAPES:
        raise ConfigError(f"There is no schedule shape {shape!r}.{did_you_mean(shape, SHAPES)}")
    return SHAPES[shape]
