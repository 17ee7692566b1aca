"""The byte index: where the bytes of every sample are, in shards or as separate objects."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from salience.errors import DataError, MissingExtra
from salience.files import read_npz, write_npz

FORMAT = "salience-index-1"
FILE = "index.npz"
"""Name of the index file beside its shards."""
COLUMN_TYPES = {
    "names": "uint8", "name_ends": "int64", "shards": "uint8", "shard_ends": "int64", "shard_sizes": "int64",
    "classes": "uint8", "class_ends": "int64",
    "shard": "int32", "offset": "int64", "size": "int64", "check": "uint64", "label": "int32",
}  # fmt: skip
"""The columns of an index file, each one-dimensional."""
MAX_BYTES = 1 << 60
"""Maximum bytes of a shard, and of all samples together, so that sums of two do not overflow."""
AGAIN = "make it again with `salience pack --index-only`"
TEST_SPLITS = ("test", "val", "valid", "validation")
"""Directories beside `train` that hold the test split; the first one found is used."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Names:
    """N names as two arrays instead of N objects: a million names load at once, and workers share them."""

    joined: npt.NDArray[np.uint8]
    """All names joined, as UTF-8."""
    ends: npt.NDArray[np.int64]
    """int64 [N + 1]: name i is joined[ends[i] : ends[i + 1]]."""

    @classmethod
    def of(cls, names: Iterable[str]) -> Names:
        parts = [name.encode("utf-8", "surrogateescape") for name in names]
        ends = np.zeros(len(parts) + 1, dtype=np.int64)
        np.cumsum([len(part) for part in parts], out=ends[1:])
        return cls(joined=np.frombuffer(b"".join(parts), dtype=np.uint8), ends=ends)

    def checked(self, where: str | Path) -> Names:
        """Return the names; raises DataError unless they follow each other from the first byte to the last."""
        ends = self.ends
        if not len(ends) or ends[0] != 0 or ends[-1] != len(self.joined) or bool((ends[1:] < ends[:-1]).any()):
            raise DataError(f"{str(where)!r} is not a whole index: its names overlap or are cut off; {AGAIN}.")
        return self

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __iter__(self) -> Iterator[str]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, i: int) -> str:
        return self.joined[self.ends[i] : self.ends[i + 1]].tobytes().decode("utf-8", "surrogateescape")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Index:
    """N samples: sample i is `size[i]` bytes at `offset[i]` of the object `path(i)`."""

    names: Names
    """The name of each sample in its shard, or the path of its own object."""
    shards: tuple[str, ...]
    """Paths of the shards below the source; empty if every sample is a separate object."""
    shard_sizes: npt.NDArray[np.int64]
    """Bytes of each shard when the index was made, int64 [S]: a different size means a different shard."""
    shard: npt.NDArray[np.int32]
    """Shard of each sample, int32 [N]; -1 if the sample is a separate object."""
    offset: npt.NDArray[np.int64]
    """First byte of each sample in its object, int64 [N]."""
    size: npt.NDArray[np.int64]
    """Bytes of each sample, int64 [N]."""
    check: npt.NDArray[np.uint64]
    """xxh3_64 of the sample's bytes, uint64 [N]; 0 = not known."""
    label: npt.NDArray[np.int32]
    """Index into `classes`, int32 [N]; -1 = not known."""
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.shard)

    def path(self, i: int) -> str:
        """The object that holds sample i, below the source."""
        shard = int(self.shard[i])
        return self.names[i] if shard < 0 else self.shards[shard]

    @property
    def nbytes(self) -> int:
        """Bytes of all samples."""
        return int(self.size.sum())

    def save(self, path: str | Path) -> None:
        """Write the index; the file is complete or absent."""
        shards, classes = Names.of(self.shards), Names.of(self.classes)
        arrays: dict[str, npt.NDArray[Any]] = {
            "format": np.array(FORMAT),
            "names": self.names.joined, "name_ends": self.names.ends,
            "shards": shards.joined, "shard_ends": shards.ends, "shard_sizes": self.shard_sizes,
            "classes": classes.joined, "class_ends": classes.ends,
            "shard": self.shard, "offset": self.offset, "size": self.size, "check": self.check, "label": self.label,
        }  # fmt: skip
        write_npz(path, arrays)

    @classmethod
    def load(cls, path: str | Path, data: bytes | None = None) -> Index:
        """Read an index and check it; `data` are the contents of the file if they were read already."""
        a = read_npz(path, FORMAT, "byte index", data)
        for name, kind in COLUMN_TYPES.items():
            found = a.get(name)
            if found is None or found.dtype != kind or found.ndim != 1:
                raise DataError(
                    f"{str(path)!r} is not a whole index: its column {name!r} is missing or not {kind}; {AGAIN}."
                )
        index = cls(
            names=Names(joined=a["names"], ends=a["name_ends"]).checked(path),
            shards=tuple(Names(joined=a["shards"], ends=a["shard_ends"]).checked(path)),
            shard_sizes=a["shard_sizes"], shard=a["shard"], offset=a["offset"], size=a["size"], check=a["check"],
            label=a["label"], classes=tuple(Names(joined=a["classes"], ends=a["class_ends"]).checked(path)),
        )  # fmt: skip
        index.validate(str(path))
        return index

    def validate(self, where: str) -> None:
        """Raise DataError if the index points outside its shards or its parts do not match."""
        n, shards = len(self.shard), len(self.shards)
        columns = (self.offset, self.size, self.check, self.label)
        if any(column.shape != (n,) for column in columns) or len(self.names) != n or len(self.shard_sizes) != shards:
            raise DataError(f"{where} is not a whole index: its columns differ in length; {AGAIN}.")
        for path in self.shards:
            check_path(path, where)
        if not within(self.shard, -1, shards - 1):
            raise DataError(f"{where} names shards it does not list; {AGAIN}.")
        if not within(self.label, -1, len(self.classes) - 1):
            raise DataError(f"{where} has labels of classes it does not list; {AGAIN}.")
        for column in (self.shard_sizes, self.offset, self.size):
            if not within(column, 0, MAX_BYTES):
                raise DataError(
                    f"{where} has offsets or sizes that are negative or above {MAX_BYTES:,} bytes; {AGAIN}."
                )
        if self.size.sum(dtype=np.float64) > MAX_BYTES:
            raise DataError(f"{where} says that its samples have more than {MAX_BYTES:,} bytes together; {AGAIN}.")
        inside = self.shard >= 0
        over = (self.offset + self.size)[inside] > self.shard_sizes[self.shard[inside]]
        if over.any():
            raise DataError(
                f"{where}: {int(over.sum())} samples end after their shard does; the index belongs to other shards."
            )


