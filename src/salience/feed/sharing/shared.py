"""salience.SharedFeed: samples at a URL that all jobs on a node read through one feed, found by name."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from salience.errors import ConfigError, StoreError
from salience.feed.index import Index, Names
from salience.feed.options import Decode
from salience.feed.sharing import finding
from salience.feed.sharing.config import FeedConfig
from salience.feed.sizes import memory_bytes, parse_bytes
from salience.feed.source import Source
from salience.feed.tiers import identity
from salience.ledger.sharing import SharedLedger

if TYPE_CHECKING:
    from salience.feed.sharing.job import JobFeed

LEAST_WORKING_BYTES = 64 * 1024 * 1024
"""Minimum memory beside the cache, for what is read ahead."""
WORKING_SAMPLES = 4096
"""Number of samples of mean size for which there is memory beside the cache."""


class SharedFeed:
    """N samples at `url`, fetched and decoded once per node however many jobs read them.

        feed = salience.SharedFeed("s3://bucket/shards", cache="16GiB", decode=decode)   # in every job
        loader = salience.Loader(feed, batch_size=128, select="default")                 # with a plan of its own

    The first job that asks for a feed of this `name` (by default derived from the URL) starts its process; the others find
    it. The feed reads for all jobs in the order in which their plans need samples, and keeps decoded samples in `cache` bytes
    of memory. The job that needs a sample first decodes it. Random transforms belong into `augment=` of each Loader; leading
    stages declared `random=False` are shared too, and every job gets the same tensors as if it ran alone.

    Jobs with the same plan wait for the slowest of them for up to `patience` seconds per window if memory cannot hold the
    samples between them. The process ends `linger` seconds after the last job (None: by `salience feed stop`). If it dies,
    jobs read by themselves until one of them has restarted it. Other options are those of a `Source`.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        cache: int | str | None = None,
        decode: Decode | None = None,
        name: str | None = None,
        disk: str | None = None,
        redis: str | None = None,
        max_broken: float = 0.01,
        index: Index | str | os.PathLike[str] | None = None,
        retries: int = 8,
        deadline: float = 60.0,
        concurrency: int = 32,
        linger: float | None = 60.0,
        patience: float = 5.0,
    ) -> None:
        self.source = Source(
            url,
            decode=decode,
            max_broken=max_broken,
            index=index,
            retries=retries,
            deadline=deadline,
            concurrency=concurrency,
        )
        self.source.using(disk=disk, redis=redis)  # check them now
        self._identity = identity(self.source.url, self.source.index)
        self.name = name or default_name(self.source.url, self._identity)
        budget, capacity = _room(cache, self.source.sizes)
        self.config = FeedConfig(
            name=self.name, url=self.source.url, index="", budget=budget, capacity=capacity, disk=disk, redis=redis,
            retries=retries, deadline=deadline, concurrency=concurrency, linger=linger, patience=patience,
        )  # fmt: skip
        finding.socket_of(self.name)
        self.started = finding.ensure(self.config, self.source.index)
        """True if this process started the feed; False if it was already running."""
        refusal = finding.ask(self.name, "fits", {"identity": self._identity})
        if refusal is None:
            raise StoreError(f"The feed {self.name!r} ended just after it was found; try again.")
        if refusal["text"]:
            raise ConfigError(refusal["text"])

    def __len__(self) -> int:
        return len(self.source)

    def __repr__(self) -> str:
        return f"SharedFeed({self.source.url!r}, name={self.name!r}, {len(self):,} samples)"

    @property
    def labels(self) -> npt.NDArray[np.int32]:
        """Class of each sample as an index into `classes`, int32 [N]; -1 = not known."""
        return self.source.labels

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes; empty if they are not known."""
        return self.source.classes

    @property
    def names(self) -> Names:
        """The name of each sample in its shard, or its path."""
        return self.source.names

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """Bytes of each sample, int64 [N]."""
        return self.source.sizes

    def shared_ledger(self, comparison: str = "") -> SharedLedger:
        """The ledger that jobs on this feed share with `ledger="share"`. It is deleted when the feed ends or is stopped."""
        return SharedLedger(finding.ledgers_of(self.name, self._identity), comparison=comparison)

    def status(self) -> dict[str, Any] | None:
        """What the feed does and which jobs read from it; None if it is not running."""
        return finding.ask(self.name, "status")

    def open(self, decode: Decode | None, *, workers: int) -> JobFeed:
        """Join the feed as a job that needs samples decoded by `decode`."""
        from salience.feed.sharing.job import JobFeed
        from salience.feed.sharing.signature import signature

        finding.ensure(self.config, self.source.index)
        return JobFeed(
            self.config, self._identity, self.source, None if decode is None else signature(decode), decode, workers
        )


def default_name(url: str, identity: str) -> str:
    """A name from the last part of the URL and a digest that identifies its samples."""
    last = re.sub(r"[^A-Za-z0-9]+", "-", url.rstrip("/").rpartition("/")[2]).strip("-")[:40]
    return f"{last or 'feed'}-{identity[:8]}"


def _room(cache: int | str | None, sizes: npt.NDArray[np.int64]) -> tuple[int, int]:
    """Bytes for samples that will be needed again, and of a feed's memory in total."""
    memory = memory_bytes()
    mean = float(sizes.mean()) if len(sizes) else 0.0
    working = max(LEAST_WORKING_BYTES, int(WORKING_SAMPLES * mean), 4 * int(sizes.max(initial=0)))
    if cache is None:
        return (memory or 1 << 32) // 4, (memory or 1 << 32) // 4 + working
    budget = parse_bytes(cache) if isinstance(cache, str) else int(cache)
    if budget < 0:
        raise ConfigError(f"cache is {budget} bytes; it must be at least 0.")
    if memory is not None and budget + working > memory:
        raise ConfigError(
            f"cache is {budget:,} bytes, with {working:,} beside it for what is read ahead, and this machine has {memory:,} of "
            "memory; use disk= for the rest."
        )
    return budget, budget + working
