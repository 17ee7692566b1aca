"""Keys: the name of each sample, and its row in the ledger."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Hashable, Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from salience.errors import ConfigError, DataError, StateError


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

    def find(self, keys: Iterable[Hashable]) -> npt.NDArray[np.int64]:
        """The rows of `keys`, int64 [B]; -1 for those that are not known."""
        if self._n is not None:
            return self.rows(np.fromiter(keys, dtype=np.int64))
        return np.array([self._row.get(key, -1) for key in keys], dtype=np.int64)

    def __iter__(self) -> Iterator[Hashable]:
        """The keys, by row."""
        return iter(range(self._n) if self._n is not None else self._row)

    def replace(self, other: Keys) -> None:
        """Become what `other` is, as after a resume."""
        self._n, self._row = other._n, dict(other._row)

    @property
    def nbytes(self) -> int:
        """Memory of the keys and of their index, estimated from a sample of them."""
        some = list(itertools.islice(self, 1_000))
        each = sum(map(sys.getsizeof, some)) / max(1, len(some)) + sys.getsizeof(1)
        return sys.getsizeof(self._row) + round(each * len(self._row))

    def array(self) -> npt.NDArray[np.uint8]:
        """The keys as JSON, for files and checkpoints; nothing in it is ever unpickled."""
        plain = [{"bytes": key.hex()} if isinstance(key, bytes) else key for key in self]
        return np.frombuffer(json.dumps(plain).encode(), dtype=np.uint8).copy()

    @classmethod
    def of(cls, keys: Iterable[Hashable]) -> Keys:
        """Keys of a data set, by position; raises DataError if a sample has the key of another one."""
        made, given = cls(), list(keys)
        rows = made.add(given)
        if len(made) < len(given):
            second = int(np.flatnonzero(rows != np.arange(len(given)))[0])
            first = int(rows[second])
            raise DataError(
                f"{len(given) - len(made)} of {len(given)} samples have the key of another one (samples {first} and {second} "
                f"are both {given[second]!r}); a key names one sample."
            )
        return made

    @classmethod
    def from_array(cls, array: npt.NDArray[Any]) -> Keys:
        """What `array` returned; raises StateError if it can be nothing of the kind."""
        try:
            plain = json.loads(np.asarray(array, dtype=np.uint8).tobytes())
            keys = [bytes.fromhex(key["bytes"]) if isinstance(key, dict) else key for key in plain]
            return cls.of(checked_key(key) for key in keys)
        except (ValueError, KeyError, TypeError, DataError) as cause:
            raise StateError(f"The saved keys cannot be read: {cause}") from cause


def checked_key(key: Any) -> Hashable:
    """An integer, string or bytes as it can be saved; raises DataError for anything else."""
    if isinstance(key, (np.generic, Tensor)) and key.ndim == 0:
        key = key.item()
    if isinstance(key, (str, bytes, int)) and not isinstance(key, bool):
        return key
    raise DataError(f"A key is {key!r:.60}, a {type(key).__name__}; keys are strings, integers or bytes.")
