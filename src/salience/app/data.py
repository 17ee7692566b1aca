"""The training and test images of a classifier, from anything that a Source reads."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from salience.app.pixels import Decode, shorter_side
from salience.app.unpack import Progress, plain_tar
from salience.errors import BrokenSample, DataError, SalienceError
from salience.feed import Broken, Index, Source
from salience.feed.index import TEST_SPLITS, Names, classes_of, folders_of
from salience.feed.sharing.shared import SharedFeed
from salience.feed.tars import IMAGE_SUFFIXES

AUTO = "auto"
"""Name of a feed that stands for the name made of the data."""
HELD_OUT = 10
"""Without a test split, one in this many images of each class is held out."""
STATISTICS_SAMPLES = 512
"""Maximum number of images that pixel statistics are taken from."""
LARGEST_GUESS = 224
"""Largest size in pixels that is chosen by default: the usual input size of image models."""

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """Training and test images of one size."""

    train: Any
    """A Source or SharedFeed that decodes; or any data set of (uint8 [3, size, size], class)."""
    test: Dataset[Any]
    labels: npt.NDArray[np.int64]
    """int64 [N], classes of the images to train on."""
    tested: int
    """Number of images to test on."""
    classes: tuple[str, ...]
    size: int
    names: Names
    """Paths of the training images, below the root or in their tar."""

    def __len__(self) -> int:
        return len(self.labels)

    def pixels(self, ids: Sequence[int]) -> list[npt.NDArray[np.uint8] | None]:
        """Training images by number; None for an image that cannot be read."""
        if not isinstance(self.train, (Source, SharedFeed)):
            return [self.train[i][0] for i in ids]
        images = Images(self.train.source if isinstance(self.train, SharedFeed) else self.train, Decode(self.size))
        return [None if isinstance(got, BrokenSample) else got for got in images.tried(ids)]

    @property
    def checksum(self) -> int:
        """Checksum of the names of the training images: if it differs, ids mean other images."""
        return zlib.crc32(self.names.joined.tobytes())


class Images(Dataset[Any]):
    """(pixels, class) of a Source's samples by number, read in whole batches. An image that cannot be read is an error."""

    def __init__(self, source: Source, decode: Decode) -> None:
        self.source, self.decode = source, decode

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, i: int) -> tuple[npt.NDArray[np.uint8], int]:
        return self.__getitems__([i])[0]

    def __getitems__(self, ids: Sequence[int]) -> list[tuple[npt.NDArray[np.uint8], int]]:
        labels = self.source.labels[np.asarray(ids, dtype=np.int64)].tolist()
        found: list[tuple[npt.NDArray[np.uint8], int]] = []
        for got, label in zip(self.tried(ids), labels, strict=True):
            if isinstance(got, BrokenSample):
                raise got
            found.append((got, label))
        return found

    def tried(self, ids: Sequence[int]) -> list[npt.NDArray[np.uint8] | BrokenSample]:
        """The pixels of each image, or the error."""
        return [self._decoded(i, data) for i, data in zip(ids, self.source.read(ids), strict=True)]

    def _decoded(self, i: int, data: bytes | Broken) -> npt.NDArray[np.uint8] | BrokenSample:
        if isinstance(data, Broken):
            return broken_image(self.source, i, data.reason)
        try:
            return self.decode(data)
        except SalienceError:  # Pillow is missing, say
            raise
        except Exception as cause:  # a decoder fed with rubbish may raise anything
            return broken_image(self.source, i, str(cause))


def open_split(
    data: str,
    *,
    size: int = 0,
    cache: str = "",
    max_broken: float = 0.01,
    feed: str = "",
    linger: float | None = 60.0,
    unpacked: Path | None = None,
    progress: Progress | None = None,
) -> Split:
    """The train and test splits of a folder, tar or URL; if there are none, every tenth image of each class is held out.

    With `feed`, training images come through the shared feed of this name ("auto": of the data), which is started if it is
    not running. `size=0` means the shorter side of the first image, at most 224. A .tar.gz is unpacked once, into `unpacked`.
    """
    where = _located(data, unpacked, progress)
    index, splits = images_of(Source(where).index, data)
    train, test = _halves(index, splits, data)
    to_train = _part(index, train)
    decode = Decode(size or _guess_size(Source(where, index=to_train)))
    reading: dict[str, Any] = {"index": to_train, "decode": decode, "cache": cache or None, "max_broken": max_broken}
    source: Any = Source(where, **reading)
    if feed:
        source = SharedFeed(where, name=None if feed == AUTO else feed, linger=linger, **reading)
    return Split(
        train=source, test=Images(Source(where, index=_part(index, test)), decode), labels=index.label[train].astype(np.int64),
        tested=len(test), classes=index.classes, size=decode.size, names=source.names,
    )  # fmt: skip


