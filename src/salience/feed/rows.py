"""A cache of rows of a large matrix on a slow tier (a memory-mapped file), by access importance.

Training on graphs and on embedding tables gathers rows, many of them again and again. Which rows are worth memory is known
after one window: those that were asked for most often (PaGraph keeps nodes by degree, which is a guess of that).

    importance of a row = times asked for in this window + decay * importance before
    kept from the next window on = the rows of highest importance

A window begins with what is resident, and nothing is exchanged within it: no bookkeeping per access but a count.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from salience.errors import ConfigError, StateError

Ids = npt.NDArray[np.int64]


class RowCache:
    """Rows of `matrix` [n, d] by id; `capacity` of them in memory.

    features = np.load("features.npy", mmap_mode="r")
    rows = salience.feed.RowCache(features, 100_000, importance=degree)
    x = torch.from_numpy(rows.take(ids))      # as features[ids]
    rows.next_window()                        # at the end of each window
    """

    def __init__(
        self, matrix: npt.NDArray[Any], capacity: int, *, importance: npt.ArrayLike | None = None, decay: float = 0.5
    ) -> None:
        """`importance` [n] is a guess for the first window, such as the degree of a node; without it none is kept in that."""
        if matrix.ndim != 2:
            raise ConfigError(f"The matrix has shape {matrix.shape}; it must be [rows, columns].")
        if capacity < 0:
            raise ConfigError(f"capacity is {capacity}; it must be at least 0 rows.")
        if not 0 <= decay < 1:
            raise ConfigError(f"decay is {decay}; it must be at least 0 and below 1.")
        self._matrix, self.capacity, self._decay = matrix, min(capacity, len(matrix)), decay
        self._place = np.full(len(matrix), -1, dtype=np.int64)
        """Place of each row among those kept; -1 = not kept."""
        self._kept: Ids = np.empty(0, dtype=np.int64)
        self._rows = np.empty((self.capacity, matrix.shape[1]), dtype=matrix.dtype)
        self._asked = np.zeros(len(matrix), dtype=np.uint32)
        self.importance = np.zeros(len(matrix), dtype=np.float32)
        """What each row is worth: how often it was asked for, older windows less."""
        self.rows_from_slow_tier = self.rows_from_memory = 0
        """Rows read from the matrix, those that fill the cache included, and from memory."""
        if importance is not None:
            guess = np.asarray(importance, dtype=np.float32)
            if guess.shape != (len(matrix),):
                raise ConfigError(f"importance has shape {guess.shape}; it must be [{len(matrix)}], one per row.")
            self._keep(_highest(guess, self.capacity))

    def take(self, ids: npt.ArrayLike) -> npt.NDArray[Any]:
        """The rows of these ids, [len(ids), d], each read once however often it is named; a copy."""
        wanted, back = np.unique(np.asarray(ids, dtype=np.int64), return_inverse=True)
        if len(wanted) and not 0 <= wanted[0] <= wanted[-1] < len(self._matrix):
            raise ConfigError(
                f"take() was given ids from {wanted[0]} to {wanted[-1]}; the matrix has rows 0 to {len(self._matrix) - 1}."
            )
        self._asked[wanted] += 1
        out = np.empty((len(wanted), self._matrix.shape[1]), dtype=self._matrix.dtype)
        place = self._place[wanted]
        here = place >= 0
        out[here] = self._rows[place[here]]
        out[~here] = self._matrix[wanted[~here]]  # in the order of the file
        self.rows_from_memory += int(np.count_nonzero(here))
        self.rows_from_slow_tier += int(np.count_nonzero(~here))
        return out[back]

    def next_window(self) -> int:
        """Keep the most important rows from now on; returns how many had to be read for that."""
        self.importance = self._asked.astype(np.float32) + np.float32(self._decay) * self.importance
        self._asked[:] = 0
        best = _highest(self.importance, self.capacity)
        return self._keep(best[self.importance[best] > 0])

    def _keep(self, rows: Ids) -> int:
        """Exchange what is not among `rows` for those of them that are missing, in place."""
        stays = np.zeros(len(self._matrix), dtype=bool)
        stays[rows] = True
        gone = self._kept[~stays[self._kept]]
        missing = rows[self._place[rows] < 0]
        used = len(self._kept)
        free = np.concatenate((self._place[gone], np.arange(used, self.capacity)))[: len(missing)]
        if len(missing) < len(gone):  # nothing better is known for some places: their rows stay
            gone = gone[: len(missing)]
        self._place[gone] = -1
        self._place[missing] = free
        self._rows[free] = self._matrix[missing]
        self._kept = np.flatnonzero(self._place >= 0)
        self.rows_from_slow_tier += len(missing)
        return len(missing)

    def state_dict(self) -> dict[str, Any]:
        """What is worth keeping, and the counts; rows themselves are read again after a resume."""
        return {
            "importance": self.importance.copy(), "asked": self._asked.copy(), "kept": self._kept.copy(),
            "slow": self.rows_from_slow_tier, "memory": self.rows_from_memory,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if len(state["importance"]) != len(self._matrix):
            raise StateError(
                f"The state is of a matrix of {len(state['importance'])} rows and this one has {len(self._matrix)}; resume "
                "with the matrix it was made from."
            )
        self._place[:], self._kept = -1, np.empty(0, dtype=np.int64)
        self._keep(np.asarray(state["kept"], dtype=np.int64)[: self.capacity])
        self.importance, self._asked = state["importance"].copy(), state["asked"].copy()
        self.rows_from_slow_tier, self.rows_from_memory = int(state["slow"]), int(state["memory"])


def _highest(values: npt.NDArray[np.floating[Any]], count: int) -> Ids:
    """The `count` rows of the highest values, in the order of their ids; of equals, the first."""
    if count >= len(values):
        return np.arange(len(values))
    return np.sort(np.argsort(-values, kind="stable")[:count])
