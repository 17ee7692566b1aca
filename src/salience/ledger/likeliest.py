"""The four likeliest of many classes, for many samples at once: a sorting network of whole-array operations.

`topk` handles one sample after the other and mispredicts most of its branches; minima and maxima of whole arrays do not
branch. Each candidate is one int64: its sort key in the upper half, its class in the lower one. So equal candidates are in the
order of their classes, and nothing has to be looked up afterwards.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from salience.ledger.columns import VOTES

Keys = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Classes = npt.NDArray[np.int32]

LAST_KEY = np.iinfo(np.int64).max
"""A key that sorts after all others."""
INFINITY_BITS = np.float32(np.inf).view(np.int32)
"""Bits of an infinite float32; this minus the bits of a number gets smaller as the number gets larger."""

assert VOTES == 4, "The network is laid out for four."


def likeliest(log_p: Floats) -> tuple[Floats, Classes]:
    """The four largest of log p, which is at most 0, float32 [C, B], and their classes: [4, B] each, the largest first.

    Where there are fewer than four classes, the last ones are NaN.
    """
    keys = _empty(len(log_p), log_p.shape[1])
    lower, upper = _halves(keys)
    np.abs(log_p, out=upper.view(np.float32)[: len(log_p)])  # bits of positive numbers are in the order of the numbers
    lower[: len(log_p)] = np.arange(len(log_p), dtype=np.int32)[:, None]
    classes, size = _halves(smallest(keys))
    return -size.view(np.float32), classes


def strongest(strength: Floats, classes: Classes) -> tuple[Floats, Classes]:
    """The four largest of `strength`, at least 0, float32 [K, B], and their classes: [4, B] each, the largest first."""
    keys = _empty(*strength.shape)
    lower, upper = _halves(keys)
    np.subtract(INFINITY_BITS, strength.view(np.int32), out=upper[: len(strength)])
    lower[: len(strength)] = classes
    classes, size = _halves(smallest(keys))
    return (INFINITY_BITS - size).view(np.float32), classes


def smallest(keys: Keys) -> Keys:
    """The four smallest along the first axis, whose length is a multiple of four, in order: [4, B].

    Groups of four are sorted; then two sorted groups at a time become one: min(a_k, b_(3-k)) are the four smallest of the
    eight, rising and then falling, which two more layers sort (Batcher 1968).
    """
    groups = _sorted(keys.reshape(4, -1, keys.shape[1]))
    while (count := groups.shape[1]) > 1:
        half = count // 2
        merged = np.empty((4, count - half, keys.shape[1]), dtype=np.int64)
        _sort_bitonic(np.minimum(groups[:, :half], groups[::-1, half : 2 * half]), merged[:, :half])
        merged[:, half:] = groups[:, 2 * half :]
        groups = merged
    return groups[:, 0]


def _sorted(keys: Keys) -> Keys:
    """Sort four keys along the first axis: five comparisons."""
    low, high = np.minimum(keys[:2], keys[2:]), np.maximum(keys[:2], keys[2:])
    out = np.empty_like(keys)
    np.minimum(low[0], low[1], out=out[0])
    np.maximum(high[0], high[1], out=out[3])
    one, two = np.maximum(low[0], low[1]), np.minimum(high[0], high[1])
    np.minimum(one, two, out=out[1])
    np.maximum(one, two, out=out[2])
    return out


def _sort_bitonic(keys: Keys, out: Keys) -> None:
    """Sort four keys along the first axis that rise and then fall, or the other way round: four comparisons."""
    low, high = np.minimum(keys[:2], keys[2:]), np.maximum(keys[:2], keys[2:])
    np.minimum(low[0], low[1], out=out[0])
    np.maximum(low[0], low[1], out=out[1])
    np.minimum(high[0], high[1], out=out[2])
    np.maximum(high[0], high[1], out=out[3])


def _empty(count: int, samples: int) -> Keys:
    """Room for `count` keys per sample and as many of the last ones as make whole groups of four."""
    keys = np.empty((-(-count // 4) * 4, samples), dtype=np.int64)
    keys[count:] = LAST_KEY
    return keys


def _halves(keys: Keys) -> tuple[Classes, Classes]:
    """The class and the value that keys are sorted by, int32 each."""
    halves = np.ascontiguousarray(keys).view(np.int32).reshape(*keys.shape, 2)
    low = 0 if np.little_endian else 1
    return halves[..., low], halves[..., 1 - low]
