"""Nearest neighbours among N vectors, fast enough to find near-copies while training runs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

MAX_VECTORS_FOR_ALL_PAIRS = 6_000
"""Up to this many vectors, every pair is compared."""
BLOCK_ROWS = 4096
CELLS_PER_VECTOR = 4
"""Cells each vector is a member of: a copy almost always shares at least one of them."""

Found = tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]


def nearest(vectors: npt.NDArray[np.float32], k: int) -> Found:
    """Distances [n, k] to the k nearest others and their positions [n, k], nearest first; inf and -1 if there are fewer.

    The result is exact for up to MAX_VECTORS_FOR_ALL_PAIRS vectors. Beyond that, space is divided into 2 sqrt(n) cells, each
    vector joins its CELLS_PER_VECTOR nearest cells, and vectors in the same cell are compared: about 15 n^1.5 comparisons in
    whole matrix products. A vector much closer than its surroundings is almost always found (benchmarks/neighbours.py compares
    this with libraries).
    """
    z = torch.from_numpy(np.ascontiguousarray(vectors))
    n = len(z)
    squares = torch.linalg.vecdot(z, z)
    best = torch.full((n, k), torch.inf)
    where = torch.full((n, k), -1, dtype=torch.int64)
    if n <= MAX_VECTORS_FOR_ALL_PAIRS:
        _compare(z, squares, torch.arange(n), best, where)
    else:
        cell = _cells(z, int(2 * n**0.5))
        order = cell.T.reshape(-1).argsort(stable=True)
        sizes = torch.bincount(cell.reshape(-1)).tolist()
        for members in (order % n).split(sizes):
            _compare(z, squares, members.sort().values, best, where)
    return best.clamp_min(0).sqrt().numpy(), where.numpy()


def comparisons(n: int) -> float:
    """Approximate number of vectors that each of `n` is compared with."""
    return float(n) if n <= MAX_VECTORS_FOR_ALL_PAIRS else 15 * n**0.5


def _cells(z: Tensor, count: int) -> Tensor:
    """The CELLS_PER_VECTOR cells each vector is a member of, int64 [n, CELLS_PER_VECTOR].

    Centres are vectors drawn at random, each moved to the mean of those nearest to it (one step of k-means): a vector
    in the middle of others would be nearest to far too many.
    """
    drawn = torch.randperm(len(z), generator=torch.Generator().manual_seed(0))[:count]
    home = _nearest_centres(z, z[drawn], 1)[:, 0]
    total = torch.zeros(count, z.shape[1]).index_add_(0, home, z)
    means = total / torch.bincount(home, minlength=count).clamp_min(1)[:, None]
    return _nearest_centres(z, means, CELLS_PER_VECTOR)


def _nearest_centres(z: Tensor, centres: Tensor, k: int) -> Tensor:
    squares = torch.linalg.vecdot(centres, centres)
    return torch.cat([_apart(rows, centres, squares).topk(k, 1, largest=False).indices for rows in z.split(BLOCK_ROWS)])


def _apart(rows: Tensor, columns: Tensor, squares: Tensor) -> Tensor:
    """Squared distances [rows, columns] less |row|^2, which does not change what is nearest; `squares` are |column|^2."""
    return torch.addmm(squares, rows, columns.T, alpha=-2)


def _compare(z: Tensor, squares: Tensor, members: Tensor, best: Tensor, where: Tensor) -> None:
    """Merge the nearest among `members` (ascending) of each of them into `best` and `where`."""
    k, columns, theirs = best.shape[1], z[members], squares[members]
    for start in range(0, len(members), BLOCK_ROWS):
        rows = members[start : start + BLOCK_ROWS]
        apart = _apart(columns[start : start + BLOCK_ROWS], columns, theirs)
        apart[torch.arange(len(rows)), torch.arange(start, start + len(rows))] = torch.inf
        if 32 * k < len(members) < 64 * k:  # from 64 k columns on, topk has a way that is three times as fast
            apart = F.pad(apart, (0, 64 * k - len(members)), value=torch.inf)
        near, at = apart.topk(min(k, len(members)), 1, largest=False)
        near += squares[rows, None]
        near, at = torch.cat((best[rows], near), 1), torch.cat((where[rows], members[at]), 1)
        # The same neighbour found in another cell counts once: sorted by position, a repeat stands behind its twin.
        at, order = at.sort(dim=1, stable=True)
        near = near.gather(1, order)
        near[:, 1:][at[:, 1:] == at[:, :-1]] = torch.inf
        near, order = near.topk(k, 1, largest=False)
        best[rows], where[rows] = near, at.gather(1, order).masked_fill(near.isinf(), -1)
