"""The stopwatch that every part reports its own seconds to."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager


class Stopwatch:
    """Seconds by name, added up: `with watch("plan"): ...`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Generator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - begin)

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    @property
    def total(self) -> float:
        return sum(self.seconds.values())
