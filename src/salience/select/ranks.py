"""Rank normalisation: any score to [0, 1], exactly by radix sort, or by histogram if there are very many samples."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from salience.select.view import Floats

MAX_SAMPLES_FOR_EXACT_RANKS = 1_000_000
_PIECE = 1 << 22


def rank_normalise(score: npt.NDArray[np.floating]) -> Floats:
    """Mid-rank of each value divided by n, in (0, 1); equal values get equal ranks; NaN (nothing known) ranks highest.

    rank(x) = (number below x + half the number equal to x) / n, so the mean is exactly 1/2.
    """
    keys = ordered_keys(score)
    return _exact(keys) if len(keys) <= MAX_SAMPLES_FOR_EXACT_RANKS else _by_histogram(keys)


def ranks_of_known(score: npt.NDArray[np.floating]) -> Floats:
    """The same ranks among the values that are known; NaN stays NaN."""
    known = np.isfinite(score)
    ranks = np.full(len(score), np.nan, dtype=np.float32)
    if known.any():
        ranks[known] = rank_normalise(score[known])
    return ranks


def ordered_keys(score: npt.NDArray[np.floating]) -> npt.NDArray[np.uint32]:
    """uint32 keys in the order of the floats: negative numbers have all bits flipped, others the sign bit."""
    values = score.astype(np.float32)
    values += np.float32(0)  # -0.0 and 0.0 are the same value and must be the same key
    np.copyto(values, np.float32(np.nan), where=np.isnan(values))  # one positive NaN, above infinity
    bits = values.view(np.int32)
    bits ^= (bits >> 31) | np.int32(-(1 << 31))
    return values.view(np.uint32)


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
    """Mid-rank of the value's bin; a bin is the values that agree in sign, exponent and 11 bits of fraction (13 above 10 M).

    Piece by piece, since NumPy turns indices into 64-bit copies and memory fresh from the system is slow.
    """
    shift = 12 if len(keys) < 10_000_000 else 10
    counts = np.zeros(1 << (32 - shift), dtype=np.int64)
    pieces = [slice(start, start + _PIECE) for start in range(0, len(keys), _PIECE)]
    for piece in pieces:
        counts += np.bincount(keys[piece] >> shift, minlength=len(counts))
    middle = ((np.cumsum(counts) - counts / 2) / len(keys)).astype(np.float32)
    ranks = np.empty(len(keys), dtype=np.float32)
    for piece in pieces:
        ranks[piece] = middle[keys[piece] >> shift]
    return ranks
