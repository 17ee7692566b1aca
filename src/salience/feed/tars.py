"""Index existing tars, and check that shards are what their index says."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from itertools import groupby, pairwise
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from salience.errors import ConfigError, DataError
from salience.feed import index as indices
from salience.feed.headers import TAR_BLOCK_BYTES, Member, compressed, members
from salience.feed.index import Index, Names, classes_of, hasher

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".ppm", ".tif", ".tiff")
SIDECAR_SUFFIXES = (".txt", ".json")
"""Suffixes of files that belong to the data file of the same name."""
CHUNK_BYTES = 1 << 20
"""Number of bytes copied or hashed at a time."""
DEFAULT_JOBS = 4
"""Number of threads that read or write shards."""
MAX_CLASS_NUMBER = 1 << 20
"""Larger numbers in .cls members are treated as names."""

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in total), from the calling thread."""
Count = Callable[[int], None]
"""Called by a task with the number of bytes it has just finished."""
T = TypeVar("T")
R = TypeVar("R")


class Found(NamedTuple):
    """A sample found in a shard."""

    name: str
    offset: int
    size: int
    check: int
    label: str | None
    """Content of its .cls member; None without one."""


def index_shards(
    folder: str | Path, *, checksums: bool = True, jobs: int = DEFAULT_JOBS, progress: Progress | None = None
) -> tuple[Index, int]:
    """The index of the tar shards in `folder`, and the number of entries that are not samples (folders, links, ...)."""
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"There is no folder {folder}; --index-only takes a folder of .tar files.")
    names = sorted(os.listdir(folder))
    for name in names:
        if name.endswith((".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")):
            raise compressed(str(folder / name), name.rpartition(".")[2])
    shards = [name for name in names if name.endswith(".tar")]
    if not shards:
        raise DataError(f"{folder} holds no .tar files; --index-only takes a folder of them.")
    return _index([folder / name for name in shards], checksums, jobs, progress)


def index_tars(paths: Sequence[Path], *, checksums: bool = False, jobs: int = DEFAULT_JOBS) -> Index:
    """The index of plain tars; only their headers are read unless `checksums` is set."""
    return _index(paths, checksums, jobs, None)[0]


def _index(paths: Sequence[Path], checksums: bool, jobs: int, progress: Progress | None) -> tuple[Index, int]:
    sizes = [size_of(path) or 0 for path in paths]  # scan reports what is not a file

    def task(path: Path, count: Count) -> tuple[list[Found], int]:
        return scan(path, checksums, count)

    scanned = each(task, paths, jobs, sum(sizes), progress)
    found = [sample for samples, _ in scanned for sample in samples]
    if not found:
        raise DataError(
            f"There are no samples in {paths[0].parent}; a sample is a regular file of a tar that is not hidden."
        )
    classes, label = labels_of([sample.label for sample in found], [sample.name for sample in found])
    index = Index(
        names=Names.of(sample.name for sample in found),
        shards=tuple(path.name for path in paths),
        shard_sizes=np.array(sizes, dtype=np.int64),
        shard=np.repeat(np.arange(len(paths), dtype=np.int32), [len(samples) for samples, _ in scanned]),
        offset=np.array([sample.offset for sample in found], dtype=np.int64),
        size=np.array([sample.size for sample in found], dtype=np.int64),
        check=np.array([sample.check for sample in found], dtype=np.uint64),
        label=label,
        classes=classes,
    )
    return index, sum(skipped for _, skipped in scanned)


def scan(shard: Path, checksums: bool, count: Count) -> tuple[list[Found], int]:
    """The samples of one tar, read in one pass, and the number of entries skipped. Neighbours with the same name up to the
    first dot are one sample."""
    found: list[Found] = []
    skipped = at = 0
    try:
        with shard.open("rb") as file:
            for key, group in groupby(members(file, str(shard)), _key):
                several = list(group)
                data = min(several, key=_rank)
                if not key or _rank(data) == 3:
                    skipped += len(several)
                    continue
                check = _checksum(file, data) if checksums else 0
                found.append(Found(data.name, data.offset, data.size, check, _class_in(file, several, shard)))
                count(several[-1].offset - at)
                at = several[-1].offset
    except OSError as cause:
        raise unreadable(shard, cause) from cause
    return found, skipped


def labels_of(said: Sequence[str | None], names: Sequence[str]) -> tuple[tuple[str, ...], npt.NDArray[np.int32]]:
    """Classes and labels from the .cls members (numbers or names) if there are any, otherwise from the folders.

    Numbers get the names of the folders if there is exactly one folder per number, in the same order.
    """
    given = {text for text in said if text is not None}
    folders, by_folder = classes_of(names)
    if not given:
        return folders, by_folder
    numbers = all(text.isdecimal() and int(text) < MAX_CLASS_NUMBER for text in given)
    classes = tuple(map(str, range(max(map(int, given)) + 1))) if numbers else tuple(sorted(given))
    number = {text: int(text) if numbers else k for k, text in enumerate(sorted(given))}
    label = np.array([-1 if text is None else number[text] for text in said], dtype=np.int32)
    return (folders if numbers and np.array_equal(label, by_folder) else classes), label


