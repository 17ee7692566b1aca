"""keep = "auto": the share in the middle of a run, moved one notch at a time by comparing validation results with a baseline.

    evaluated(metric)  ->  inside the baseline's band at equal progress?  yes, twice in a row: keep less;  no: keep more

Without a baseline there is nothing to compare a metric with, and the share does not move.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from salience import events
from salience.curves import MIN_SPREAD, History, own_noise
from salience.errors import ConfigError

KEEP_SHARES = (1.0, 0.8, 0.65, 0.5, 0.4, 0.33, 0.25)
BAND_WIDTH = 2.0
"""The lower end of the band is this many spreads below the baseline's mean; a metric above the mean is always inside."""
RESULTS_BEFORE_LESS = 2
"""The share falls after this many results in a row inside the band; a single result outside raises it."""

Paths = str | Path | Sequence[str | Path]


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """The metric of the baseline at some progress."""

    mean: float
    spread: float

    @property
    def low(self) -> float:
        return self.mean - BAND_WIDTH * self.spread


def read_histories(paths: Paths) -> list[History]:
    """Read the `evaluated` events of each log (or run folder with one)."""
    return [_read(Path(path)) for path in ([paths] if isinstance(paths, (str, Path)) else paths)]


def _read(path: Path) -> History:
    path = path / "run.jsonl" if path.is_dir() else path
    found: list[tuple[float, float]] = []
    try:
        for event in events.read(path):
            if event["kind"] == "evaluated" and event.get("metric") is not None:
                at = float(event["progress"])
                found = [one for one in found if one[0] < at]  # a resumed run does some of it again
                found.append((at, float(event["metric"])))
    except OSError as cause:
        raise ConfigError(f"The baseline {str(path)!r} cannot be read: {cause.strerror}.") from cause
    if len(found) < 2:
        raise ConfigError(
            f"The baseline {str(path)!r} has {len(found)} validation results at different progress; it needs two: run it "
            "with epochs=, log= and loader.evaluated(metric)."
        )
    progress, metric = np.array(found).T
    return History(progress=progress, metric=metric)


def band(histories: Sequence[History], progress: float) -> Band | None:
    """Mean and spread of the baseline's metric at this progress, interpolated; None if the baseline begins later.

    The spread is the standard deviation between runs; for a single run, that of its own noise. It is at least MIN_SPREAD.
    """
    there = [h for h in histories if h.progress[0] <= progress]
    if not there:
        return None
    at = [float(np.interp(progress, h.progress, h.metric)) for h in there]
    spread = float(np.std(at, ddof=1)) if len(at) > 1 else own_noise(there[0])
    floor = MIN_SPREAD * max(float(np.abs(h.metric).max()) for h in there)
    return Band(mean=float(np.mean(at)), spread=max(spread, floor))


def less(share: float) -> float:
    """The next lower notch; the lowest one stays."""
    return max((notch for notch in KEEP_SHARES if notch < share), default=share)


def more(share: float) -> float:
    """The next higher notch; a share of 1 stays."""
    return min((notch for notch in KEEP_SHARES if notch > share), default=share)


class Steering:
    """The current share, and the validation result to act on next."""

    def __init__(self, share: float, histories: Sequence[History]) -> None:
        self.histories = histories
        self.share = share
        self._inside = 0
        """Number of results in a row inside the band."""
        self._result: tuple[float, float] | None = None

    def evaluated(self, metric: float, progress: float) -> None:
        """Note a result; if there are several in one window, the last one counts."""
        self._result = (metric, progress)

    def move(self) -> dict[str, Any] | None:
        """Act on the result, if there is one; returns the fields of an event if the share moved."""
        result, self._result = self._result, None
        found = None if result is None else band(self.histories, result[1])
        if result is None or found is None:
            return None
        metric, progress = result
        before = self.share
        inside = metric >= found.low
        self._inside = self._inside + 1 if inside else 0
        if not inside:
            self.share, reason = more(before), f"under the band of the baseline, {found.low:.4g} and up"
        elif self._inside >= RESULTS_BEFORE_LESS:
            self.share = less(before)
            reason = f"{RESULTS_BEFORE_LESS} results in the band of the baseline, {found.low:.4g} and up"
        else:
            return None
        self._inside = 0
        if self.share == before:
            return None
        return {
            "metric": metric, "progress": progress, "mean": found.mean, "spread": found.spread, "low": found.low,
            "from": before, "to": self.share, "reason": reason,
        }  # fmt: skip

    @property
    def numbers(self) -> tuple[float, float]:
        """The numbers that all ranks must agree on."""
        return self.share, float(self._inside)

    @numbers.setter
    def numbers(self, numbers: tuple[float, float]) -> None:
        self.share, self._inside = float(numbers[0]), int(numbers[1])

    def state_dict(self) -> dict[str, Any]:
        return {"numbers": list(self.numbers), "result": None if self._result is None else list(self._result)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        share, inside = state["numbers"]
        self.numbers = (share, inside)
        self._result = None if state["result"] is None else (float(state["result"][0]), float(state["result"][1]))
