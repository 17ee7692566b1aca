"""Rank normalisation: any score to [0, 1], exactly by radix sort, by histogram where there are very many samples."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from salience.select.view import Floats

EXACT_LIMIT = 10_000_000
_BINS = 1 << 16


def rank_normalise(score: npt.NDArray[np.floating]) -> Floats:
    """Mid-rank of each value divided by n, in (0, 1); equal values get equal ranks; NaN (nothing known) ranks highest.

    rank(x) = (number below x + half the number equal to x) / n, so the mean is exactly 1/2.
    """
    keys = _ordered_keys(score)
    return _exact(keys) if len(keys) <= EXACT_LIMIT else _by_histogram(keys)


def _ordered_keys(score: npt.NDArray[np.floating]) -> npt.NDArray[np.uint32]:
    """uint32 keys in the order of the floats: negative numbers have all bits flipped, others the sign bit."""
    values = score.astype(np.float32)
    values += np.float32(0)  # -0.0 and 0.0 are the same value and must be the same key
    values[np.isnan(values)] = np.nan  # one positive NaN, above infinity
    bits = values.view(np.uint32)
    sign = (bits >> 31).astype(bool)
    return np.where(sign, ~bits, bits | np.uint32(1 << 31))


def _exact(keys: npt.NDArray[np.uint32]) -> Floats:
    n = len(keys)
    # NumPy sorts 16-bit integers by radix in O(n): two passes beat one comparison sort of 32 bits twofold.
    order = np.argsort(keys.astype(np.uint16), kind="stable")
    order = order[np.argsort((keys >> 16).astype(np.uint16)[order], kind="stable")]
    ordered = keys[order]
    first = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    middle = ((first + np.append(first[1:], n)) / (2 * n)).astype(np.float32)
    ranks = np.empty(n, dtype=np.float32)
    ranks[order] = middle if len(first) == n else np.repeat(middle, np.diff(np.append(first, n)))
    return ranks


def _by_histogram(keys: npt.NDArray[np.uint32]) -> Floats:
    """Mid-rank of the value's bin. Bins hold equal shares of a sample of the values, so ranks are off by about 1/65536."""
    sample = np.sort(keys[:: max(1, len(keys) // (16 * _BINS))])
    edges = np.unique(sample[np.linspace(0, len(sample) - 1, _BINS, dtype=np.int64)])
    top = (keys >> 16).astype(np.uint16)
    # The top half of the key narrows the search to a short run of edges; where it is one bin, no search is needed.
    low = np.searchsorted(edges, np.arange(_BINS, dtype=np.uint32) << 16, side="right").astype(np.int32)
    high = np.append(low[1:], np.int32(len(edges)))
    bins = low[top]
    rest = np.flatnonzero((high - low)[top] > 0)
    bins[rest] = np.searchsorted(edges, keys[rest], side="right")
    counts = np.bincount(bins, minlength=len(edges) + 1)
    above = np.cumsum(counts)
    middle = ((above - counts / 2) / len(keys)).astype(np.float32)
    return middle[bins]
