"""Slower tiers of the cache, between memory and the store: a local disk, and a Redis or Valkey server.

A tier can only save reads from the store. Whatever goes wrong with one is a warning and a read from the store instead,
never an error of the run; what it gives back has been checked. Any thread may ask.
"""

from __future__ import annotations

import functools
import hashlib
import os
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from salience.feed.index import Index, Names

Warn = Callable[[str], None]

SEAL = 8
"""Bytes before those of a sample, wherever a tier keeps it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TierCounts:
    """What was asked of a tier and what it did."""

    asked: int = 0
    """Samples that were asked for."""
    hits: int = 0
    hit_bytes: int = 0
    writes: int = 0
    written_bytes: int = 0
    refused: int = 0
    """Samples it was given and could not keep: no room, too large, or in trouble."""
    bad: int = 0
    """Samples that did not have their checksum any more; they were removed."""


class Tier(Protocol):
    """Keeps samples by number."""

    name: str
    """For reports."""

    @property
    def counts(self) -> TierCounts: ...

    def get(self, ids: Sequence[int]) -> dict[int, bytes]:
        """Those it has, checked."""
        ...

    def put(self, found: Mapping[int, bytes]) -> None:
        """Keeps what it can."""
        ...

    def close(self) -> None: ...


class Tally:
    """Counts that several threads add to."""

    def __init__(self) -> None:
        self.counts = TierCounts()
        self._lock = threading.Lock()

    def add(self, **more: int) -> None:
        with self._lock:
            self.counts = replace(
                self.counts, **{name: getattr(self.counts, name) + count for name, count in more.items()}
            )


def open_tiers(disk: str | None, redis: str | None, index: Index, url: str, warn: Warn) -> list[Tier]:
    """The tiers a user asked for, the nearest first: `disk` is DIR or DIR:BYTES, `redis` a redis:// or rediss:// URL."""
    from salience.feed.disk import open_disk
    from salience.feed.redis_tier import open_redis

    tiers: list[Tier] = []
    if disk is not None or redis is not None:
        source = identity(url, index)
        if disk is not None:
            tiers.append(open_disk(disk, source, index.size, warn))
        if redis is not None:
            tiers.append(open_redis(redis, source, index.size, warn))
    return tiers


def identity(url: str, index: Index) -> str:
    """16 hex digits for a source and all that its index holds, so that what is kept of another, or of this one before it
    changed, is never taken for it. Of objects without checksums the index knows no more than name and size.
    """
    shards = Names.of(index.shards)
    arrays = (
        index.names.joined, index.names.ends, shards.joined, shards.ends, index.shard_sizes,
        index.shard, index.offset, index.size, index.check,
    )  # fmt: skip
    place = url if "://" in url else os.path.realpath(os.path.expanduser(url))
    digest = hashlib.blake2b(f"{place}\0{len(index)}\0".encode("utf-8", "surrogateescape"), digest_size=8)
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def seal(data: bytes) -> bytes:
    """A checksum of eight bytes: xxh3_64, or crc32 below four zeros where xxhash is not installed."""
    xxh3 = _xxh3()
    check = xxh3(data) if xxh3 else 0
    return (check if check >> 32 else zlib.crc32(data)).to_bytes(SEAL, "big")


def fits(seal: bytes, data: bytes) -> bool | None:
    """Whether `data` has this seal, whoever wrote it; None where that cannot be told without xxhash."""
    check = int.from_bytes(seal, "big")
    if len(seal) < SEAL or not check >> 32:
        return len(seal) == SEAL and check == zlib.crc32(data)
    xxh3 = _xxh3()
    return xxh3(data) == check if xxh3 else None


@functools.cache
def _xxh3() -> Callable[[bytes], int] | None:
    try:
        from xxhash import xxh3_64_intdigest
    except ImportError:
        return None
    return xxh3_64_intdigest