def images_of(index: Index, shown: str) -> tuple[Index, list[str]]:
    """The images among the samples of an index, with the split of each; "" if there are no splits.

    Classes in the index that do not come from folders, such as those of .cls members in tars, are kept.
    """
    names = [index.names[i] for i in range(len(index))]
    by_folder = classes_of(names)
    told = index.classes != by_folder[0] or not np.array_equal(index.label, by_folder[1])
    # Appending to a tar replaces a member by writing it anew: the last one counts.
    last = {(shard, name): i for i, (shard, name) in enumerate(zip(index.shard.tolist(), names, strict=True))}
    # By name, so that a sample keeps its id, and its row in a ledger, when a folder is packed.
    kept = [
        i
        for (_, name), i in sorted(last.items(), key=lambda item: item[0][::-1])
        if name.lower().endswith(IMAGE_SUFFIXES)
    ]
    if not kept:
        raise DataError(f"{shown} contains no images; images end in {', '.join(IMAGE_SUFFIXES)}.")
    placed = folders_of([names[i] for i in kept])
    if told and index.classes:
        return _part(index, np.array(kept)), [split for split, _ in placed]
    splits = any(split for split, _ in placed)
    inside = [k for k, (split, name) in enumerate(placed) if name and (split or not splits)]
    if not inside:
        raise _no_classes(shown)
    classes = tuple(sorted({placed[k][1] for k in inside}))
    number = {name: k for k, name in enumerate(classes)}
    label = np.array([number[placed[k][1]] for k in inside], dtype=np.int32)
    found = _part(index, np.array([kept[k] for k in inside]))
    return replace(found, label=label, classes=classes), [placed[k][0] for k in inside]


def _halves(index: Index, splits: list[str], shown: str) -> tuple[Ids, Ids]:
    """Ids of the training images and of the test images."""
    if index.label.min() < 0:
        raise DataError(
            f"{int((index.label < 0).sum())} images of {shown} have no class; give each a folder, or a .cls in its tar."
        )
    of, there = np.array(splits), [name for name in ("train", *TEST_SPLITS) if name in set(splits)]
    if there:
        if there[0] != "train" or len(there) < 2:
            raise _no_classes(f"A split of {shown}")
        return np.flatnonzero(of == "train"), np.flatnonzero(of == there[1])
    held = held_out(index.label)
    if not held.any():
        raise DataError(
            f"{shown} has no test split, and with {len(index)} images in {len(index.classes)} classes there is none to "
            "hold out; give at least one class two images, or make train and test folders."
        )
    return np.flatnonzero(~held), np.flatnonzero(held)


def _no_classes(shown: str) -> DataError:
    return DataError(
        f"{shown} has images but no class folders; put the images of each class into a folder named after it."
    )


def held_out(labels: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Samples to hold out, bool [N]: every tenth of each class in order, and one of a class with two to nine samples."""
    order = np.argsort(labels, kind="stable")
    counts = np.bincount(labels)
    first = np.cumsum(counts) - counts
    rank = np.empty(len(labels), np.int64)
    rank[order] = np.arange(len(labels)) - first[labels[order]]
    of_class = counts[labels]
    return (rank % HELD_OUT == np.minimum(HELD_OUT, of_class) - 1) & (of_class > 1)


def pixel_statistics(data: Split) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel, in 0 to 1, over images spread evenly.

    They are not the first ones, since a listing is ordered by class, and the first ones may all be white swans.
    """
    picked = np.unique(np.linspace(0, len(data) - 1, min(STATISTICS_SAMPLES, len(data))).astype(np.int64))
    means: list[torch.Tensor] = []
    squares: list[torch.Tensor] = []
    for pixels in data.pixels(picked.tolist()):
        if pixels is not None:
            x = torch.as_tensor(pixels).float() / 255
            means.append(x.mean(dim=(1, 2)))
            squares.append((x * x).mean(dim=(1, 2)))
    if not means:
        raise DataError(
            f"None of the {len(picked)} images that were tried can be read; the first is {data.names[0]!r}."
        )
    mean, square = torch.stack(means).mean(0), torch.stack(squares).mean(0)
    std = (square - mean * mean).clamp_min(0).sqrt().clamp_min(1e-3)  # images of one colour have none to divide by
    return mean.tolist(), std.tolist()


def broken_image(source: Source, i: int, reason: str) -> BrokenSample:
    return BrokenSample(f"image {source.names[i]!r} of {source.url} cannot be read ({reason}); delete or replace it.")


def _located(data: str, unpacked: Path | None, progress: Progress | None) -> str:
    """An address for a Source: a URL unchanged, or the path of a folder or of a plain tar."""
    if "://" in data:
        return data
    where = Path(data).expanduser().resolve()
    if not where.exists():
        raise DataError(f"there is no file or folder {where}; check the path.")
    if where.is_dir():
        if not any(not entry.name.startswith(".") for entry in where.iterdir()):
            raise DataError(f"{where} is empty; make a folder for each class, its images inside.")
        return str(where)
    tar = plain_tar(where, unpacked, progress)
    if tar.suffix != ".tar":
        raise DataError(f"{where} is not a tar archive; give a folder, a .tar or a .tar.gz.")
    return str(tar)


def _guess_size(source: Source) -> int:
    data = source.read([0])[0]
    if isinstance(data, Broken):
        raise broken_image(source, 0, data.reason)
    try:
        return min(shorter_side(data), LARGEST_GUESS)
    except SalienceError:
        raise
    except Exception as cause:
        raise broken_image(source, 0, str(cause)) from cause


def _part(index: Index, ids: Ids) -> Index:
    """The samples `ids` of an index, in that order."""
    return replace(
        index, names=Names.of(index.names[i] for i in ids.tolist()), shard=index.shard[ids], offset=index.offset[ids],
        size=index.size[ids], check=index.check[ids], label=index.label[ids],
    )  # fmt: skip
