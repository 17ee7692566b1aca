"""Keys: the name of each sample, and its row in the ledger."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator

import numpy as np
import numpy.typing as npt

from salience.errors import ConfigError, DataError


class Keys:
    """Maps keys to rows. Positions 0 to n - 1 are their own rows and cost nothing; other keys get rows in order of arrival.

    Keys are integers, strings or bytes, which can be saved and mean the same in another run.
    """

    def __init__(self, n: int | None = None) -> None:
        self._n = n
        """Number of rows of a dense range; None if keys are looked up."""
        self._row: dict[Hashable, int] = {}

    def __len__(self) -> int:
        """Rows in use."""
        return len(self._row) if self._n is None else self._n

    @property
    def dense(self) -> bool:
        """True if the keys are positions."""
        return self._n is not None

    def rows(self, keys: Iterable[Hashable] | npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The rows of known keys, int64 [B]; raises DataError for an unknown key."""
        if self._n is not None:
            found = np.asarray(keys, dtype=np.int64)
            if len(found) and not (found.min() >= 0 and found.max() < self._n):
                raise DataError(
                    f"Keys are positions from 0 to {self._n - 1}; got {int(found.min())} to {int(found.max())}."
                )
            return found
        try:
            return np.array([self._row[key] for key in keys], dtype=np.int64)
        except KeyError as cause:
            raise DataError(f"The ledger has no sample {cause.args[0]!r}; add it first.") from None

    def add(self, keys: Iterable[Hashable]) -> npt.NDArray[np.int64]:
        """The rows of `keys`, int64 [B]; new keys are added at the end."""
        if self._n is not None:
            raise ConfigError("Keys of a dense range are positions; a data set that grows needs keys of its own.")
        row = self._row
        return np.array([row.setdefault(key, len(row)) for key in keys], dtype=np.int64)

    def __iter__(self) -> Iterator[Hashable]:
        """The keys, by row."""
        return iter(range(self._n) if self._n is not None else self._row)
