"""The Redis tier: a Redis or Valkey server in whose memory several nodes share the samples they have read."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from salience.errors import ConfigError, MissingExtra, did_you_mean
from salience.feed.tiers import SEAL_BYTES, TierCounts, TierTally, Warn, fits, seal

SCHEMES = ("redis", "rediss")
PASSWORDS = ("SALIENCE_REDIS_PASSWORD", "REDIS_PASSWORD")
"""Environment variables that may hold the password if the URL has none; the first that is set is used."""
MAX_VALUE_BYTES = 512 * 1024 * 1024
"""The largest value that Redis accepts by default."""
REQUEST_BYTES, REQUEST_KEYS = 8 * 1024 * 1024, 256
"""Maximum bytes and keys per request."""
_EXAMPLE = "write for example redis://host:6379/0, or rediss:// for TLS"


def open_redis(url: str, source: str, sizes: npt.NDArray[np.int64], warn: Warn) -> RedisTier:
    """The tier at `url`. A server that refuses the password or cannot be trusted is an error; one that is away is not.

    `source` is the identity of the source. Messages contain only the host, port and database number of the URL.
    """
    check_redis_url(url)
    tier = RedisTier(url, source, sizes, warn)
    tier.open()
    return tier


def check_redis_url(url: str) -> None:
    """Raise ConfigError unless `url` names a Redis server. The URL may hold a password, so the message leaves it out."""
    scheme, mark, _ = url.partition("://")
    if not mark or scheme not in SCHEMES:
        known = did_you_mean(scheme, SCHEMES) if mark else ""
        raise ConfigError(f"redis is not the URL of a Redis server; {_EXAMPLE}.{known}")


def parts(sizes: Sequence[int], *, most: int = REQUEST_BYTES, keys: int = REQUEST_KEYS) -> list[slice]:
    """Slices of values for one request each: at most `keys` values, and at most `most` bytes unless it is a single value."""
    runs: list[slice] = []
    first = total = 0
    for k, size in enumerate(sizes):
        if k > first and (k - first == keys or total + size > most):
            runs.append(slice(first, k))
            first, total = k, 0
        total += size
    return [*runs, slice(first, len(sizes))] if sizes else []


class Pause:
    """A circuit breaker: after a failure, no thread asks for `seconds`; then one tries, and others follow if it succeeds."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._until = seconds, 0.0
        self._lock = threading.Lock()

    def over(self) -> bool:
        """True if this thread may ask."""
        with self._lock:
            now = time.monotonic()
            if self._until and now < self._until:
                return False
            if self._until:
                self._until = now + self._seconds
            return True

    def begin(self) -> None:
        """A request failed."""
        with self._lock:
            self._until = time.monotonic() + self._seconds

    def end(self) -> None:
        """A request succeeded."""
        with self._lock:
            self._until = 0.0


