"""A run as a story: the values that hold everything its report shows. `reader` makes them from an event log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from salience.curves import Shorter
from salience.events import (
    BottleneckFound,
    Findings,
    GradientsProbed,
    LeverDecided,
    MachineUse,
    RunStarted,
    SampleBroken,
    Steered,
    StepSeconds,
    TreatCounted,
    WindowClosed,
    WindowPlanned,
    encode,
)
from salience.report.words import class_name

SUSPECTS, HARDEST, GROUPS, MEMBERS = 24, 12, 6, 4
"""Maximum number of suspects, hard samples, groups of copies and members per group shown: 60 pictures at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """One window: its plan, and how it ended."""

    plan: WindowPlanned
    """The plan."""
    end: WindowClosed | None = None
    """How it ended; None if the log ends before that."""

    @property
    def number(self) -> int:
        return self.plan.window

    @property
    def population(self) -> int:
        return self.plan.population

    @property
    def done(self) -> float:
        """Share of the batches that were delivered."""
        return self.end.batches / self.end.of if self.end is not None and self.end.of else 0.0

    @property
    def finished(self) -> bool:
        return self.end is not None and self.end.finished

    @property
    def seconds(self) -> float:
        return 0.0 if self.end is None else self.end.seconds

    @property
    def steps(self) -> StepSeconds | None:
        return None if self.end is None else self.end.steps

    @property
    def visits(self) -> int:
        return round(self.plan.picked * self.done)


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """A validation result; higher is better."""

    window: int
    """Number of windows done."""
    progress: float
    """Progress of the run, from 0 to 1."""
    metric: float
    """The result."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Story:
    """Everything a report shows of one run."""

    name: str
    """Name of the run."""
    started: float
    """Time of the first event, in seconds since 1970."""
    run: RunStarted
    """How the run was started, or resumed last."""
    settings: Mapping[str, Any]
    """Settings of `salience train`; empty for your own loop."""
    preset: str
    """Name of the preset in `select`; empty if it is not a preset, or unknown."""
    classes: tuple[str, ...] | None
    """Names of the classes."""
    windows: tuple[Window, ...]
    """All windows in order; of one that was done twice, the last."""
    evaluations: tuple[Result, ...]
    """All validation results in order."""
    seconds: float
    """Seconds of all windows, evaluation not included."""
    overhead: Mapping[str, float]
    """Seconds salience took for itself, by part."""
    feed: Mapping[str, float]
    """Counts of the store and, as `cache_...`, of the cache."""
    findings: Findings | None
    """What was found out about the samples."""
    forecast: Mapping[str, float] | None
    """What selection would have saved, where the run only observed and a report was asked for."""
    shorter: Shorter | None
    """What a run with as many visits on all data would have lost; None where this one selected."""
    treated: TreatCounted | None
    """What was done with the stages of augmentation."""
    asides: tuple[str, ...]
    """What else was done beside the training."""
    steered: tuple[Steered, ...]
    """Changes of the share that is kept."""
    probes: tuple[GradientsProbed, ...]
    """What was found of gradients near zero, each time they were probed."""
    bottlenecks: tuple[BottleneckFound, ...]
    """What held the run back, each time it was measured."""
    auto: bool
    """True if `auto` was on."""
    decisions: tuple[LeverDecided, ...]
    """What `auto` did about it."""
    broken: tuple[SampleBroken, ...]
    """Samples that could not be read, each once."""
    warnings: tuple[tuple[str, int], ...]
    """Each warning, and how often it was given."""
    notes: tuple[str, ...]
    """Remarks on oddities of the log, and on what is missing from its folder."""
    files: Mapping[int, str] = field(default_factory=dict[int, str])
    """Names of the samples shown."""

    @property
    def visits(self) -> int:
        return sum(window.visits for window in self.windows)

    @property
    def population(self) -> int:
        """Number of samples in the data set; 0 if nothing was planned."""
        return max((window.population for window in self.windows), default=0)

    @property
    def batches(self) -> int:
        """Batches of the windows that are over."""
        return sum(window.end.batches for window in self.windows if window.end is not None)

    @property
    def full(self) -> int:
        """Visits that all data would have needed over the same windows."""
        if not self.selects:
            return self.visits
        return round(sum(window.population * window.done for window in self.windows) / self.pieces)

    @property
    def pieces(self) -> int:
        """Windows per epoch."""
        return max(1, self.run.pieces)

    @property
    def done(self) -> int:
        """Number of epochs that are over."""
        return sum(window.finished for window in self.windows) // self.pieces

    @property
    def unit(self) -> str:
        """What a window is to the reader."""
        return "epoch" if self.pieces == 1 else "window"

    @property
    def share(self) -> float:
        return self.visits / self.full if self.full else 1.0

    @property
    def waiting(self) -> float | None:
        """Share of the time of the steps that the loop waited for batches; None if it was not measured."""
        spent = [window.steps for window in self.windows if window.steps is not None]
        total = sum(one.wait + one.copy + one.forward + one.backward for one in spent)
        return sum(one.wait for one in spent) / total if total > 0 else None

    @property
    def usage(self) -> tuple[MachineUse, ...]:
        """How busy the machine was over the windows; if they do not say, as the last profile measured it."""
        found: list[MachineUse] = []
        for window in self.windows:
            used = () if window.end is None else window.end.usage
            # A resumed process counts its seconds from 0 again.
            before = found[-1].seconds if found and used and used[0].seconds < found[-1].seconds else 0.0
            found += [replace(one, seconds=one.seconds + before) for one in used]
        return tuple(found) or next((one.usage for one in reversed(self.bottlenecks) if one.usage), ())

    @property
    def work(self) -> dict[str, float]:
        """Seconds of the workers, by stage."""
        found: Counter[str] = Counter()
        for window in self.windows:
            found.update({} if window.steps is None else dict(window.steps.work))  # pyright: ignore[reportArgumentType]
        return dict(found)

    @property
    def selects(self) -> bool:
        """True if the run was told to select, or `auto` did."""
        if self.recorded:
            return False
        return self.run.select != "observe" or (self.auto and any(w.plan.picked < w.population for w in self.windows))

    @property
    def recorded(self) -> bool:
        """True if an Observer recorded what the loop drew itself."""
        return self.run.select == "recorded"

    @property
    def epochs(self) -> int:
        """Planned number of epochs; the number in the log if it was not given."""
        return max(1, len(self.windows) // self.pieces if self.run.epochs is None else self.run.epochs)

    @property
    def arm(self) -> str:
        """`select` in a word: the name of the preset or of the file, or 'custom'."""
        given = str(self.settings.get("select") or "")
        if given:
            return Path(given).name
        return self.run.select if isinstance(self.run.select, str) else self.preset or "custom"

    @property
    def metric(self) -> float | None:
        return self.evaluations[-1].metric if self.evaluations else None

    @property
    def best(self) -> float | None:
        return max((one.metric for one in self.evaluations), default=None)

    @property
    def in_shares(self) -> bool:
        """True if every validation result is a share from 0 to 1."""
        return all(0 <= one.metric <= 1 for one in self.evaluations)

    @property
    def measure(self) -> str:
        """Name of the validation result."""
        return "accuracy" if self.settings else "metric"

    @property
    def own(self) -> float:
        """Salience's own share of the seconds."""
        return sum(self.overhead.values()) / self.seconds if self.seconds else 0.0

    @property
    def all_settings(self) -> dict[str, Any]:
        return {**self.settings, **encode(self.run)}

    def class_name(self, label: int) -> str:
        return class_name(label, self.classes)


def shown(story: Story) -> list[int]:
    """Samples that the report shows individually, the most informative first; at most 60."""
    found = story.findings
    if found is None:
        return []
    ids = [one.id for one in found.suspects[:SUSPECTS]] + [one.id for one in found.hard[:HARDEST]]
    ids += [i for group in found.copies[:GROUPS] for i in group.members[:MEMBERS]]
    return list(dict.fromkeys(ids))
