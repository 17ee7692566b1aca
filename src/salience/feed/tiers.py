"""Slower tiers of the cache, between memory and the store: a local disk, and a Redis or Valkey server.

A tier can only save reads from the store. A failure of one is a warning and a read from the store instead, never an error of
the run. What it returns has been checked. Its methods may be called from any thread.
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

SEAL_BYTES = 8
"""Length of the checksum that tiers store in front of each sample."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TierCounts:
    """Counts of what a tier was asked for and what it did."""

    asked: int = 0
    """Samples that were asked for."""
    hits: int = 0
    """Samples it had."""
    hit_bytes: int = 0
    """Bytes of those."""
    writes: int = 0
    """Samples it stored."""
    written_bytes: int = 0
    """Bytes of those."""
    refused: int = 0
    """Samples it was offered but could not keep: no room, too large, or a failure."""
    bad: int = 0
    """Samples that no longer matched their checksum and were removed."""


class Tier(Protocol):
    """Keeps samples by their ids."""

    name: str
    """Its name in reports."""

    @property
    def counts(self) -> TierCounts:
        """Its counts so far."""
        ...

    def get(self, ids: Sequence[int]) -> dict[int, bytes]:
        """The samples that it has, checked."""
        ...

    def put(self, found: Mapping[int, bytes]) -> None:
        """Keep as many of these samples as possible."""
        ...

    def close(self) -> None:
        """Release its connections."""
        ...


class TierTally:
    """Counts to which several threads add."""

    def __init__(self) -> None:
        self.counts = TierCounts()
        self._lock = threading.Lock()

    def add(self, **more: int) -> None:
        with self._lock:
            self.counts = replace(
                self.counts, **{name: getattr(self.counts, name) + count for name, count in more.items()}
            )


def open_tiers(disk: str | None, redis: str | None, index: Index, url: str, warn: Warn) -> list[Tier]:
    """The tiers that are configured, nearest first: `disk` is DIR or DIR:BYTES, `redis` a redis:// or rediss:// URL."""
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
    """16 hex digits that identify a source and its index.

    Samples kept for another source, or for this one before it changed, are never mistaken for its own. For objects without
    checksums, only names and sizes are compared.
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
    """A checksum of eight bytes: xxh3_64, or four zeros and crc32 if xxhash is not installed."""
    xxh3 = _xxh3()
    check = xxh3(data) if xxh3 else 0
    return (check if check >> 32 else zlib.crc32(data)).to_bytes(SEAL_BYTES, "big")


def fits(seal: bytes, data: bytes) -> bool | None:
    """True if `data` matches this checksum; None if xxhash is needed to tell and is not installed."""
    check = int.from_bytes(seal, "big")
    if len(seal) < SEAL_BYTES or not check >> 32:
        return len(seal) == SEAL_BYTES and check == zlib.crc32(data)
    xxh3 = _xxh3()
    return xxh3(data) == check if xxh3 else None


@functools.cache
def _xxh3() -> Callable[[bytes], int] | None:
    try:
        from xxhash import xxh3_64_intdigest
    except ImportError:
        return None
    return xxh3_64_intdigest
