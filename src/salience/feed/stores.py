"""Stores of samples: local folders, and object stores through `obstore`.

A store is opened by its URL, makes no connection before the first request, and can be pickled. The errors of an object store
may contain signed URLs or account names: they are used to tell errors apart and never passed on.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import os
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import unquote, urlsplit

from salience.errors import ConfigError, DataError, MissingExtra, SalienceError, StoreError, did_you_mean
from salience.feed import isolated
from salience.feed.index import check_path
from salience.feed.reads import MISSING, NO_RANGES, SERVE_RANGES, ReadFailed
from salience.feed.retry import RetryPolicy

if TYPE_CHECKING:
    from obstore.store import ObjectStore

T = TypeVar("T")

SCHEMES = ("s3", "gs", "az", "https", "http", "file")
CREDENTIAL_HINTS = {
    "s3": "set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION, or AWS_SKIP_SIGNATURE=true if it is public",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS to the key file, or GOOGLE_SKIP_SIGNATURE=true if it is public",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or AZURE_SKIP_SIGNATURE=true if it is public",
}
CREDENTIAL_ERRORS = re.compile(r"metadata|/latest/api/token|token request|must be specified|credential", re.I)
NO_CREDENTIALS = "no credentials were found"
STATUS_CODE = re.compile(r"status code: (\d{3})")
CONCURRENT_HEADS = 32
"""Number of sizes requested at the same time."""
RANGE_SECONDS = 5.0
"""How long a web server is waited for that is asked for one byte; what is wrong with a slow one is found when it is read."""


class Store(Protocol):
    """Objects by path below one URL."""

    url: str
    """Its address, safe to show."""
    far: bool
    """True if it is reached over a network, on which answers can get lost."""

    def sizes(self, paths: Sequence[str]) -> list[int | None]:
        """Bytes of each object; None for one that does not exist."""
        ...

    def list(self, prefix: str = "") -> list[tuple[str, int]]:
        """Paths below `prefix`, sorted, with their sizes in bytes."""
        ...

    def get(self, path: str) -> bytes | None:
        """A whole object; None if it does not exist."""
        ...

    async def get_range(self, path: str, start: int, stop: int) -> bytes:
        """Bytes from `start` up to `stop`; raises ReadFailed."""
        ...


def open_store(url: str | os.PathLike[str], retry: RetryPolicy | None = None) -> Store:
    """The store at `url`; no request is made yet."""
    text = os.fspath(url)
    if "://" not in text:
        return LocalStore(text)
    scheme = text.split("://", 1)[0].lower()
    if scheme not in SCHEMES:
        raise ConfigError(f"{shown(text)!r} has the unknown scheme {scheme!r}.{did_you_mean(scheme, SCHEMES)}")
    parts = urlsplit(text)
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ConfigError(
            f"The URL {shown(text)!r} was given with a user, password or query; credentials come from the "
            "environment or the cloud's own configuration, never from the URL. Leave them out."
        )
    if scheme == "file":
        return LocalStore(unquote(parts.path))
    if not parts.netloc:
        raise ConfigError(f"{shown(text)!r} names no {'host' if scheme.startswith('http') else 'bucket'}.")
    return RemoteStore(text.rstrip("/"), retry or RetryPolicy())


def shown(url: str) -> str:
    """The URL without its user, password and query, which may be secret."""
    scheme, mark, rest = url.partition("://")
    if not mark:
        return url
    rest = re.split(r"[?#]", rest, maxsplit=1)[0]
    return f"{scheme}://{rest.rpartition('@')[2]}"


class LocalStore:
    """A folder; needs no other package."""

    far = False

    def __init__(self, root: str) -> None:
        self.root = Path(root).expanduser()
        self.url = str(self.root)

    def sizes(self, paths: Sequence[str]) -> list[int | None]:
        files = [self._path(path) for path in paths]
        return [file.stat().st_size if file.is_file() else None for file in files]

    def list(self, prefix: str = "") -> list[tuple[str, int]]:
        found: list[tuple[str, int]] = []
        for folder, folders, files in os.walk(self.root / prefix, followlinks=True):
            here, below = Path(folder), Path(folder).relative_to(self.root)
            folders[:] = [
                name for name in folders if not here.resolve().is_relative_to((here / name).resolve())
            ]  # loops
            for file in files:
                if not (here / file).exists():
                    raise DataError(f"{here / file} is a link that leads nowhere; repair or remove it.")
                found.append(((below / file).as_posix(), (here / file).stat().st_size))
        return sorted(found)

    def get(self, path: str) -> bytes | None:
        file = self._path(path)
        return file.read_bytes() if file.is_file() else None

    async def get_range(self, path: str, start: int, stop: int) -> bytes:
        """Read at once; a failed read of a local file is not repeated."""
        try:
            with self._path(path).open("rb") as handle:
                handle.seek(start)
                return handle.read(stop - start)
        except FileNotFoundError:
            raise ReadFailed(MISSING, broken=True) from None
        except PermissionError:
            raise ReadFailed("access is denied") from None
        except OSError as error:
            raise ReadFailed(f"the file system says {error.strerror}") from None

    def _path(self, path: str) -> Path:
        return self.root / check_path(path, self.url)


class RemoteStore:
    """An object store or an HTTP server, through `obstore`, which repeats failed requests as `retry` says."""

    far = True

    def __init__(self, url: str, retry: RetryPolicy) -> None:
        self.url, self.retry = url, retry
        self.scheme = url.split("://", 1)[0].lower()
        self._opened: ObjectStore | None = None
        _obstore()

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.url, "retry": self.retry, "scheme": self.scheme, "_opened": None}

    def sizes(self, paths: Sequence[str]) -> list[int | None]:
        return isolated.once(lambda: asyncio.run(self._sizes(paths)))

    def list(self, prefix: str = "") -> list[tuple[str, int]]:
        return isolated.once(lambda: self._list(prefix))

    def get(self, path: str) -> bytes | None:
        return isolated.once(lambda: self._get(path))

    async def get_range(self, path: str, start: int, stop: int) -> bytes:
        store = self._store()
        try:
            return bytes(await store.get_range_async(check_path(path, self.url), start=start, end=stop))
        except Exception as error:
            raise self._failed(error) from None

    async def _sizes(self, paths: Sequence[str]) -> list[int | None]:
        store, slots = self._store(), asyncio.Semaphore(CONCURRENT_HEADS)

        async def size(path: str) -> int:
            async with slots:
                return (await store.head_async(check_path(path, self.url)))["size"]

        found = await asyncio.gather(*(self._asked(functools.partial(size, path)) for path in paths))
        if self.scheme in ("http", "https") and found and found[len(found) // 2]:
            await self._check_ranges(paths[len(found) // 2])
        return found

    async def _check_ranges(self, path: str) -> None:
        """Stop where a web server has whole files only, before a run begins."""
        try:
            await asyncio.wait_for(self.get_range(path, 0, 1), RANGE_SECONDS)
        except TimeoutError:
            return
        except ReadFailed as failed:
            if failed.reason == NO_RANGES:
                raise StoreError(f"{path!r} in {self.url} cannot be read: {NO_RANGES}. {SERVE_RANGES}") from None

    def _list(self, prefix: str) -> list[tuple[str, int]]:
        web = self.scheme in ("http", "https")  # most web servers cannot list, and say so with a status above 500
        store = self._open(replace(self.retry, retries=0)) if web else self._store()
        try:
            metas = store.list(prefix or None).collect()
        except Exception as error:
            failed = self._failed(error)
            if web:
                raise StoreError(
                    f"{self.url} has no {'index.npz'!r} and cannot be listed ({failed.reason}); make the index with "
                    "`salience pack` or `salience pack --index-only` and put it there, or pass index=."
                ) from None
            raise self._refused(failed) from None
        return sorted((meta["path"], meta["size"]) for meta in metas)

    def _get(self, path: str) -> bytes | None:
        """Get an object, first without repetitions: in the first request to a store, missing credentials fail at once."""

        async def whole(store: ObjectStore) -> bytes:
            return bytes(await (await store.get_async(path)).bytes_async())

        try:
            return asyncio.run(self._asked(lambda: whole(self._open(replace(self.retry, retries=0)))))
        except StoreError as error:
            if NO_CREDENTIALS in str(error):
                raise
        return asyncio.run(self._asked(lambda: whole(self._store())))

    async def _asked(self, ask: Callable[[], Awaitable[T]]) -> T | None:
        """The answer; None if the object is missing."""
        try:
            return await asyncio.wait_for(ask(), self.retry.deadline)
        except Exception as error:
            failed = self._failed(error)
        if failed.reason == MISSING:
            return None
        raise self._refused(failed)

    def _store(self) -> ObjectStore:
        """The store of this process, opened on the first request."""
        isolated.use(self.url)  # also where the process that this one was forked from has opened it
        if self._opened is None:
            self._opened = self._open(self.retry)
        return self._opened

    def _open(self, retry: RetryPolicy) -> ObjectStore:
        isolated.use(self.url)
        from obstore.store import from_url

        options: Any = {"retry_config": retry.for_obstore}
        if self.scheme in ("http", "https"):  # a cloud's come from its environment, and would be overridden
            timeout = timedelta(seconds=retry.deadline / 2)
            options["client_options"] = {"allow_http": self.scheme == "http", "timeout": timeout}
        try:
            return from_url(self.url, **options)
        except Exception as error:
            raise self._refused(self._failed(error)) from None

    def _failed(self, error: Exception) -> ReadFailed:
        """The failure in our own words; the store's text is not passed on."""
        if isinstance(error, SalienceError):
            raise error
        text, kind = str(error), type(error).__name__
        status = STATUS_CODE.search(text)
        code = int(status[1]) if status else 0
        if isinstance(error, FileNotFoundError):
            return ReadFailed(MISSING, broken=True)
        if self.scheme in CREDENTIAL_HINTS and CREDENTIAL_ERRORS.search(text):
            return ReadFailed(f"{NO_CREDENTIALS}; {CREDENTIAL_HINTS[self.scheme]}")
        if kind in ("PermissionDeniedError", "UnauthenticatedError") or code in (401, 403):
            return ReadFailed("access is denied; check the credentials in the environment")
        if kind == "NotSupportedError":
            return ReadFailed(NO_RANGES)
        if code == 416 or "Requested " in text:
            return ReadFailed("it ends before the sample does", broken=True)
        if code:
            return ReadFailed(f"the server answers with status {code}")
        if re.search(r"decoding response body|body error|IncompleteMessage|end of file", text):
            return ReadFailed("it is cut off", broken=True)
        if isinstance(error, TimeoutError) or "timed out" in text or "TimedOut" in text:
            return ReadFailed("it took too long")
        return ReadFailed("the connection failed")

    def _refused(self, failed: ReadFailed) -> StoreError:
        return StoreError(f"{self.url} cannot be read: {failed.reason}.")


def _obstore() -> None:
    if importlib.util.find_spec("obstore") is None:
        raise MissingExtra.of("obstore", "feed", "reading from an object store or over HTTP")
