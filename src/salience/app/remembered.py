"""Listings that are remembered: as files in a cache folder, for exactly as long as what they list stays as it is.

Beside them lie the plain twins of compressed archives, in which single members can be read by their offset.
"""

from __future__ import annotations

import gzip
import hashlib
import logging
import os
import stat
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import numpy.typing as npt

from salience.errors import DataError

Progress = Callable[[int, int], None]

_FORMAT = 1  # of the cache file; raise it when its fields change
_SETTLED_NS = 2_000_000_000  # a folder changed more recently may change again within one tick of its clock
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """N images of one split. Names are two arrays, not N objects, so that forked workers share them uncopied."""

    root: Path
    """The folder that names are relative to, or the (unpacked) tar file."""
    kind: Literal["folder", "tar"]
    names: npt.NDArray[np.uint8]
    """uint8, all names joined, in the file system's encoding."""
    name_offsets: npt.NDArray[np.int64]
    """int64 [N + 1], name i is names[name_offsets[i] : name_offsets[i + 1]]."""
    labels: npt.NDArray[np.int32]
    """int32 [N], index into `classes`."""
    classes: tuple[str, ...]
    """Sorted names of the class directories of all splits, so that labels mean the same in each."""
    sizes: npt.NDArray[np.int64]
    """int64 [N], bytes of each file; 0 in a folder, where asking would cost a system call a file."""
    data_offsets: npt.NDArray[np.int64]
    """int64 [N], where each image's bytes start in the tar; 0 in a folder."""

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, i: int) -> str:
        """Path of image i below the root, with forward slashes."""
        if not 0 <= i < len(self):
            raise IndexError(f"image {i} of {len(self)}")
        return os.fsdecode(self.names[self.name_offsets[i] : self.name_offsets[i + 1]].tobytes())


def make_listing(
    root: Path,
    kind: Literal["folder", "tar"],
    names: Sequence[bytes],
    labels: npt.NDArray[np.int32],
    classes: tuple[str, ...],
    sizes: npt.NDArray[np.int64],
    offsets: npt.NDArray[np.int64],
) -> Listing:
    blob, ends = _pack(names)
    return Listing(
        root=root,
        kind=kind,
        names=blob,
        name_offsets=ends,
        labels=labels,
        classes=classes,
        sizes=sizes,
        data_offsets=offsets,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A folder or archive as it was just before it was read."""

    path: str
    stamp: tuple[int, int]
    settled: bool


def _stamp(path: str | Path) -> tuple[int, int]:
    """What changes when a folder or archive does: the size (of a file alone) and the time."""
    status = os.stat(path)
    return (0 if stat.S_ISDIR(status.st_mode) else status.st_size), status.st_mtime_ns


def source_of(path: Path) -> Source:
    stamp = _stamp(path)
    return Source(path=str(path), stamp=stamp, settled=abs(time.time_ns() - stamp[1]) > _SETTLED_NS)


def save(cache: Path, where: Path, split: str | None, listing: Listing, sources: list[Source]) -> None:
    """Remember the listing for as long as its sources stay as they are. Failing to is no reason to stop."""
    if listing.kind == "folder" and not all(source.settled for source in sources):
        return
    try:
        source_blob, source_ends = _pack([os.fsencode(source.path) for source in sources])
        class_blob, class_ends = _pack([os.fsencode(name) for name in listing.classes])
        root_blob, _ = _pack([os.fsencode(listing.root)])
        fields: dict[str, npt.NDArray[Any]] = {
            "format": np.array(_FORMAT),
            "source_blob": source_blob,
            "source_ends": source_ends,
            "stamps": np.array([source.stamp for source in sources], np.int64),
            "class_blob": class_blob,
            "class_ends": class_ends,
            "root": root_blob,
            "is_tar": np.array(listing.kind == "tar"),
            "names": listing.names,
            "name_offsets": listing.name_offsets,
            "labels": listing.labels,
            "sizes": listing.sizes,
            "offsets": listing.data_offsets,
        }
        _replace(_cache_file(cache, where, split), lambda file: np.savez(file, allow_pickle=False, **fields))
    except OSError as error:
        _log.warning("the listing of %s is not remembered in %s: %s", where, cache, error)


def load(cache: Path, where: Path, split: str | None) -> Listing | None:
    """The remembered listing, or None: never made, out of date, or damaged."""
    try:
        with open(_cache_file(cache, where, split), "rb") as file, np.load(file, allow_pickle=False) as fields:
            if int(fields["format"]) != _FORMAT:
                return None
            sources = _unpack(fields["source_blob"], fields["source_ends"])
            if [_stamp(source) for source in sources] != [tuple(row) for row in fields["stamps"].tolist()]:
                return None
            return Listing(
                root=Path(os.fsdecode(fields["root"].tobytes())),
                kind="tar" if bool(fields["is_tar"]) else "folder",
                names=fields["names"],
                name_offsets=fields["name_offsets"],
                labels=fields["labels"],
                classes=tuple(_unpack(fields["class_blob"], fields["class_ends"])),
                sizes=fields["sizes"],
                data_offsets=fields["offsets"],
            )
    except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile, zlib.error):
        return None


# ---------------------------------------------------------------- the cache folder


def cache_folder(given: Path | None) -> Path:
    if given is not None:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "salience"


def _digest(text: str) -> str:
    return hashlib.sha256(os.fsencode(text)).hexdigest()[:24]


def _cache_file(cache: Path, where: Path, split: str | None) -> Path:
    return cache / f"{_digest(f'{where}//{split}')}.npz"


def plain_tar(where: Path, cache: Path, progress: Progress | None) -> Path:
    """The tar itself, or the plain twin of a compressed one in the cache, where members can be read singly."""
    try:
        with open(where, "rb") as file:
            if file.read(2) != b"\x1f\x8b":
                return where
    except OSError as error:
        raise DataError(f"{where} cannot be read: {error.strerror or error}; check its permissions") from error
    status = where.stat()
    of_path = _digest(str(where))
    plain = cache / f"{of_path}-{_digest(f'{status.st_size} {status.st_mtime_ns}')}.tar"
    if plain.exists():
        return plain

    def unpack(out: IO[bytes]) -> None:
        with open(where, "rb") as packed, gzip.open(packed) as stream:
            while block := stream.read(1 << 20):
                out.write(block)
                if progress is not None:
                    progress(packed.tell(), status.st_size)

    try:
        _replace(plain, unpack)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise truncated(where) from error
    except OSError as error:
        raise DataError(
            f"{where} cannot be unpacked into {cache}: {error.strerror or error}; free some space there, or pass"
            " another cache_dir"
        ) from error
    for stale in cache.glob(f"{of_path}-*.tar"):  # of this archive as it was before it changed
        if stale != plain:
            stale.unlink(missing_ok=True)
    return plain


def truncated(shown: Path) -> DataError:
    return DataError(f"{shown} is a truncated or damaged tar archive; download or pack it again")


def _replace(target: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file as a whole or not at all: readers see the old one or the new one."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=".new-")
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def _pack(names: Sequence[bytes]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    ends = np.zeros(len(names) + 1, np.int64)
    np.cumsum([len(name) for name in names], out=ends[1:])
    return np.frombuffer(b"".join(names), np.uint8), ends


def _unpack(blob: npt.NDArray[np.uint8], ends: npt.NDArray[np.int64]) -> list[str]:
    data, cuts = blob.tobytes(), ends.tolist()
    return [os.fsdecode(data[start:stop]) for start, stop in pairwise(cuts)]
