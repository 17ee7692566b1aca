"""Reads an event log into a story; lines that cannot be understood are skipped, counted and mentioned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from salience._version import __version__
from salience.curves import Shorter, shorter
from salience.errors import StateError
from salience.events import (
    BottleneckFound,
    Evaluated,
    Event,
    Fault,
    FeedCounted,
    Findings,
    GradientsProbed,
    LeverDecided,
    NoiseMeasured,
    RunStarted,
    SampleBroken,
    SamplesScored,
    SettingsChanged,
    SignalsChosen,
    Steered,
    Summarised,
    TreatCounted,
    Warned,
    WindowClosed,
    WindowPlanned,
    encode,
    scan,
)
from salience.report.story import Result, Story, Window
from salience.report.words import count

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Log:
    """The events of one log, and the lines that are not events."""

    events: tuple[Event, ...]
    faults: tuple[Fault, ...] = ()
    cut: bool = False
    """True if the last line is torn, as by a crash."""


def read_log(path: Path) -> Log:
    """All events of a log that can be read; `events.read` stops at newer ones. If there are none, the error says what to do."""
    try:
        lines = list(scan(path))
        whole = path.read_bytes().endswith(b"\n")
    except FileNotFoundError as cause:
        raise StateError(f"There is no event log at {str(path)!r}; a run writes one when given log=.") from cause
    except OSError as cause:
        raise StateError(f"The event log {str(path)!r} cannot be read: {cause.strerror}.") from cause
    events = tuple(line for line in lines if isinstance(line, Event))
    faults = tuple(line for line in lines if isinstance(line, Fault))
    if not events:
        why = "is empty: the run has not begun, or its log is another file"
        if any(one.why == "newer" for one in faults):
            why = "was written by a newer salience; upgrade salience to read it"
        elif faults:
            why = "is not an event log of salience; name the run's folder, or the file given as log="
        raise StateError(f"{str(path)!r} {why}.")
    return Log(events=events, faults=faults, cut=not whole and isinstance(lines[-1], Fault) and lines[-1].why == "torn")


def story_of(
    log: Log,
    *,
    name: str,
    settings: Mapping[str, Any] | None = None,
    classes: Sequence[str] | None = None,
    preset: str = "",
    notes: Iterable[str] = (),
) -> Story:
    """The story of the last run in a log; settings, names of classes and the preset are not in the log."""
    parts, again = _parts(log.events)
    events = [event.data for part in parts for event in part]

    def every(kind: type[T]) -> list[T]:
        return [one for one in events if isinstance(one, kind)]

    ends = every(WindowClosed)
    runs, windows = every(RunStarted), _windows(every(WindowPlanned), ends)
    story = Story(
        name=name,
        started=log.events[0].time,
        run=replace(runs[-1], knowledge=runs[0].knowledge) if runs else RunStarted(),
        settings=dict(settings or {}),
        preset=preset,
        classes=None if classes is None else tuple(classes),
        windows=windows,
        evaluations=_evaluations(parts),
        seconds=sum(end.seconds for end in ends),
        overhead=_added(parts, WindowClosed, lambda end: end.overhead),
        feed=_added(parts, FeedCounted, _feed),
        findings=next(iter(reversed(every(Findings))), None),
        forecast=next((one for data in reversed(every(Summarised)) if (one := _forecast(data))), None),
        shorter=None,
        treated=next(iter(reversed(every(TreatCounted))), None),
        asides=(
            *dict.fromkeys(one.text for one in every(SignalsChosen)),
            *_scored(every(SamplesScored)),
            *_knowledge(runs),
            *_noise(every(NoiseMeasured)),
        ),
        steered=tuple(every(Steered)),
        probes=tuple(every(GradientsProbed)),
        bottlenecks=tuple(every(BottleneckFound)),
        auto=bool(every(SettingsChanged)),
        decisions=tuple(every(LeverDecided)),
        broken=tuple({one.id: one for one in reversed(every(SampleBroken))}.values())[::-1],
        warnings=tuple(Counter(one.text for one in every(Warned)).items()),
        notes=(*_oddities(log, runs, windows, len(parts) - 1, again), *notes, *_left_out(log)),
    )
    return replace(story, shorter=_shorter(story))


def _noise(measured: Sequence[NoiseMeasured]) -> list[str]:
    """The gradient noise scale over the run, in a sentence."""
    known = [one for one in measured if one.scale is not None]
    if not known:
        return ["The gradient noise hid the gradient: its scale is not known."] if measured else []
    picked = known if len(known) <= 5 else [known[i * (len(known) - 1) // 4] for i in range(5)]
    course = ", ".join(f"{one.scale:,.0f} (window {one.window})" for one in picked)
    caveat = next((one.caveat for one in reversed(known) if one.caveat), "")
    return [
        f"The gradient noise scale was {course} samples, with steps of {known[-1].big:,.0f}: far larger steps would save "
        f"fewer steps than they cost samples{f'; {caveat}' if caveat else ''}."
    ]


def _parts(events: Sequence[Event]) -> tuple[list[list[Event]], int]:
    """The events of the last run by process, and the number of runs before it.

    Each process begins with a `run` event. One that plans window 0 again starts a new run; any other continues where the
    previous one was stopped.
    """
    parts: list[list[Event]] = [[]]
    for event in events:
        if event.kind == "run" and any(one.kind in ("run", "plan") for one in parts[-1]):
            parts.append([])
        parts[-1].append(event)
    fresh = [0] + [i for i, part in enumerate(parts) if i and _first_window(part) == 0]
    return parts[fresh[-1] :], len(fresh) - 1


def _first_window(part: Sequence[Event]) -> int | None:
    return next((event.data.window for event in part if isinstance(event.data, WindowPlanned)), None)


def _windows(plans: Sequence[WindowPlanned], ended: Sequence[WindowClosed]) -> tuple[Window, ...]:
    """Windows from plans and ends; if a window was done twice, the last one counts."""
    ends = {end.window: end for end in ended}
    both = {plan.window: Window(plan=plan, end=ends.get(plan.window)) for plan in plans}
    return tuple(both[number] for number in sorted(both))


def _evaluations(parts: Sequence[Sequence[Event]]) -> tuple[Result, ...]:
    """Validation results; those repeated by a resumed process replace the earlier ones."""
    found: list[Result] = []
    for part in parts:
        new = [
            Result(window=one.window, progress=one.progress, metric=one.metric)
            for one in (event.data for event in part)
            if isinstance(one, Evaluated) and one.metric is not None
        ]
        if new:
            found = [one for one in found if (one.window, one.progress) < (new[0].window, new[0].progress)]
        found += new
    return tuple(found)


def _added(
    parts: Sequence[Sequence[Event]], kind: type[T], take: Callable[[T], Mapping[str, float]]
) -> dict[str, float]:
    """The sum over processes of counts that grow within a process: the last value of each."""
    total: Counter[str] = Counter()
    for part in parts:
        found = [one for one in (event.data for event in part) if isinstance(one, kind)]
        total.update(dict(take(found[-1])) if found else {})  # pyright: ignore[reportArgumentType]
    return dict(total)


def _feed(data: FeedCounted) -> dict[str, float]:
    own = {key: value for key, value in encode(data).items() if key not in ("window", "broken", "cache")}
    return {**own, **{f"cache_{key}": value for key, value in data.cache.items()}}


def _forecast(data: Summarised) -> dict[str, float] | None:
    told = data.summary.get("forecast")
    keys = ("windows", "visits", "visits_full", "saved")
    if not isinstance(told, Mapping):
        return None
    found = {key: float(told[key]) for key in keys if isinstance(told.get(key), (int, float))}  # pyright: ignore[reportUnknownMemberType,reportUnknownArgumentType]
    return found if len(found) == len(keys) and found["windows"] >= 1 else None


def _shorter(story: Story) -> Shorter | None:
    """What a run without selection would have lost with as few visits as selection makes."""
    if story.selects:
        return None
    told = story.forecast or {"saved": 0.0, "windows": float(story.epochs)}
    progress, metric = [one.progress for one in story.evaluations], [one.metric for one in story.evaluations]
    return shorter(progress, metric, share=1 - told["saved"], epochs=round(told["windows"]))


def _scored(found: Sequence[SamplesScored]) -> list[str]:
    return [f"{sum(one.samples for one in found):,} samples were scored in the background."] if found else []


def _knowledge(runs: Sequence[RunStarted]) -> list[str]:
    known = runs[0].knowledge if runs else ""  # a resumed process goes on with what the first one had
    if not known:
        return []
    begin = "from nothing" if known == "nothing" else f"from what other jobs had learnt ({known}), without a warm-up"
    return [f"The run shared its ledger with other jobs and started {begin}."]


def _oddities(
    log: Log, runs: Sequence[RunStarted], windows: Sequence[Window], resumed: int, again: int
) -> Iterable[str]:
    torn, newer = (sum(one.why == why for one in log.faults) for why in ("torn", "newer"))
    if not runs:
        yield "The log has no `run` event: its beginning is missing, and with it the settings."
    elif runs[-1].salience not in ("", __version__):
        yield f"The run was made with salience {runs[-1].salience}; this report was made with {__version__}."
    epochs, done = None, sum(window.finished for window in windows)
    if runs:
        epochs, done = runs[-1].epochs, done // max(1, runs[-1].pieces)
    if log.cut:
        yield "The log is cut off in the middle of a line, as by a crash; everything before that is shown."
    steps, batches = runs[-1].steps if runs else None, sum(w.end.batches for w in windows if w.end is not None)
    if steps is not None and batches < steps:
        yield f"The run has not finished: {batches:,} of {steps:,} steps are done."
    if steps is None and epochs is not None and done < epochs:
        yield f"The run has not finished: {done} of {epochs} epochs are done."
    if torn > log.cut:
        yield f"{count(torn - log.cut, 'line')} of the log could not be read."
    if newer:
        yield f"{count(newer, 'event')} from a newer salience could not be read; upgrade salience to see everything."
    if resumed:
        yield f"The run was resumed {count(resumed, 'time')}; the seconds of interrupted windows are not counted."
    if again:
        yield f"The log holds {again + 1} runs, one after the other; this is the last. Give each run a log of its own."
    numbers = [event.seq for event in log.events if event.seq >= 0]
    if len(set(numbers)) < len(numbers):
        yield "Some events have the same number: two runs wrote to this log at once, and the figures mix them."


def _left_out(log: Log) -> Iterable[str]:
    unknown, malformed = (Counter(one.kind for one in log.faults if one.why == why) for why in ("unknown", "malformed"))
    if unknown:
        kinds = ", ".join(f"{number} {kind!r}" for kind, number in sorted(unknown.items()))
        yield f"{count(unknown.total(), 'event')} of kinds this report does not know: {kinds}."
    if malformed:
        number, kinds = malformed.total(), ", ".join(sorted(malformed))
        yield f"{count(number, 'event')} with missing or wrong fields {'was' if number == 1 else 'were'} left out: {kinds}."
