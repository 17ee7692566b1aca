"""The terms on which a feed runs, as they are handed to its process: JSON, no code."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from salience.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """What a feed reads, and how much memory it may use."""

    name: str
    url: str
    index: str
    """Path of its index."""
    budget: int
    """Bytes for samples that will be wanted again."""
    capacity: int
    """Bytes of memory, what is read ahead included."""
    disk: str | None = None
    redis: str | None = None
    retries: int = 8
    deadline: float = 60.0
    concurrency: int = 32
    linger: float | None = 60.0
    """Seconds that it stays when no job is there; None = until it is stopped."""
    patience: float = 5.0
    """Seconds per window that a job is held for slower ones with the same plan."""

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> Terms:
        try:
            return cls(**json.loads(text))
        except (TypeError, ValueError) as cause:
            raise ConfigError(f"These are no terms of a feed ({cause}).") from cause
