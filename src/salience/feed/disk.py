"""The disk tier: one file per sample, shared between runs and kept after them."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from salience.errors import ConfigError
from salience.feed.sizes import parse_bytes
from salience.feed.tiers import SEAL_BYTES, TierCounts, TierTally, Warn, fits, seal
from salience.files import atomic

Bytes = TypeVar("Bytes", int, npt.NDArray[np.int64])

DISK_BLOCK_BYTES = 4096
"""Files occupy whole blocks of this size."""
SUBFOLDERS = 256
"""Number of folders over which files are spread."""
RECOUNTS_PER_LIMIT = 64
"""The files of all runs are counted again whenever this run has written this fraction (1/64) of the limit."""
MIN_FREE_SHARE = 0.05
"""Share of the disk that stays free if no limit is given."""
STALE_SECONDS = 3600.0
"""Age in seconds at which a half-written file is taken to belong to a run that died."""


def open_disk(text: str, source: str, sizes: npt.NDArray[np.int64], warn: Warn) -> DiskTier:
    """The tier at DIR or DIR:BYTES, with the samples of earlier runs; `source` is the identity of the source."""
    folder, limit = parse_disk(text)
    tier = DiskTier(os.path.join(folder, f"salience-{source}"), limit, sizes, warn)
    tier.open()
    return tier


def parse_disk(text: str) -> tuple[str, int | None]:
    """Folder and limit in "DIR:BYTES"; the limit is None for DIR alone. A colon before a slash belongs to DIR."""
    folder, colon, size = text.rpartition(":")
    if not colon or "/" in size or os.sep in size:
        folder, size = text, ""
    limit = parse_bytes(size) if size else None
    if not folder or limit == 0 or text.endswith(":"):
        raise ConfigError(f"disk is {text!r}; write DIR:BYTES, for example /nvme/cache:200GiB, or DIR alone.")
    return os.path.abspath(os.path.expanduser(folder)), limit


def taken(size: Bytes) -> Bytes:
    """Bytes of disk space for a sample of `size` bytes with its checksum, in whole blocks."""
    return -(-(size + SEAL_BYTES) // DISK_BLOCK_BYTES) * DISK_BLOCK_BYTES


class DiskTier:
    """Samples as files `folder`/ab/<id>, until `limit` bytes are used, or 95% of the disk if it is None.

    Nothing is ever evicted: if each sample is read equally often, no policy has more hits than keeping what came first.
    A file is renamed into place, so it is either complete or absent. It is not synced; a file torn by a crash of the machine
    is detected by its checksum. Runs may share the folder: each counts the files of all runs when it opens and after every
    1/64 of the limit that it writes, so each run can exceed the limit by at most that much.
    """

    name = "disk"

    def __init__(self, folder: str, limit: int | None, sizes: npt.NDArray[np.int64], warn: Warn) -> None:
        self.folder, self.limit = folder, limit
        self._sizes, self._warn = sizes, warn
        self._tally, self._lock = TierTally(), threading.Lock()
        self._reads = self._writes = True
        self._used = 0
        """Bytes used by all runs, as of the last count."""
        self._claimed = self._counted = 0
        """Bytes that this run has claimed for its files, in total and at the last count."""

    @property
    def counts(self) -> TierCounts:
        return self._tally.counts

    def open(self) -> None:
        self._count()
        try:
            os.makedirs(self.folder, exist_ok=True)
        except OSError as error:
            self._stop_writing(error)

    def get(self, ids: Sequence[int]) -> dict[int, bytes]:
        found: dict[int, bytes] = {}
        bad = 0
        for i in ids if self._reads else ():
            try:
                with open(self._path(i), "rb", buffering=0) as file:
                    check, data = file.read(SEAL_BYTES), file.readall()
            except FileNotFoundError:
                continue
            except OSError as error:
                self._stop_reading(error)
                break
            right = fits(check, data)
            if right:
                found[i] = data
            elif right is False:
                bad += 1
                self._remove(i)
        self._tally.add(asked=len(ids), hits=len(found), hit_bytes=sum(map(len, found.values())), bad=bad)
        return found

    def put(self, found: Mapping[int, bytes]) -> None:
        writes = written = there = 0
        for i, data in found.items():
            if os.path.exists(self._path(i)):
                there += 1
            elif self._claim(taken(len(data))) and self._write(i, data):
                writes += 1
                written += len(data)
        self._tally.add(writes=writes, written_bytes=written, refused=len(found) - there - writes)

    def close(self) -> None:
        """Do nothing: no file stays open."""

    def _path(self, i: int) -> str:
        return f"{self.folder}/{i % SUBFOLDERS:02x}/{i}"

    def _claim(self, size: int) -> bool:
        """Claim `size` bytes; False if there is no room."""
        if not self._writes:
            return False
        if self.limit is None:
            return self._room_on_disk() >= size
        if self._claimed - self._counted > self.limit // RECOUNTS_PER_LIMIT:
            self._count()
        with self._lock:
            if self._used + size > self.limit:
                return False
            self._used += size
            self._claimed += size
            return True

    def _room_on_disk(self) -> float:
        try:
            disk = os.statvfs(os.path.dirname(self.folder))
        except OSError as error:
            self._stop_writing(error)
            return 0
        return (disk.f_bavail - MIN_FREE_SHARE * disk.f_blocks) * disk.f_frsize

    def _write(self, i: int, data: bytes) -> bool:
        path = self._path(i)
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with atomic(path, sync=False) as file:
                file.write(seal(data))
                file.write(data)
        except OSError as error:
            self._stop_writing(error)
            return False
        return True

    def _remove(self, i: int) -> None:
        try:
            os.unlink(self._path(i))
        except FileNotFoundError:
            return
        except OSError as error:
            return self._stop_writing(error)
        with self._lock:
            self._used -= taken(int(self._sizes[i]))

    def _count(self) -> None:
        """Count the files of all runs by their names (sizes are known), and remove half-written files of dead runs."""
        with self._lock:
            before = self._counted = self._claimed
        names: list[str] = []
        try:
            for k in range(SUBFOLDERS):
                with contextlib.suppress(FileNotFoundError):
                    names += self._names(f"{self.folder}/{k:02x}")
        except OSError as error:
            return self._stop_reading(error)
        n = len(self._sizes)
        ids = np.array([i for name in names if name.isdecimal() and (i := int(name)) < n], dtype=np.int64)
        used = int(taken(self._sizes[ids]).sum())
        with self._lock:
            self._used = used + self._claimed - before

    def _names(self, folder: str) -> list[str]:
        names = os.listdir(folder)
        for name in names:
            if name.startswith("."):
                with contextlib.suppress(OSError):
                    if os.stat(f"{folder}/{name}").st_mtime < time.time() - STALE_SECONDS:
                        os.unlink(f"{folder}/{name}")
        return names

    def _stop_writing(self, error: OSError) -> None:
        with self._lock:
            first, self._writes = self._writes, False
        if first:
            self._warn(
                f"The disk tier at {self.folder} takes no more samples ({_reason(error)}); the run continues with those it has."
            )

    def _stop_reading(self, error: OSError) -> None:
        with self._lock:
            first, self._reads, self._writes = self._reads, False, False
        if first:
            self._warn(
                f"The disk tier at {self.folder} cannot be read ({_reason(error)}); the run continues without it."
            )


def _reason(error: OSError) -> str:
    return error.strerror or type(error).__name__
