"""A folder or tar of images as a PyTorch data set of uint8 tensors, all of one size."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from salience.app.listing import list_images
from salience.errors import BrokenSample, ConfigError, MissingExtra

if TYPE_CHECKING:
    from PIL import Image

REMEMBERED = 4096  # fingerprints kept until they are asked for
LARGEST_GUESS = 224  # pixels; a size nobody asked for stays at what image models usually take


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """Images and labels by index: (uint8 [channels, size, size], class number).

    Each image's shorter side is resized to `size` and its middle cut out. `size=None` takes the first image's
    shorter side, at most 224. Of a tar, every process opens its own handle, whether forked or spawned.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        split: str | None = None,
        size: int | None = None,
        channels: int = 3,
        cache_dir: Path | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        if channels not in (1, 3):
            raise ConfigError(f"{channels=} is not 1 (grey) or 3 (colour)")
        if size is not None and size < 1:
            raise ConfigError(f"{size=} pixels; use 1 or more, or None for the first image's")
        self._handle: tuple[int, int] | None = None  # (process id, file descriptor) of the tar
        self._prints: dict[int, int] = {}  # of the images read last
        self.listing = list_images(path, split=split, cache_dir=cache_dir, progress=progress)
        self.classes: tuple[str, ...] = self.listing.classes
        self.targets: npt.NDArray[np.int64] = self.listing.labels.astype(np.int64)
        self.channels = channels
        self.size: int = size if size is not None else self._guess_size()

    def __len__(self) -> int:
        return len(self.listing)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        i = int(index)
        if not 0 <= i < len(self):
            raise IndexError(f"image {i} of {len(self)}")
        data = self._read(i)
        if len(self._prints) >= REMEMBERED:
            self._prints.clear()
        self._prints[i] = fingerprint(data)
        try:
            pixels = decode(data, self.size, self.channels)
        except MissingExtra:
            raise
        except Exception as error:  # a decoder fed with rubbish may raise anything
            raise self._broken(i, error) from error
        return torch.as_tensor(pixels), int(self.targets[i])

    def fingerprints(self, ids: Sequence[int]) -> npt.NDArray[np.int64]:
        """Fingerprints of the files of images read just now, int64 [B]; 0 where it was not read in this process."""
        return np.array([self._prints.get(i, 0) for i in ids], dtype=np.int64)

    def name(self, i: int) -> str:
        """Path of image i below the folder, or in the tar."""
        return self.listing.name(i)

    def _guess_size(self) -> int:
        data = self._read(0)
        try:
            with _open(data) as image:
                return min(*image.size, LARGEST_GUESS)
        except MissingExtra:
            raise
        except Exception as error:
            raise self._broken(0, error) from error

    def _read(self, i: int) -> bytes:
        listing = self.listing
        try:
            if listing.kind == "folder":
                with open(listing.root / listing.name(i), "rb") as file:
                    return file.read()
            size = int(listing.sizes[i])
            data = os.pread(self._descriptor(), size, int(listing.data_offsets[i]))
            if len(data) < size:
                raise OSError(f"the archive ends {size - len(data)} bytes too early")
            return data
        except OSError as error:
            raise self._broken(i, error) from error

    def _descriptor(self) -> int:
        process = os.getpid()
        if self._handle is None or self._handle[0] != process:
            self._handle = (process, os.open(self.listing.root, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0)))
        return self._handle[1]

    def _broken(self, i: int, cause: Exception) -> BrokenSample:
        root, name = self.listing.root, self.listing.name(i)
        where = f"{name} in {root}" if self.listing.kind == "tar" else str(root / name)
        reason = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause)
        return BrokenSample(f"image {i}, {where}, cannot be read ({reason}); delete or replace it")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handle": None}

    def __del__(self) -> None:
        # __init__ may have failed before there was a handle; a forked child's copy belongs to its parent.
        handle: tuple[int, int] | None = self.__dict__.get("_handle")
        if handle is not None and handle[0] == os.getpid():
            os.close(handle[1])


def fingerprint(data: bytes) -> int:
    """63 bits of the SHA-1 of a file, never 0. Costs a few percent of decoding it."""
    return int.from_bytes(hashlib.sha1(data, usedforsecurity=False).digest()[:8], "little") >> 1 or 1


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
        from PIL import Image
    except ImportError as error:
        raise MissingExtra.of("pillow", "images", "decoding images") from error
    return Image.open(io.BytesIO(data))


def _flat(image: Image.Image, mode: str) -> Image.Image:
    """The image with 8 bits a channel and without transparency."""
    if image.mode.startswith("I"):  # 16 bits a pixel, which a plain conversion would clip instead of scale
        from PIL import Image

        high = np.clip(np.asarray(image).astype(np.int64) >> 8, 0, 255)
        return Image.fromarray(high.astype(np.uint8)).convert(mode)
    if image.mode in ("P", "PA") and "transparency" in image.info:
        return image.convert("RGBA").convert(mode)
    return image.convert(mode)
