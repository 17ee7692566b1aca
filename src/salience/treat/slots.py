"""Intermediates in memory that all workers of a node share: slots of equal size, in shared memory (`salience.memory`).

The training process assigns slots to samples; workers write and read them. A slot records the sample and the window of its
intermediate, and a missing one is simply made again, with the same values. So there are no locks, a worker that dies leaves at
most one invalid slot behind, and a resumed run does not need the contents.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from salience.memory import Memory, fence

SLOT_HEADER_BYTES = 32
"""Bytes in front of each slot: sample + 1, window, number of bytes, unused."""
ALIGNMENT_BYTES = 64
"""Arrays begin at multiples of this."""


class Slots:
    """`put` and `get` of intermediates; slot k of `size` bytes begins at k * size, a multiple of 8."""

    def __init__(self, memory: Memory) -> None:
        self.__setstate__(memory)

    def __getstate__(self) -> Memory:
        return self._memory

    def __setstate__(self, memory: Memory) -> None:
        self._memory = memory
        self._data: npt.NDArray[np.uint8] = memory.array(np.uint8, memory.size)

    def put(self, slot: int, size: int, sample: int, window: int, value: Any) -> bool:
        """Store a value; False if it does not fit or cannot be pickled."""
        try:
            head, buffers = pickled(value)
        except Exception:  # whatever a user's object raises when it is pickled
            return False
        pieces = [np.frombuffer(head, dtype=np.uint8), *buffers]
        starts, total = _laid_out([len(piece) for piece in pieces])
        if SLOT_HEADER_BYTES + total > size:
            return False
        at = slot * size
        self._data[at : at + SLOT_HEADER_BYTES].view(np.int64)[0] = 0
        fence()
        # Written by system calls: through the mapping each page would be a fault, which costs more than the bytes do.
        table = np.array([window, total, 0, len(pieces), *(len(piece) for piece in pieces)], dtype=np.int64)
        written = [
            (at + 8, table),
            *((at + SLOT_HEADER_BYTES + start, piece) for start, piece in zip(starts, pieces, strict=True)),
        ]
        try:
            if any(os.pwrite(self._memory.fd, part.data, place) != part.nbytes for place, part in written):
                return False
        except OSError:  # no memory left
            return False
        fence()
        self._data[at : at + SLOT_HEADER_BYTES].view(np.int64)[0] = sample + 1
        return True

    def get(self, slot: int, size: int, sample: int, window: int) -> tuple[Any] | None:
        """A copy of what was stored for this sample in that window, in a tuple; None if it is not there."""
        place = self._data[slot * size : (slot + 1) * size]
        header = place[:SLOT_HEADER_BYTES].view(np.int64)
        if header[0] != sample + 1:
            return None
        fence()
        if header[1] != window:
            return None
        data = place[SLOT_HEADER_BYTES : SLOT_HEADER_BYTES + int(header[2])].copy()
        fence()
        if header[0] != sample + 1 or header[1] != window:  # another worker began to write meanwhile
            return None
        count = int(data[:8].view(np.int64)[0])
        lengths = data[8 : 8 * (count + 1)].view(np.int64).tolist()
        starts, _ = _laid_out(lengths)
        pieces = [data[start : start + length] for start, length in zip(starts, lengths, strict=True)]
        return (pickle.loads(pieces[0].tobytes(), buffers=pieces[1:]),)


def _laid_out(lengths: list[int]) -> tuple[list[int], int]:
    """Offsets of pieces of these lengths after the table of lengths, and the total number of bytes."""
    starts: list[int] = []
    at = 8 * (len(lengths) + 1)
    for length in lengths:
        at = -(-at // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        starts.append(at)
        at += length
    return starts, at


class _Pickler(pickle.Pickler):
    """Pickles tensors as arrays, many times faster than torch does, and pixels of PIL images out of band: two copies less."""

    def reducer_override(self, obj: Any) -> Any:
        if (
            type(obj) is Tensor
            and obj.layout is torch.strided
            and obj.dtype is not torch.bfloat16
            and not obj.requires_grad
        ):
            return torch.from_numpy, (obj.contiguous().numpy(),)
        return _beside(obj)


def _beside(obj: Any) -> Any:
    pil = sys.modules.get("PIL.Image")
    if pil is not None and type(obj) is pil.Image and obj.mode in PLAIN_MODES:
        return _image, (obj.mode, obj.size, obj.info, pickle.PickleBuffer(obj.tobytes()))
    return NotImplemented


PLAIN_MODES = ("RGB", "L", "RGBA")
"""Modes of PIL images without a palette."""


def _image(mode: str, size: tuple[int, int], info: Any, pixels: Any) -> Any:
    from PIL import Image

    image = Image.frombytes(mode, size, pixels)
    image.info = info
    return image


def pickled(value: Any) -> tuple[bytes, list[npt.NDArray[np.uint8]]]:
    """Split an object into pickled bytes and the contents of its arrays, which are not copied."""
    buffers: list[pickle.PickleBuffer] = []
    out = io.BytesIO()
    _Pickler(out, protocol=5, buffer_callback=buffers.append).dump(value)
    return out.getvalue(), [np.frombuffer(buffer.raw(), dtype=np.uint8) for buffer in buffers]


def stored_bytes(value: Any) -> int:
    """Size in bytes of a slot for this intermediate."""
    head, buffers = pickled(value)
    return SLOT_HEADER_BYTES + _laid_out([len(head), *map(len, buffers)])[1]
