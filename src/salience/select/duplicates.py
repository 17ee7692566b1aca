"""Near-duplicate documents: MinHash over byte shingles, found by locality-sensitive hashing, with whole arrays only.

A document is the set of its `SHINGLE`-byte windows. One hash per window both chooses a bin and gives its value; the smallest
value of each bin is kept (one-permutation hashing, Li et al. 2012). Two documents agree in a bin with the probability of their
Jaccard similarity; bins that a short document leaves empty are borrowed from the next one (Shrivastava and Li 2014). Documents
whose signatures agree in a whole band of bins are compared, and are copies if they agree in at least `threshold` of all bins.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from salience.errors import ConfigError, DataError
from salience.ledger.copies import Copies, connected

SHINGLE = 8
"""Bytes per shingle: about a word and a half, and as long as a machine word."""
BINS = 64
"""Values per signature, 4 bytes each: an estimated similarity of s scatters by sqrt(s (1 - s) / 64), at most 0.06."""
DOCUMENTS_TOGETHER = 8_192
"""Documents hashed together: the windows of one group fit into a few hundred megabytes."""
NONE = np.uint32(0xFFFFFFFF)
"""Value of an empty bin."""

Signatures = npt.NDArray[np.uint32]


def near_duplicates(texts: Iterable[str | bytes], *, threshold: float = 0.7, band: int = 4) -> Copies:
    """Groups of documents whose shingles are at least `threshold` alike (Jaccard), transitively, for `Loader(copies=...)`.

    `band` is the number of bins that must agree for a comparison: with 4, pairs of similarity 0.7 are found with probability
    0.99, and those of 0.8 always but for one in ten thousand. Empty texts are copies of nothing.
    """
    if not 0 < threshold <= 1 or not 1 <= band <= BINS:
        raise ConfigError(f"near_duplicates: threshold is {threshold} (0 to 1), band is {band} (1 to {BINS}).")
    signature = signatures(texts)
    n, known = len(signature), np.flatnonzero((signature != NONE).any(axis=1))
    similarity = np.zeros(n, dtype=np.float32)
    rows: list[npt.NDArray[np.int64]] = []
    columns: list[npt.NDArray[np.int64]] = []
    for first in range(0, BINS - band + 1, band):
        keys = _mixed(signature[known, first : first + band])
        order = np.argsort(keys, kind="stable")
        ordered, members = keys[order], known[order]
        same = np.flatnonzero(ordered[1:] == ordered[:-1])
        begins = np.maximum.accumulate(np.where(np.append(True, ordered[1:] != ordered[:-1]), np.arange(len(order)), 0))
        for others in (members[same], members[begins[same + 1]]):  # its neighbour, and the first of its run
            one, other = others, members[same + 1]
            alike = _agreement(signature, one, other)
            near = alike >= threshold
            rows.append(one[near])
            columns.append(other[near])
            for end in (one, other):
                np.maximum.at(similarity, end[near], alike[near])
    group = connected(n, np.concatenate(rows), np.concatenate(columns))
    return Copies(group=group, similarity=np.where(group >= 0, similarity, 0).astype(np.float32))


def signatures(texts: Iterable[str | bytes]) -> Signatures:
    """MinHash signatures of documents, uint32 [n, BINS]; all `NONE` for an empty document."""
    parts: list[Signatures] = []
    remaining = iter(texts)
    while some := list(itertools.islice(remaining, DOCUMENTS_TOGETHER)):
        parts.append(_signatures(some))
    return np.concatenate(parts) if parts else np.empty((0, BINS), dtype=np.uint32)


def _signatures(texts: Sequence[str | bytes]) -> Signatures:
    encoded = [_bytes(text) for text in texts]
    lengths = np.array([len(text) for text in encoded], dtype=np.int64)
    padded = np.frombuffer(b"".join(text.ljust(SHINGLE, b"\0") for text in encoded), dtype=np.uint8)
    windows = _windows(padded)
    sizes = np.maximum(lengths, SHINGLE)
    starts = np.cumsum(sizes) - sizes
    document = np.repeat(np.arange(len(texts)), sizes)[: len(windows)]
    inside = (
        np.arange(len(windows)) <= (starts + sizes - SHINGLE)[document]
    )  # a window does not reach into the next document
    inside &= (lengths > 0)[document]
    hashes, document = _finished(windows[inside]), document[inside]
    at = document * BINS + (hashes >> np.uint64(58)).astype(np.int64)
    found = np.full(len(texts) * BINS, NONE, dtype=np.uint32)
    np.minimum.at(found, at, (hashes >> np.uint64(20)).astype(np.uint32))
    return _densified(found.reshape(len(texts), BINS))


def _bytes(text: str | bytes) -> bytes:
    if isinstance(text, str):
        return text.encode("utf-8", "surrogatepass")
    if isinstance(text, bytes):  # pyright: ignore[reportUnnecessaryIsInstance]
        return text
    raise DataError(f"near_duplicates was given a {type(text).__name__}; pass texts, as str or bytes.")


def _windows(padded: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """The `SHINGLE` bytes from each position on as one number."""
    count = max(0, len(padded) - SHINGLE + 1)
    words = np.zeros(count, dtype=np.uint64)
    for k in range(SHINGLE):
        words |= padded[k : k + count].astype(np.uint64) << np.uint64(8 * k)
    return words


def _finished(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A hash in which every bit depends on every bit (the finaliser of SplitMix64)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _densified(found: Signatures) -> Signatures:
    """Empty bins take the value of the next bin that is not, plus how far it is, so that equal distances compare."""
    empty = found == NONE
    if not empty.any():
        return found
    twice = np.concatenate((found, found), axis=1)
    place = np.where(twice == NONE, 2 * BINS, np.arange(2 * BINS))
    nearest = np.minimum.accumulate(place[:, ::-1], axis=1)[:, ::-1][:, :BINS]
    away = (nearest - np.arange(BINS)).astype(np.uint32)
    taken = np.take_along_axis(twice, np.minimum(nearest, 2 * BINS - 1), axis=1)
    return np.where(empty & (nearest < 2 * BINS), taken + away * np.uint32(0x9E3779B1), found)


def _mixed(band: Signatures) -> npt.NDArray[np.uint64]:
    """One number per row of a band."""
    keys = np.zeros(len(band), dtype=np.uint64)
    for column in range(band.shape[1]):
        keys = _finished(keys ^ band[:, column].astype(np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
    return keys


def _agreement(
    signature: Signatures, one: npt.NDArray[np.int64], other: npt.NDArray[np.int64]
) -> npt.NDArray[np.float32]:
    """Share of the bins in which pairs of documents agree, piece by piece."""
    pieces = [slice(start, start + (1 << 16)) for start in range(0, len(one), 1 << 16)]
    found = [(signature[one[piece]] == signature[other[piece]]).mean(axis=1, dtype=np.float32) for piece in pieces]
    return np.concatenate(found) if found else np.empty(0, dtype=np.float32)