def _key(member: Member) -> str:
    """The part of the name that members of one sample share; empty for entries that are not samples."""
    folder, slash, base = member.name.rpartition("/")
    return folder + slash + base.partition(".")[0] if member.regular and not base.startswith(".") else ""


def _rank(member: Member) -> int:
    """Rank of a member as the data of a sample: 0 for images, 1 for other files, 2 for sidecars; 3 for a class, never data."""
    suffix = suffix_of(member.name).lower()
    return 0 if suffix in IMAGE_SUFFIXES else 2 if suffix in SIDECAR_SUFFIXES else 3 if suffix == ".cls" else 1


def _class_in(file: BinaryIO, several: Sequence[Member], shard: Path) -> str | None:
    for member in several:
        if member.name.endswith(".cls"):
            if member.size > TAR_BLOCK_BYTES:
                raise DataError(f"{shard}: {member.name!r} has {member.size:,} bytes; a class is a number or a name.")
            file.seek(member.offset)
            return file.read(member.size).decode("utf-8", "replace").strip()
    return None


def _checksum(file: BinaryIO, member: Member) -> int:
    check, left = hasher()(), member.size
    file.seek(member.offset)
    while left and (chunk := file.read(min(left, CHUNK_BYTES))):
        check.update(chunk)
        left -= len(chunk)
    return check.intdigest()


# ---------------------------------------------------------------- checking


def check(out: str | Path, *, jobs: int = DEFAULT_JOBS, progress: Progress | None = None) -> tuple[Index, list[str]]:
    """Read all shards back; returns the index, and one sentence for each shard that differs from it."""
    out = Path(out)
    index = Index.load(out / indices.FILE)
    if not index.shards:
        raise DataError(f"{out / indices.FILE} lists no shards, so there is nothing to read back.")
    order = np.lexsort((index.offset, index.shard))
    bounds = np.searchsorted(index.shard[order], np.arange(len(index.shards) + 1))
    rows = [order[a:b] for a, b in pairwise(bounds.tolist())]

    def task(number: int, count: Count) -> str:
        return _differs(out, index, number, rows[number], count)

    told = each(task, range(len(index.shards)), jobs, int(index.shard_sizes.sum()), progress)
    return index, [text for text in told if text]


def _differs(out: Path, index: Index, shard: int, rows: npt.NDArray[np.int64], count: Count) -> str:
    """The difference between a shard and its index, in words; empty if there is none."""
    name, size = index.shards[shard], int(index.shard_sizes[shard])
    if (there := size_of(out / name)) != size:
        return f"{name} is missing." if there is None else f"{name} has {there:,} bytes; the index says {size:,}."
    try:
        found, _ = scan(out / name, bool(index.check[rows].any()), count)
    except DataError as error:
        return str(error)
    if len(found) != len(rows):
        return f"{name} holds {len(found):,} samples; the index says {len(rows):,}."
    for i, sample in zip(rows.tolist(), found, strict=True):
        if (sample.offset, sample.size) != (index.offset[i], index.size[i]):
            return f"{name}: {index.names[i]!r} is not where the index says."
        if index.check[i] and sample.check != index.check[i]:
            return f"{name}: {index.names[i]!r} has other bytes than its checksum says."
    return ""


# ---------------------------------------------------------------- shared


class _Stopped(Exception):
    """Another shard has failed."""


def each(
    task: Callable[[T, Count], R], items: Sequence[T], jobs: int, total: int, progress: Progress | None
) -> list[R]:
    """Run task(item, count) for all items in threads, where `count(bytes)` reports progress. The first failure stops all."""
    if jobs < 1:
        raise ConfigError(f"--jobs is {jobs}; it must be at least 1.")
    lock, stop = threading.Lock(), threading.Event()
    done = 0

    def count(more: int) -> None:
        nonlocal done
        if stop.is_set():
            raise _Stopped
        with lock:
            done += more

    with ThreadPoolExecutor(jobs) as pool:
        tasks = [pool.submit(task, item, count) for item in items]
        try:
            waiting = set(tasks)
            while waiting:
                finished, waiting = wait(waiting, timeout=0.2, return_when=FIRST_EXCEPTION)
                for one in finished:
                    one.result()
                if progress is not None:
                    progress(done if waiting else total, total)
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [one.result() for one in tasks]


def save(index: Index, folder: Path) -> None:
    """Write the index beside its shards."""
    try:
        index.save(folder / indices.FILE)
    except OSError as cause:
        raise DataError(
            f"{folder / indices.FILE} cannot be written: {cause.strerror or cause}; make room, or make the folder writable."
        ) from cause


def suffix_of(path: str) -> str:
    """The last suffix with its dot; empty if there is none."""
    suffix = os.path.splitext(path)[1]
    return suffix if len(suffix) > 1 else ""


def size_of(path: Path) -> int | None:
    """Bytes of a file; None if it does not exist."""
    return path.stat().st_size if path.is_file() else None


def unreadable(path: Path, cause: OSError) -> DataError:
    return DataError(
        f"{path} cannot be read: {cause.strerror or cause}; repair or remove it, then run the same command again."
    )
