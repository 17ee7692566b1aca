"""Tensors of several batches, copied into one buffer: an operation on many batches at once costs as much as on one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

ON_HOST, ON_DEVICE = (32, 1 << 20), (16, 16 << 20)
"""Most batches and bytes to collect; on the host they should still be in the processor's cache when they are used."""

Parts = Sequence[Tensor | None]


class Collected:
    """Buffers for tensors that share the length of their first axis and the device of the first of them."""

    def __init__(self, parts: Parts, batches: int | None = None) -> None:
        """Make buffers for batches like `parts`; by default, for as many batches as are worth collecting."""
        first = parts[0]
        assert first is not None
        self.rows, self.limit = 0, len(first) * (batches or worth_collecting(parts))
        self._kind = _kind(parts)
        self._buffers = [
            None if part is None else torch.empty((self.limit, *part.shape[1:]), dtype=part.dtype, device=first.device)
            for part in parts
        ]
        self._arrays: list[npt.NDArray[Any] | None] | None = None
        """The buffers as arrays if everything is on the host, where NumPy copies with less overhead."""
        if all(part is None or (part.device.type == "cpu" and part.dtype != torch.bfloat16) for part in parts):
            self._arrays = [None if buffer is None else buffer.numpy() for buffer in self._buffers]

    def fits(self, parts: Parts) -> bool:
        """True if these are tensors of the same kind and there is room for them."""
        assert parts[0] is not None
        return self.rows + parts[0].shape[0] <= self.limit and _kind(parts) == self._kind

    def add(self, parts: Parts) -> None:
        """Copy: the caller may modify these in place."""
        assert parts[0] is not None
        start, self.rows = self.rows, self.rows + parts[0].shape[0]
        if self._arrays is not None:
            for array, part in zip(self._arrays, parts, strict=True):
                if array is not None and part is not None:
                    array[start : self.rows] = part.detach().numpy()
            return
        for buffer, part in zip(self._buffers, parts, strict=True):
            if buffer is not None and part is not None:
                buffer[start : self.rows].copy_(part.detach(), non_blocking=True)

    def take(self) -> list[Tensor | None]:
        """Return what was collected and start again. The tensors are valid until the next `add`."""
        rows, self.rows = self.rows, 0
        return [None if buffer is None else buffer[:rows] for buffer in self._buffers]


def worth_collecting(parts: Parts) -> int:
    """How many batches like this one to collect; 1 where the batch is large enough by itself."""
    size = sum(part.numel() * part.element_size() for part in parts if part is not None)
    batches, limit = ON_HOST if parts[0] is None or parts[0].device.type == "cpu" else ON_DEVICE
    return max(1, min(batches, limit // max(1, size)))


def _kind(parts: Parts) -> list[object]:
    return [None if part is None else (part.dtype, part.device, part.shape[1:]) for part in parts]
