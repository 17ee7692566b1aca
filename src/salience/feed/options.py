"""How a source is read: the options that belong to `salience.Source`, checked when it is created."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from salience.errors import ConfigError
from salience.feed.disk import parse_disk
from salience.feed.policy import OpenPolicy, open_policy
from salience.feed.redis_tier import check_redis_url
from salience.feed.sizes import memory_bytes, parse_bytes

Decode = Callable[[Any], Any]
"""Turns the bytes of a sample into the sample."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadingOptions:
    """How a source decodes the bytes it reads, and where it keeps them."""

    decode: Decode | None = None
    """Turns bytes into a sample; None delivers the bytes."""
    cache: int | str | None = None
    """Bytes of memory per node for samples that will be needed again; None turns the cache off."""
    disk: str | None = None
    """A folder that keeps samples between memory and the store, as DIR or DIR:BYTES."""
    redis: str | None = None
    """A Redis or Valkey server that several nodes share, as redis:// or rediss://."""
    max_broken: float = 0.01
    """Share of all samples that may be broken before the run stops."""
    views: bool = False
    """Pass `decode` a read-only view of the cache's memory instead of bytes."""
    cache_policy: str | OpenPolicy = "planned"
    """Decides which samples the cache keeps: "planned", or a function that makes a `salience.feed.policy.Policy`."""

    @property
    def cached(self) -> bool:
        """True if a feeder reads ahead: there is a cache, or a disk or Redis tier."""
        return self.cache is not None or self.disk is not None or self.redis is not None

    def checked(self, sizes: npt.NDArray[np.int64]) -> ReadingOptions:
        """The options, checked for samples of these sizes, int64 [N], with `cache` in bytes. Raises ConfigError."""
        if self.decode is not None and not callable(self.decode):
            raise ConfigError(f"decode is {self.decode!r}; it must be a function that turns bytes into a sample.")
        if not 0 <= self.max_broken <= 1:
            raise ConfigError(f"max_broken is {self.max_broken}; it must be a share from 0 to 1.")
        if self.disk is not None:
            parse_disk(self.disk)
        if self.redis is not None:
            check_redis_url(self.redis)
        budget = None if self.cache is None else checked_budget(self.cache, sizes)
        open_policy(self.cache_policy, budget or 0, sizes)
        return replace(self, cache=budget)


READING_OPTIONS = tuple(one.name for one in fields(ReadingOptions))
"""Names of the options of a source that say how its samples are read."""


def checked_budget(cache: int | str, sizes: npt.NDArray[np.int64]) -> int:
    """Size of the cache in bytes: at most that of all samples, and no more than the machine's memory."""
    budget = parse_bytes(cache) if isinstance(cache, str) else int(cache)
    if budget < 0:
        raise ConfigError(f"cache is {budget} bytes; it must be at least 0.")
    budget = min(budget, int(sizes.sum()))
    memory = memory_bytes()
    if memory is not None and budget > memory:
        raise ConfigError(
            f"cache is {budget:,} bytes and this machine has {memory:,} of memory; use disk= for the rest."
        )
    return budget
