"""Small pictures of the samples in a report, from the data set if it can be reached."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from salience.errors import BrokenSample, DataError, SalienceError

if TYPE_CHECKING:
    from salience.ledger import Ledger

MAX_SIDE_PIXELS = 96
"""Maximum number of pixels per side."""
MAX_PNG_PIXELS = 48
"""Pictures up to this many pixels per side are PNG, which is lossless; larger ones are JPEG."""

Read = Callable[[int], npt.NDArray[np.uint8]]
"""From a sample's id to its pixels, uint8 [channels, height, width]."""


def pictures(data: str, ids: Sequence[int], ledger: Ledger) -> dict[int, bytes]:
    """PNG or JPEG of each sample, without unreadable ones. Raises DataError if `data` is not the run's data set."""
    read = _matching(data, ledger)
    made: dict[int, bytes] = {}
    for i in ids:
        try:
            made[i] = encoded(read(i))
        except BrokenSample:
            continue
    return made


def encoded(pixels: npt.NDArray[np.uint8]) -> bytes:
    """A small encoded picture of uint8 [channels, height, width]."""
    from PIL import Image

    image = Image.fromarray(pixels.transpose(1, 2, 0) if len(pixels) == 3 else pixels[0])
    image.thumbnail((MAX_SIDE_PIXELS, MAX_SIDE_PIXELS))
    file = io.BytesIO()
    if max(image.size) <= MAX_PNG_PIXELS:
        image.save(file, "PNG", optimize=True)
    else:
        image.save(file, "JPEG", quality=80)
    return file.getvalue()


def _matching(data: str, ledger: Ledger) -> Read:
    """The first way of reading `data` that gives the run's samples: the same number and classes, in the same order."""
    reasons: list[str] = []
    for opened in (_split, _source):
        try:
            labels, read = opened(data)
        except (SalienceError, OSError) as cause:
            reasons.append(str(cause))
            continue
        known = ledger.label >= 0
        if len(labels) == ledger.n and np.array_equal(labels[known], ledger.label[known]):
            return read
        reasons.append(f"it has {len(labels):,} samples, the run {ledger.n:,}")
        if len(labels) == ledger.n:
            reasons[-1] = "its classes are others"
    raise DataError(f"{data!r} is not the data of this run: {reasons[0].rstrip('.')}.")


def _split(data: str) -> tuple[npt.NDArray[Any], Read]:
    """The training images, as `salience train` reads them."""
    from salience.app.data import open_split

    split = open_split(data)

    def read(i: int) -> npt.NDArray[np.uint8]:
        pixels = split.pixels([i])[0]
        if pixels is None:
            raise BrokenSample(f"sample {i} is no image")
        return pixels

    return split.labels, read


def _source(data: str) -> tuple[npt.NDArray[Any], Read]:
    """All samples of a `Source`."""
    from salience.app.data import Images
    from salience.app.pixels import Decode
    from salience.feed import Source

    source = Source(data if "://" in data else str(Path(data).expanduser()))
    images = Images(source, Decode(MAX_SIDE_PIXELS))
    return source.labels, lambda i: images[i][0]
