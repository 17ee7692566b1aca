"""Encoded images to pixels: uint8, all of one size."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from salience.errors import ConfigError, MissingExtra

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True, slots=True)
class Decode:
    """Bytes of an image to uint8 [channels, size, size]; a value, so that it can be sent to workers."""

    size: int
    channels: int = 3

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"size={self.size} pixels; use 1 or more")
        if self.channels not in (1, 3):
            raise ConfigError(f"channels={self.channels} is not 1 (grey) or 3 (colour)")

    def __call__(self, data: bytes) -> npt.NDArray[np.uint8]:
        return decode(data, self.size, self.channels)


def shorter_side(data: bytes) -> int:
    """Pixels of the shorter side of an encoded image."""
    with _open(data) as image:
        return min(image.size)


def decode(data: bytes, size: int, channels: int) -> npt.NDArray[np.uint8]:
    """An encoded image as uint8 [channels, size, size]: shorter side resized to `size`, middle cut out."""
    mode = "RGB" if channels == 3 else "L"
    with _open(data) as image:
        image.draft(mode, (size, size))  # a JPEG much too large is decoded at a fraction of its size; others ignore it
        flat = _flat(image, mode)
    width, height = flat.size
    if (width, height) != (size, size):
        from PIL import Image

        side = min(width, height)
        left, top = (width - side) / 2, (height - side) / 2
        # Resizing the middle square is resizing all and cutting out the middle, less the pixels thrown away.
        box = (left, top, left + side, top + side)
        flat = flat.resize((size, size), Image.Resampling.BILINEAR, box=box, reducing_gap=2.0)
    pixels = np.array(flat, np.uint8).reshape(size, size, channels)
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def _open(data: bytes) -> Image.Image:
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise MissingExtra.of("pillow", "images", "decoding images") from error
    try:
        return Image.open(io.BytesIO(data))
    except UnidentifiedImageError:  # whose text has an address in memory in it
        raise ValueError("Pillow cannot identify it as an image") from None


def _flat(image: Image.Image, mode: str) -> Image.Image:
    """The image with 8 bits per channel and without transparency."""
    if image.mode.startswith("I"):  # 16 bits per pixel, which a plain conversion would clip instead of scale
        from PIL import Image

        high = np.clip(np.asarray(image).astype(np.int64) >> 8, 0, 255)
        return Image.fromarray(high.astype(np.uint8)).convert(mode)
    if image.mode in ("P", "PA") and "transparency" in image.info:
        return image.convert("RGBA").convert(mode)
    return image.convert(mode)
