"""The two halves a classifier needs, from whatever lies in the folder: images to train on and images to test on."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset, Subset

from salience.app.folder import ImageFolder
from salience.app.listing import Progress, splits
from salience.errors import DataError

HELD_OUT = 10
"""Where there is no test split, one in so many images of each class is held out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """Images to train on and to test on, of one size."""

    train: Dataset[Any]
    test: Dataset[Any]
    labels: npt.NDArray[np.int64]
    """int64 [N], classes of the images to train on."""
    tested: int
    """Number of images to test on."""
    classes: tuple[str, ...]
    size: int
    source: ImageFolder
    """What the images to train on are taken from,"""
    ids: npt.NDArray[np.int64]
    """int64 [N], and where in it each of them stands."""

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, i: int) -> str:
        """Path of image i of those to train on."""
        return self.source.name(int(self.ids[i]))

    @property
    def checksum(self) -> int:
        """Of the names of the images to train on: with another value, ids mean other images."""
        return zlib.crc32(self.source.listing.names.tobytes())


def open_split(path: str, *, size: int = 0, progress: Progress | None = None) -> Split:
    """The train and test splits at `path`, or where it has none, every tenth image of each class held out."""
    wanted = size or None
    if splits(path, progress=progress):
        train = ImageFolder(path, split="train", size=wanted, progress=progress)
        test = ImageFolder(path, split="test", size=train.size, progress=progress)
        return Split(
            train=train, test=test, labels=train.targets, tested=len(test), classes=train.classes, size=train.size,
            source=train, ids=np.arange(len(train)),
        )  # fmt: skip
    every = ImageFolder(path, size=wanted, progress=progress)
    held = held_out(every.targets)
    if not held.any():
        raise DataError(
            f"{path} has no test split, and with {len(every)} images in {len(every.classes)} classes there is none to "
            "hold out; give at least one class two images, or make train and test folders."
        )
    to_train, to_test = np.flatnonzero(~held), np.flatnonzero(held)
    # Arrays, not lists of N objects, so that forked workers share them uncopied; Subset only ever indexes them.
    return Split(
        train=Subset(every, to_train),  # pyright: ignore[reportArgumentType]
        test=Subset(every, to_test),  # pyright: ignore[reportArgumentType]
        labels=every.targets[to_train], tested=len(to_test), classes=every.classes, size=every.size,
        source=every, ids=to_train,
    )  # fmt: skip


def held_out(labels: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """bool [N]: every tenth sample of each class in its order, and one of a class with two to nine."""
    order = np.argsort(labels, kind="stable")
    counts = np.bincount(labels)
    first = np.cumsum(counts) - counts
    rank = np.empty(len(labels), np.int64)
    rank[order] = np.arange(len(labels)) - first[labels[order]]
    of_class = counts[labels]
    return (rank % HELD_OUT == np.minimum(HELD_OUT, of_class) - 1) & (of_class > 1)


def pixel_statistics(images: Any, count: int, *, samples: int = 512) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel, in 0 to 1, over at most `samples` images spread evenly.

    Not over the first ones: a listing is ordered by class, and the first ones may all be white swans.
    """
    picked = np.unique(np.linspace(0, count - 1, min(samples, count)).astype(np.int64))
    means: list[torch.Tensor] = []
    squares: list[torch.Tensor] = []
    for i in picked.tolist():
        x = images[i][0].float() / 255
        means.append(x.mean(dim=(1, 2)))
        squares.append((x * x).mean(dim=(1, 2)))
    mean, square = torch.stack(means).mean(0), torch.stack(squares).mean(0)
    std = (square - mean * mean).clamp_min(0).sqrt().clamp_min(1e-3)  # images of one colour have none to divide by
    return mean.tolist(), std.tolist()
