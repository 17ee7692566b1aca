"""A run as a story: the values that hold everything its report shows. `telling` makes them from the event log."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from salience.report.known import Known
from salience.report.log import number
from salience.select import PRESETS, preset
from salience.select.enough import Shorter
from salience.select.findings import Findings, class_name

SUSPECTS, HARDEST, GROUPS, MEMBERS = 24, 12, 6, 4
"""Samples of each kind that are shown, and of every group of copies: 60 pictures at the most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """What a filter did in one window."""

    name: str
    dropped: int
    forced: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Spent:
    """Where the seconds of a window's steps went."""

    wait: float
    copy: float
    forward: float
    backward: float
    work: Mapping[str, float]
    """Of the workers, by stage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """One window as planned and as far as it was done."""

    number: int
    picked: int
    population: int
    notes: tuple[Note, ...] = ()
    batches: int = 0
    of: int = 0
    finished: bool = False
    seconds: float = 0.0
    spent: Spent | None = None
    by_importance: tuple[float, ...] = ()
    """Share of the samples that was picked, by tenths of importance."""

    @property
    def done(self) -> float:
        return self.batches / self.of if self.of else 0.0

    @property
    def visits(self) -> int:
        return round(self.picked * self.done)


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """A validation result; higher is better."""

    window: int
    progress: float
    metric: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Steered:
    """A decision: the share that is kept, moved by validation results."""

    window: int
    before: float
    after: float
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """What held the run back, as it was measured."""

    window: int
    text: str
    levers: tuple[tuple[str, bool, float, float, float], ...]
    """(name, whether it leaves the run as it is, speed-up at most, and its bracket)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decided:
    """What `auto` did about it."""

    window: int
    lever: str
    action: str
    predicted: float | None
    measured: float | None
    interval: tuple[float, float] | None
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Broken:
    """A sample that could not be read or decoded."""

    id: int
    name: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Treated:
    """What was done with the stages of augmentation."""

    treatment: str
    costs: Mapping[str, float]
    """Microseconds a call, by stage."""
    visits: int
    reused: int
    """Visits that took up an intermediate."""
    saved: float
    """Seconds of workers' time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Story:
    """Everything a report shows of one run."""

    name: str
    started: float
    """Seconds since 1970 of the first event."""
    run: Mapping[str, Any]
    """The `run` event."""
    settings: Mapping[str, Any]
    """Those of `salience train`; empty for a loop of one's own."""
    classes: tuple[str, ...] | None
    windows: tuple[Window, ...]
    evaluations: tuple[Evaluation, ...]
    seconds: float
    """Of all windows, evaluation not included,"""
    overhead: Mapping[str, float]
    """and what salience took of them, by part."""
    feed: Mapping[str, int]
    """Counts of the store and, as `cache_...`, of the cache."""
    findings: Findings | None
    known: Known | None
    forecast: Mapping[str, float] | None
    """What selection would have saved, where the run only observed."""
    shorter: Shorter | None
    """What a run with as many visits on all data would have lost; None where this one selected."""
    treated: Treated | None
    asides: tuple[str, ...]
    """What else was done beside the training."""
    steered: tuple[Steered, ...]
    held: tuple[Held, ...]
    decided: tuple[Decided, ...]
    broken: tuple[Broken, ...]
    warnings: tuple[tuple[str, int], ...]
    """Each text, and how often it came."""
    notes: tuple[str, ...]
    """What is odd about the log or missing beside it."""
    files: Mapping[int, str] = field(default_factory=dict[int, str])
    """Names of the samples shown."""

    @property
    def visits(self) -> int:
        return sum(window.visits for window in self.windows)

    @property
    def full(self) -> int:
        """Visits that all data would have taken over the same windows."""
        return round(sum(window.population * window.done for window in self.windows))

    @property
    def share(self) -> float:
        return self.visits / self.full if self.full else 1.0

    @property
    def waiting(self) -> float | None:
        """Share of the steps' time that the loop waited for batches; None where it was not measured."""
        spent = [window.spent for window in self.windows if window.spent is not None]
        total = sum(one.wait + one.copy + one.forward + one.backward for one in spent)
        return sum(one.wait for one in spent) / total if total > 0 else None

    @property
    def work(self) -> dict[str, float]:
        """Seconds of the workers, by stage."""
        found: dict[str, float] = {}
        for window in self.windows:
            for name, spent in () if window.spent is None else window.spent.work.items():
                found[name] = found.get(name, 0.0) + spent
        return found

    @property
    def selects(self) -> bool:
        """Whether the run was told to, or `auto` did."""
        return self.run.get("select", "observe") != "observe" or any(w.picked < w.population for w in self.windows)

    @property
    def epochs(self) -> int:
        """Epochs the run was to have; those in the log where it was not told."""
        return max(1, int(number(self.run.get("epochs"), len(self.windows))))

    @property
    def arm(self) -> str:
        """What `select` was, in a word: the preset's name, or the file's, or 'custom'."""
        given = str(self.settings.get("select") or "")
        if given:
            return Path(given).name
        select = self.run.get("select", "observe")
        if isinstance(select, str):
            return select
        same = json.dumps(select, sort_keys=True)
        presets = {json.dumps(preset(name).to_dict(), sort_keys=True): name for name in PRESETS}
        return presets.get(same, "custom")

    @property
    def metric(self) -> float | None:
        return self.evaluations[-1].metric if self.evaluations else None

    @property
    def best(self) -> float | None:
        return max((one.metric for one in self.evaluations), default=None)

    @property
    def measure(self) -> str:
        """What the validation result is called."""
        return "accuracy" if self.settings else "metric"

    @property
    def own(self) -> float:
        """Salience's own share of the seconds."""
        return sum(self.overhead.values()) / self.seconds if self.seconds else 0.0

    @property
    def seed(self) -> int:
        return int(number(self.run.get("seed"), 0))

    def class_name(self, label: int) -> str:
        return class_name(label, self.classes)


def shown(story: Story) -> list[int]:
    """Samples that the report shows one by one, the most telling first; at most 60."""
    found = story.findings
    if found is None:
        return []
    ids = [one.id for one in found.suspects[:SUSPECTS]] + [one.id for one in found.hard[:HARDEST]]
    ids += [i for group in found.copies[:GROUPS] for i in group.members[:MEMBERS]]
    return list(dict.fromkeys(ids))
