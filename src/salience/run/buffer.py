"""The samples that a window of a stream holds in memory, by row."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from torch import Tensor
from torch.utils.data import Dataset

SAMPLES_MEASURED = 100
"""Samples whose memory is measured; the others are taken to be like them."""


class Buffer(Dataset[Any]):
    """A data set of the buffered samples; an index is a row of the ledger."""

    def __init__(self) -> None:
        self.rows: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)
        """Rows of the samples, in the order in which they came, int64 [m]."""
        self._samples: dict[int, Any] = {}

    def hold(self, rows: npt.NDArray[np.int64], samples: Sequence[Any]) -> None:
        """Hold these samples, and no others."""
        self.rows = rows
        self._samples = dict(zip(rows.tolist(), samples, strict=True))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Any:
        return self._samples[row]

    @property
    def nbytes(self) -> int:
        """Memory of the samples, from the first ones."""
        some = [self._samples[row] for row in self.rows[:SAMPLES_MEASURED].tolist()]
        return round(sum(map(bytes_of, some)) / max(1, len(some)) * len(self))


def bytes_of(part: Any) -> int:
    """Memory of a sample: its tensors, arrays, strings and containers."""
    if isinstance(part, (Tensor, np.ndarray)):
        return part.nbytes + sys.getsizeof(object())
    if isinstance(part, Mapping):
        items = cast("Mapping[Any, Any]", part)
        return sys.getsizeof(part) + sum(bytes_of(value) for value in items.values())
    if isinstance(part, (list, tuple)):
        return sys.getsizeof(cast("Any", part)) + sum(bytes_of(value) for value in cast("Sequence[Any]", part))
    return sys.getsizeof(part)