class RedisTier:
    """Samples under the keys salience:<source>:<id>, each behind its checksum; the server decides what it evicts.

    A server that is gone, or slower than `timeout` seconds, is not asked for `pause` seconds. A server that is out of memory
    is still read from. Keys have no expiry and outlive the run.
    """

    name = "redis"

    def __init__(
        self,
        url: str,
        source: str,
        sizes: npt.NDArray[np.int64],
        warn: Warn,
        *,
        timeout: float = 3.0,
        pause: float = 30.0,
    ) -> None:
        self._source, self._sizes, self._warn = source, sizes, warn
        self._timeout, self._pause = timeout, pause
        self._tally, self._lock = TierTally(), threading.Lock()
        self._away, self._full = Pause(pause), Pause(pause)
        self._said: set[str] = set()
        self._client, self._place = _client(url, timeout)

    @property
    def counts(self) -> TierCounts:
        return self._tally.counts

    def open(self) -> None:
        from redis import exceptions

        try:
            self._client.ping()
        except (exceptions.AuthenticationError, exceptions.NoPermissionError):
            raise ConfigError(
                f"The Redis at {self._place} refuses the user or password; they come from the URL, the password also from "
                f"{' or '.join(PASSWORDS)} in the environment."
            ) from None
        except exceptions.ResponseError:
            raise ConfigError(
                f"The Redis at {self._place} refuses to be used; see that it has this database and lets this machine in."
            ) from None
        except (TypeError, ValueError):  # the connection takes the options of the URL as they are
            raise ConfigError("The URL of redis has an option that the redis package does not know.") from None
        except (exceptions.RedisError, OSError) as error:
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                raise ConfigError(
                    f"The certificate of the Redis at {self._place} is not trusted; name the file of its authority with "
                    "?ssl_ca_certs=FILE at the end of the URL."
                ) from None
            self._lost(error)

    def get(self, ids: Sequence[int]) -> dict[int, bytes]:
        from redis import exceptions

        found: dict[int, bytes] = {}
        bad: list[int] = []
        sizes: list[int] = self._sizes[np.asarray(ids, dtype=np.int64)].tolist()
        try:
            for part in parts(sizes):
                if not self._away.over():
                    break
                values: list[bytes | None] = self._client.mget([self._key(i) for i in ids[part]])
                for i, value in zip(ids[part], values, strict=True):
                    if value is None:
                        continue
                    data = value[SEAL_BYTES:]
                    right = fits(value[:SEAL_BYTES], data)
                    if right:
                        found[i] = data
                    elif right is False:
                        bad.append(i)
                self._away.end()
            if bad:  # or the right bytes would never be stored
                self._client.delete(*map(self._key, bad))
        except (exceptions.RedisError, OSError) as error:
            self._lost(error)
        self._tally.add(asked=len(ids), hits=len(found), hit_bytes=sum(map(len, found.values())), bad=len(bad))
        return found

    def put(self, found: Mapping[int, bytes]) -> None:
        from redis import exceptions

        writes = written = there = 0
        allowed = [(i, data) for i, data in found.items() if len(data) + SEAL_BYTES <= MAX_VALUE_BYTES]
        try:
            for part in parts([len(data) for _, data in allowed]):
                if not (self._full.over() and self._away.over()):
                    break
                with self._client.pipeline(transaction=False) as pipe:
                    for i, data in allowed[part]:
                        pipe.set(self._key(i), seal(data) + data, nx=True)
                    answers: list[Any] = pipe.execute(raise_on_error=False)
                self._away.end()
                for (_, data), answer in zip(allowed[part], answers, strict=True):
                    writes += answer is True
                    written += len(data) if answer is True else 0
                    there += answer is None
                refusals = [answer for answer in answers if isinstance(answer, Exception)]
                if refusals:
                    self._refused(refusals[0])
                else:
                    self._full.end()
        except (exceptions.RedisError, OSError) as error:
            self._lost(error)
        self._tally.add(writes=writes, written_bytes=written, refused=len(found) - there - writes)

    def close(self) -> None:
        self._client.close()

    def _key(self, i: int) -> str:
        return f"salience:{self._source}:{i}"

    def _lost(self, error: Exception) -> None:
        self._away.begin()
        self._say(
            "lost",
            f"The Redis at {self._place} is not used for now ({_reason(error, self._timeout)}); samples come from the store, "
            f"and it is asked again every {self._pause:g} s.",
        )

    def _refused(self, error: Exception) -> None:
        self._full.begin()
        self._say(
            "full",
            f"The Redis at {self._place} takes no more samples ({_reason(error, self._timeout)}); it is read from, and offered "
            f"more every {self._pause:g} s.",
        )

    def _say(self, what: str, text: str) -> None:
        """Warn once per run, however often it happens."""
        with self._lock:
            new = what not in self._said
            self._said.add(what)
        if new:
            self._warn(text)


def _client(url: str, timeout: float) -> tuple[Any, str]:
    """The client, and its address in a form that is safe to show; no connection is made."""
    try:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError:
        raise MissingExtra.of("redis", "redis", "A cache in Redis") from None
    options: dict[str, Any] = {"ssl_check_hostname": True} if url.startswith("rediss:") else {}
    password = next((os.environ[name] for name in PASSWORDS if os.environ.get(name)), None)
    try:
        client: Any = redis.Redis.from_url(
            url,
            password=password,  # a password in the URL takes precedence
            protocol=2,
            socket_timeout=timeout,
            socket_connect_timeout=timeout,
            retry=Retry(NoBackoff(), 0),  # Pause decides when to ask again
            **options,
        )
    except ValueError:
        raise ConfigError(
            f"The URL of redis cannot be read; {_EXAMPLE}. A password with special characters goes into {PASSWORDS[0]}."
        ) from None
    told = client.connection_pool.connection_kwargs
    for option in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"):
        if option in told and not os.path.isfile(told[option]):
            raise ConfigError(f"The URL of redis names a file as {option} that is not there.")
    return client, f"{told.get('host', 'localhost')}:{told.get('port', 6379)}/{told.get('db') or 0}"


def _reason(error: Exception, timeout: float) -> str:
    """The reason in our words; the server's own text is not passed on."""
    from redis import exceptions

    if isinstance(error, exceptions.TimeoutError):
        return f"no answer within {timeout:g} s"
    if isinstance(error, exceptions.AuthenticationError):
        return "it refuses the password"
    if isinstance(error, exceptions.OutOfMemoryError):
        return "it is out of memory"
    if isinstance(error, exceptions.ReadOnlyError):
        return "it may only be read"
    if isinstance(error, exceptions.BusyLoadingError):
        return "it is still loading"
    return "no connection" if isinstance(error, (exceptions.ConnectionError, OSError)) else type(error).__name__