def within(column: npt.NDArray[Any], least: int, most: int) -> bool:
    """True if all numbers of a column are from `least` to `most`."""
    return not len(column) or (int(column.min()) >= least and int(column.max()) <= most)


def hasher() -> Any:
    """The hash function xxh3_64, whose digest is the checksum in an index."""
    try:
        from xxhash import xxh3_64
    except ImportError as cause:
        raise MissingExtra.of("xxhash", "feed", "A checksum") from cause
    return xxh3_64


def fingerprint(data: bytes | memoryview) -> int:
    """A stand-in for a missing checksum: 63 bits of the SHA-1 of a sample, never 0. Costs a few percent of decoding it."""
    return int.from_bytes(hashlib.sha1(data, usedforsecurity=False).digest()[:8], "little") >> 1 or 1


def check_path(path: str, where: str) -> str:
    """Return `path` if it stays below its source; raise DataError otherwise."""
    parts = path.replace("\\", "/").split("/")
    if not path or path.startswith("/") or os.path.isabs(path) or ".." in parts or "\0" in path:
        raise DataError(f"{where} holds the name {path!r}, which leads outside; names must stay below their source.")
    return path


def folders_of(paths: Sequence[str]) -> list[tuple[str, str]]:
    """Split and class of each path, "" if there is none: one rule for folders, tars and prefixes.

    The class is the first directory below the root. If there are `train` and a test directory (TEST_SPLITS), it is the first
    directory below those. A single directory around everything, as in many archives, is skipped.
    """
    parts = [path.split("/") for path in paths]
    wrapped = len({part[0] for part in parts}) == 1 and all(len(part) > 2 for part in parts)
    first = 1 if wrapped else 0
    tops = {part[first] for part in parts if len(part) > first + 1}
    splits = {"train", *TEST_SPLITS} if "train" in tops and not tops.isdisjoint(TEST_SPLITS) else set[str]()
    if not splits:
        return [("", part[first] if len(part) > first + 1 else "") for part in parts]
    return [
        (part[first], part[first + 1] if len(part) > first + 2 else "") if part[first] in splits else ("", "")
        for part in parts
    ]


def classes_of(paths: Sequence[str]) -> tuple[tuple[str, ...], npt.NDArray[np.int32]]:
    """Class names and labels by `folders_of`; no classes if a path has none."""
    folders = [name for _, name in folders_of(paths)]
    if not all(folders):
        return (), np.full(len(paths), -1, dtype=np.int32)
    classes = tuple(sorted(set(folders)))
    number = {name: k for k, name in enumerate(classes)}
    return classes, np.fromiter((number[folder] for folder in folders), dtype=np.int32, count=len(paths))
