"""How a store is asked: when to repeat a request, when to double it, which samples come with one. Pure functions."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from salience.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """How a store is asked."""

    retries: int = 8
    """Times a failed request is repeated."""
    deadline: float = 60.0
    """Seconds for one request with all its repetitions; half of them for a single one."""
    concurrency: int = 32
    """Requests at the same time, in each process."""
    first_pause: float = 0.1
    longest_pause: float = 5.0
    hedge_after: float = 4.0
    """A second request is sent when the first takes this many times the running median..."""
    hedge_least: float = 0.05
    """...and at least these seconds..."""
    hedge_share: float = 0.05
    """...while such requests are at most this share of all."""
    gap: int = 64 * 1024
    """Bytes between two samples of a shard that are read rather than asked for apart."""
    longest: int = 8 * 1024 * 1024
    """Bytes of one request for several samples."""

    def __post_init__(self) -> None:
        for name, least in (("retries", 0), ("concurrency", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least {least}.")
        if not self.deadline > 0:
            raise ConfigError(f"deadline is {self.deadline} seconds; it must be above 0.")


def backoff(attempt: int, seed: str, terms: Terms) -> float:
    """Seconds before repetition `attempt` = 0, 1, ...: u * min(longest, first * 2^attempt), u uniform in [0, 1).

    Full jitter (Brooker, "Exponential backoff and jitter", 2015). u depends on the request alone, so runs repeat.
    """
    return random.Random(f"{seed}:{attempt}").random() * min(terms.longest_pause, terms.first_pause * 2**attempt)


def patience(size: int, median_seconds: float, median_size: float, terms: Terms) -> float:
    """Seconds to wait for `size` bytes before asking twice: hedge_after * median, more for more bytes than usual."""
    return max(terms.hedge_least, terms.hedge_after * median_seconds * max(1.0, size / max(median_size, 1)))


def should_hedge(waited: float, limit: float, *, hedged: int, requests: int, share: float) -> bool:
    """Whether to ask twice: the wait is over `limit` and doubled requests stay within their share (one is always free).

    Dean and Barroso, "The tail at scale", 2013.
    """
    return waited >= limit and hedged < max(1.0, share * requests)


def coalesce(starts: Sequence[int], stops: Sequence[int], *, gap: int, longest: int) -> list[slice]:
    """Runs of ranges (sorted by start) that one request each can bring: holes <= gap, a run <= longest bytes."""
    runs: list[slice] = []
    first = 0
    for i in range(1, len(starts) + 1):
        if i == len(starts) or starts[i] - stops[i - 1] > gap or stops[i] - starts[first] > longest:
            runs.append(slice(first, i))
            first = i
    return runs
