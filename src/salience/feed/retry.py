"""When a request to a store is repeated, hedged or given up. obstore repeats requests, the reader hedges them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from salience.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """How persistently a store is asked."""

    retries: int = 8
    """How often a failed request is repeated."""
    deadline: float = 60.0
    """Seconds for one request with all its repetitions; a single attempt may take half of them."""
    first_pause: float = 0.1
    """Seconds before the first repetition; later pauses grow exponentially, with jitter."""
    longest_pause: float = 5.0
    """The longest pause between two repetitions, in seconds."""
    hedge_after: float = 4.0
    """A request is slow if it takes this many times the running median."""
    hedge_least: float = 0.05
    """No request is called slow before this many seconds."""
    hedge_share: float = 0.05
    """The share of all requests that may be hedged."""

    def __post_init__(self) -> None:
        if self.retries < 0:
            raise ConfigError(f"retries is {self.retries}; it must be at least 0.")
        if not self.deadline > 0:
            raise ConfigError(f"deadline is {self.deadline} seconds; it must be above 0.")

    @property
    def for_obstore(self) -> dict[str, Any]:
        """This policy as obstore's RetryConfig: server errors, lost connections, cut answers and timeouts are repeated."""
        return {
            "max_retries": self.retries,
            "retry_timeout": timedelta(seconds=self.deadline),
            "backoff": {
                "init_backoff": timedelta(seconds=self.first_pause),
                "max_backoff": timedelta(seconds=self.longest_pause),
                "base": 3,  # with its jitter, a pause is about 1.5 times the one before
            },
        }


def hedge_delay(size: int, median_seconds: float, median_size: float, policy: RetryPolicy) -> float:
    """Seconds to wait for `size` bytes before a second request: hedge_after * median, longer for more bytes than usual."""
    return max(policy.hedge_least, policy.hedge_after * median_seconds * max(1.0, size / max(median_size, 1)))


def may_hedge(hedged: int, requests: int, policy: RetryPolicy) -> bool:
    """True if another request may be hedged: hedged ones stay within their share, and the first is always allowed.

    Dean and Barroso, "The tail at scale", 2013.
    """
    return hedged < max(1.0, policy.hedge_share * requests)
