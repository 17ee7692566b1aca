"""Nearest neighbours among N vectors, fast enough to look for near-copies while training runs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

EXACT = 20_000
"""Up to so many vectors every pair is compared."""
BLOCK = 4096
NEAR = 3
"""Cells each vector is a member of: a copy shares at least one of them all but always."""

Found = tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]


def nearest(vectors: npt.NDArray[np.float32], k: int, *, seed: int = 0) -> Found:
    """Distances [n, k] to the k nearest others and their positions [n, k], nearest first; inf and -1 where there are fewer.

    Up to EXACT vectors exactly. Beyond, 2 sqrt(n) vectors drawn at random are centres of cells, each vector joins its NEAR
    nearest cells, and vectors in one cell are compared: about 12 n^1.5 comparisons in whole matrix products. What lies
    much closer than its surroundings is found all but always (benchmarks/neighbours.py compares with libraries).
    """
    z = torch.from_numpy(np.ascontiguousarray(vectors))
    n = len(z)
    squares = torch.linalg.vecdot(z, z)
    best = torch.full((n, k), torch.inf)
    where = torch.full((n, k), -1, dtype=torch.int64)
    if n <= EXACT:
        members = torch.arange(n)
        _compare(z, squares, members, best, where)
    else:
        generator = torch.Generator().manual_seed(seed)
        centres = torch.randperm(n, generator=generator)[: int(2 * n**0.5)]
        cell = torch.cat(
            [
                _apart(z, squares, rows, centres).topk(NEAR, 1, largest=False).indices
                for rows in torch.arange(n).split(BLOCK)
            ]
        )
        order = cell.T.reshape(-1).argsort(stable=True)
        sizes = torch.bincount(cell.reshape(-1), minlength=len(centres)).tolist()
        for members in (order % n).split(sizes):
            _compare(z, squares, members.sort().values, best, where)
    return best.clamp_min(0).sqrt().numpy(), where.numpy()


def _apart(z: Tensor, squares: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Squared distances [rows, columns]."""
    return torch.addmm(squares[columns], z[rows], z[columns].T, alpha=-2) + squares[rows, None]


def _compare(z: Tensor, squares: Tensor, members: Tensor, best: Tensor, where: Tensor) -> None:
    """Enter the nearest among `members` (ascending) of each of them into `best` and `where`, beside what is there."""
    k = best.shape[1]
    for start in range(0, len(members), BLOCK):
        rows = members[start : start + BLOCK]
        apart = _apart(z, squares, rows, members)
        apart[torch.arange(len(rows)), torch.arange(start, start + len(rows))] = torch.inf
        near, at = apart.topk(min(k, len(members)), 1, largest=False)
        near, at = torch.cat((best[rows], near), 1), torch.cat((where[rows], members[at]), 1)
        # The same neighbour found in another cell counts once: sorted by position, a repeat stands behind its twin.
        at, order = at.sort(dim=1, stable=True)
        near = near.gather(1, order)
        near[:, 1:][at[:, 1:] == at[:, :-1]] = torch.inf
        near, order = near.topk(k, 1, largest=False)
        best[rows], where[rows] = near, at.gather(1, order).masked_fill(near.isinf(), -1)
