"""The configuration of a feed, as passed to its process: JSON, no code."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from salience.errors import ConfigError
from salience.feed.sharing.demand import PACE_RATIO


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedConfig:
    """What a feed reads, and how much memory it may use."""

    name: str
    url: str
    index: str
    """Path of its index."""
    budget: int
    """Bytes for samples that will be needed again."""
    capacity: int
    """Bytes of memory, including what is read ahead."""
    disk: str | None = None
    redis: str | None = None
    retries: int = 8
    deadline: float = 60.0
    concurrency: int = 32
    linger: float | None = 60.0
    """Seconds that it keeps running without a job; None = until it is stopped."""
    patience: float = 5.0
    """Seconds per window for which a job is held up for slower ones with the same plan."""
    pace_ratio: float = PACE_RATIO
    """Times as long per batch as the fastest of a group from which on a job is not waited for."""

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> FeedConfig:
        try:
            return cls(**json.loads(text))
        except (TypeError, ValueError) as cause:
            raise ConfigError(f"This is not the configuration of a feed ({cause}).") from cause
