"""salience.Source: samples in a folder, in tar shards or in an object store, by number."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from salience.errors import ConfigError, DataError
from salience.feed.index import FILE, Index, Names, check_path, classes_of
from salience.feed.options import Decode, ReadingOptions
from salience.feed.policy import OpenPolicy
from salience.feed.reads import Broken, Counts, Reader
from salience.feed.retry import RetryPolicy
from salience.feed.stores import LocalStore, Store, open_store
from salience.feed.tars import index_tars


class Source:
    """N samples at `url`, read by number: a folder, tar shards with their byte index, or a prefix of an object store.

        source = salience.Source("s3://bucket/shards", decode=my_decode, cache="4GiB")
        loader = salience.Loader(source, batch_size=128)

    `decode` turns the bytes of a sample into the sample; without it, batches are made of bytes. A sample that cannot be read
    or decoded is replaced by another one of its batch, with loss weight 0, and named in the report; the run stops when
    more than `max_broken` of all samples are broken.

    With `cache` ("4GiB", or bytes), `disk` ("/nvme/x:200GiB") or `redis` ("redis://host"), one process per node reads the
    samples of the plan ahead of time and keeps those needed again; `cache_policy` decides which samples stay in memory.
    `views` passes `decode` a read-only view of the cache's memory instead of bytes: one copy less, but the view must not
    outlive the batch.

    An `index.npz` below `url` is used, or the given `index` (a path, or an Index). Without one, every object is
    a sample, and the first folder below `url` is its class. Failed requests are repeated up to `retries` times within
    `deadline` seconds; each process has at most `concurrency` requests in flight. Credentials come from the environment or
    the cloud's own configuration.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        decode: Decode | None = None,
        cache: int | str | None = None,
        disk: str | None = None,
        redis: str | None = None,
        max_broken: float = 0.01,
        views: bool = False,
        cache_policy: str | OpenPolicy = "planned",
        index: Index | str | os.PathLike[str] | None = None,
        retries: int = 8,
        deadline: float = 60.0,
        concurrency: int = 32,
    ) -> None:
        if concurrency < 1:
            raise ConfigError(f"concurrency is {concurrency}; it must be at least 1.")
        retry = RetryPolicy(retries=retries, deadline=deadline)
        store, only = _opened(os.fspath(url), retry)
        self.url = store.url if only is None else f"{store.url}/{only}"
        self.index = _find_index(store, only, index)
        self.reading = ReadingOptions(
            decode=decode, cache=cache, disk=disk, redis=redis, max_broken=max_broken, views=views,
            cache_policy=cache_policy,
        ).checked(self.sizes)  # fmt: skip
        """How its samples are decoded and cached, and how many may be broken."""
        _check_unchanged(store, self.index)
        self.stats = Counts()
        """Requests to the store and bytes it sent, for the batches delivered so far."""
        self.reader = Reader(store, self.index, retry, concurrency=concurrency)
        """Sends the requests."""

    def using(self, **options: Any) -> Source:
        """The same samples, read with other `decode`, `cache`, `disk`, `redis`, `max_broken`, `views` or `cache_policy`."""
        other = copy.copy(self)
        other.reading = replace(self.reading, **options).checked(self.sizes)
        return other

    def __len__(self) -> int:
        return len(self.index)

    def __repr__(self) -> str:
        return f"Source({self.url!r}, {len(self):,} samples, {len(self.classes)} classes)"

    @property
    def labels(self) -> npt.NDArray[np.int32]:
        """Class of each sample as an index into `classes`, int32 [N]; -1 = not known."""
        return self.index.label

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes; empty if they are not known."""
        return self.index.classes

    @property
    def names(self) -> Names:
        """The name of each sample in its shard, or its path."""
        return self.index.names

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """Bytes of each sample, int64 [N]."""
        return self.index.size

    def read(self, ids: Sequence[int]) -> list[bytes | Broken]:
        """The bytes of each sample, or a Broken with the reason."""
        data, counts = self.read_counted(ids)
        self.stats.add(counts)
        return data

    def read_counted(self, ids: Sequence[int]) -> tuple[list[bytes | Broken], Counts]:
        """The same with counts of requests, for workers that send them along with the batch."""
        data = self.reader.read(ids)
        return data, self.reader.take_counts()


def _opened(url: str, retry: RetryPolicy) -> tuple[Store, str | None]:
    """The store, and the name of the tar if `url` names one."""
    if not url.endswith(".tar"):
        return open_store(url, retry), None
    folder, _, name = url.rpartition("/")
    return open_store(folder or ("/" if url.startswith("/") else "."), retry), name


def _find_index(store: Store, only: str | None, given: Index | str | os.PathLike[str] | None) -> Index:
    if isinstance(given, Index):
        given.validate("The index")
        return given
    if given is not None:
        folder, _, name = os.fspath(given).rpartition("/")
        data = open_store(folder or ".").get(name)
        if data is None:
            raise DataError(f"There is no index {os.fspath(given)!r}; make it with `salience pack --index-only`.")
        return Index.load(os.fspath(given), data)
    if only is not None:
        return _index_of_tar(store, only)
    data = store.get(FILE)
    if data is not None:
        return Index.load(f"{store.url}/{FILE}", data)
    listed = [(path, size) for path, size in store.list() if not any(part.startswith(".") for part in path.split("/"))]
    if not listed:
        raise DataError(f"There is nothing at {store.url}; check the spelling, and that it is a folder or prefix.")
    if any(path.endswith(".tar") for path, _ in listed):
        raise DataError(
            f"{store.url} has tar shards and no {FILE}; make it with `salience pack --index-only {store.url}`."
        )
    return _of_objects(listed, store.url)


def _of_objects(listed: Sequence[tuple[str, int]], url: str) -> Index:
    """An index in which every object is a sample and the first folder below the source is its class."""
    paths = [check_path(path, url) for path, _ in listed]
    classes, label = classes_of(paths)
    n = len(paths)
    return Index(
        names=Names.of(paths), shards=(), shard_sizes=np.empty(0, np.int64), shard=np.full(n, -1, np.int32),
        offset=np.zeros(n, np.int64), size=np.array([size for _, size in listed], np.int64),
        check=np.zeros(n, np.uint64), label=label, classes=classes,
    )  # fmt: skip


def _index_of_tar(store: Store, name: str) -> Index:
    """The index of a local tar, made by reading its headers."""
    if store.sizes([name]) == [None]:
        raise DataError(f"There is no {name!r} at {store.url}; check the spelling.")
    if isinstance(store, LocalStore):
        return index_tars([store.root / name])
    raise DataError(f"{store.url}/{name} has no index; make it with `salience pack --index-only` and pass index=.")


def _check_unchanged(store: Store, index: Index) -> None:
    for path, then, now in zip(index.shards, index.shard_sizes.tolist(), store.sizes(index.shards), strict=True):
        if now is None:
            raise DataError(
                f"{store.url} has no shard {path!r}, which its index names; it was moved, or was never there."
            )
        if now != then:
            raise DataError(
                f"{path!r} at {store.url} has {now:,} bytes and had {then:,} when its index was made; make the index again "
                "with `salience pack --index-only`."
            )
