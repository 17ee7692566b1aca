"""Choosing among samples whose ledger lies on many nodes: each holds its own rows, and only histograms travel.

The `budget` samples of highest score are found by radix selection. A score is a 32-bit key in the order of its value; round
by round the nodes add up how many samples have each value of the next 12 bits, until the key of the last one is known:

    count_r[b] = |{ i : key_i begins with the prefix found so far, and its next bits are b }|      (12, 12 and 8 bits)

Three rounds make the cut exact; fewer leave out the low bits, as a histogram does. Of samples at the cut, nodes take a part in
proportion to how many they have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from salience.select.ranks import ordered_keys
from salience.select.view import Floats, Ids, Rng

Counts = npt.NDArray[np.int64]
Add = Callable[[Counts], Counts]
"""Adds up an array over all nodes: an all-reduce."""
BITS = (12, 12, 8)
"""Bits of the key that each round finds: at most 4096 counts travel, 32 KiB."""
PIECE = 1 << 22
"""Rows that are looked at together, so that a column may be a memory map much larger than memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """Where the samples that are taken end."""

    key: int
    """Samples whose leading bits are above this are taken."""
    bits: int
    """Leading bits that count: 32 = the whole key."""
    at_cut: int
    """Samples with exactly these leading bits to take, over all nodes."""
    taken: int
    """Samples to take over all nodes: the budget, or everything if there is less."""
    sent: int
    """Bytes that each node sent to find it."""


def find_cut(score: Floats, budget: int, add: Add, *, rounds: int = len(BITS)) -> Cut:
    """The cut above which the `budget` highest scores of all nodes lie; `score` are those of this node's rows.

    NaN (nothing known) counts as highest. Every node must call it; all get the same answer.
    """
    prefix, found, left, sent, taken = 0, 0, budget, 0, budget
    for width in BITS[:rounds]:
        counts = np.zeros(1 << width, dtype=np.int64)
        shift = 32 - found - width
        for keys in _pieces(score):
            here = keys if not found else keys[(keys >> np.uint32(32 - found)) == prefix]
            counts += np.bincount((here >> np.uint32(shift)) & np.uint32((1 << width) - 1), minlength=1 << width)
        counts, sent = add(counts), sent + counts.nbytes
        if not found:
            left = taken = min(budget, int(counts.sum()))
        above = np.cumsum(counts[::-1])[::-1] - counts  # samples in higher bins
        bin_ = int(np.flatnonzero((above < left) & (left <= above + counts))[0]) if left else len(counts) - 1
        left -= int(above[bin_])
        prefix, found = prefix << width | bin_, found + width
    return Cut(key=prefix, bits=found, at_cut=left, taken=taken, sent=sent)


def take(score: Floats, cut: Cut, rank: int, add: Add, world: int, rng: Rng) -> tuple[Ids, int]:
    """This node's rows among those taken, ascending, int64; and the bytes it sent. `rng` breaks ties, one seed per node."""
    above: list[Ids] = []
    at: list[Ids] = []
    shift = np.uint32(32 - cut.bits)
    for start, keys in zip(range(0, len(score), PIECE), _pieces(score), strict=True):
        leading = keys >> shift
        above.append(start + np.flatnonzero(leading > cut.key))
        at.append(start + np.flatnonzero(leading == cut.key))
    ties = np.concatenate(at)
    mine = np.zeros(world, dtype=np.int64)
    mine[rank] = len(ties)
    share = quota(add(mine), cut.at_cut)[rank]
    chosen = ties if share == len(ties) else rng.choice(ties, share, replace=False)
    return np.sort(np.concatenate((*above, chosen))), mine.nbytes


def quota(counts: Counts, total: int) -> Counts:
    """`total` divided in proportion to `counts`, none above its count; the largest remainders get what is left over."""
    if not counts.sum():
        return counts
    exact = counts * (total / counts.sum())
    parts = np.floor(exact).astype(np.int64)
    parts[np.argsort(parts - exact, kind="stable")[: total - int(parts.sum())]] += 1
    return parts


def importance_of_part(score: Floats, add: Add, *, bits: int = 12) -> Floats:
    """Rank-normalised importance of this node's rows among those of all nodes: the mid-rank of their bin, in (0, 1)."""
    shift, counts = np.uint32(32 - bits), np.zeros(1 << bits, dtype=np.int64)
    for keys in _pieces(score):
        counts += np.bincount(keys >> shift, minlength=1 << bits)
    counts = add(counts)
    middle = ((np.cumsum(counts) - counts / 2) / max(1, counts.sum())).astype(np.float32)
    return np.concatenate([middle[keys >> shift] for keys in _pieces(score)])


def _pieces(score: Floats) -> Iterator[npt.NDArray[np.uint32]]:
    for start in range(0, len(score), PIECE):
        yield ordered_keys(score[start : start + PIECE])
