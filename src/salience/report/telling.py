"""From an event log to a story: what cannot be understood is left out, counted and said."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from salience._version import __version__
from salience.events import Event
from salience.ledger import Ledger
from salience.report.known import know
from salience.report.log import Log, number
from salience.report.story import (
    SUSPECTS,
    Broken,
    Decided,
    Evaluation,
    Held,
    Note,
    Spent,
    Steered,
    Story,
    Treated,
    Window,
    shown,
)
from salience.report.words import count
from salience.select.enough import Shorter, shorter
from salience.select.findings import CopyGroup, Findings, Groups, Hard, Suspect, findings

T = TypeVar("T")


def tell(
    log: Log,
    *,
    name: str,
    settings: Mapping[str, Any] | None = None,
    classes: Sequence[str] | None = None,
    ledger: Ledger | None = None,
    near: Groups | None = None,
    file: Callable[[int], str] | None = None,
    notes: Iterable[str] = (),
) -> Story:
    """The story of a run: from its log and, where they are known, settings, class names, ledger, near-copies, files."""
    parts, again = _parts(log.events)
    events = [event for part in parts for event in part]
    odd: Counter[str] = Counter()

    def made(kind: str, make: Callable[[Event], T]) -> list[T]:
        return [one for event in events if event["kind"] == kind and (one := _try(make, event, odd)) is not None]

    run = next((event.fields for event in reversed(events) if event["kind"] == "run"), dict[str, Any]())
    windows = _windows(made("plan", _planned), made("window", _ended))
    population = int(number(run.get("population"), max((w.population for w in windows), default=0)))
    said = [*_oddities(log, run, windows, len(parts) - 1, again), *notes]
    if ledger is not None and population and ledger.n != population:
        said.append(f"The ledger is of {ledger.n:,} samples, the run of {population:,}: it was left out.")
        ledger = near = None
    told = made("findings", _findings)
    found = findings(ledger, near, top=SUSPECTS, names=classes) if ledger is not None else (told or [None])[-1]
    visits = sum(window.visits for window in windows)
    texts = Counter(made("warning", lambda event: str(event["text"])))
    story = Story(
        name=name,
        started=number(log.events[0].get("time"), 0.0),
        run={key: value for key, value in run.items() if key not in ("v", "seq", "time", "kind")},
        settings=dict(settings or {}),
        classes=None if classes is None else tuple(classes),
        windows=windows,
        evaluations=_evaluations(parts, odd),
        seconds=sum(window.seconds for window in made("window", _ended)),
        overhead=_added(parts, "window", lambda event: dict(event["overhead"]), odd),
        feed=_added(parts, "feed", _fed, odd),
        findings=found,
        known=None if ledger is None else know(ledger, windows=round(sum(w.done for w in windows)), visits=visits),
        forecast=next(iter(reversed(made("observed", _forecast))), None),
        shorter=None,
        treated=next(iter(reversed(made("treat", _treated))), None),
        asides=(*dict.fromkeys(made("signals", lambda event: str(event["text"]))), *_scored(made("scored", _samples))),
        steered=tuple(made("steered", _steered)),
        held=tuple(made("verdict", _held)),
        decided=tuple(made("decision", _decided)),
        broken=_first_of_each(made("broken", _broken)),
        warnings=tuple(texts.items()),
        notes=(*said, *_left_out(log, odd)),
    )
    story = replace(story, shorter=_shorter(story))
    return story if file is None else _with_files(story, file)


def _with_files(story: Story, file: Callable[[int], str]) -> Story:
    return replace(story, files={i: file(i) for i in shown(story)})


def _parts(events: Sequence[Event]) -> tuple[list[list[Event]], int]:
    """The processes of the last run in the log, and how many runs there are before it.

    Each process begins with a `run` event. One that plans window 0 again starts anew; any other goes on where the one
    before was stopped.
    """
    parts: list[list[Event]] = [[]]
    for event in events:
        if event["kind"] == "run" and any(one["kind"] in ("run", "plan") for one in parts[-1]):
            parts.append([])
        parts[-1].append(event)
    fresh = [0] + [i for i, part in enumerate(parts) if i and _first_window(part) == 0]
    return parts[fresh[-1] :], len(fresh) - 1


def _first_window(part: Sequence[Event]) -> Any:
    return next((event.get("window") for event in part if event["kind"] == "plan"), None)


def _try(make: Callable[[Event], T], event: Event, odd: Counter[str]) -> T | None:
    """What `make` makes of an event; one that lacks what it should have is counted and left out."""
    try:
        return make(event)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError):
        odd[event["kind"]] += 1
        return None


def _planned(event: Event) -> Window:
    notes = tuple(
        Note(name=str(n["name"]), dropped=int(n["dropped"]), forced=int(n["forced"]), reason=str(n["reason"]))
        for n in event["filters"]
    )
    return Window(
        number=int(event["window"]), picked=int(event["picked"]), population=int(event["population"]), notes=notes,
        by_importance=tuple(map(float, event.get("by_importance") or ())),
    )  # fmt: skip


def _ended(event: Event) -> Window:
    return Window(
        number=int(event["window"]), picked=0, population=0, batches=int(event["batches"]), of=int(event["of"]),
        finished=bool(event["finished"]), seconds=float(event["seconds"]), spent=_spent(event.get("steps")),
    )  # fmt: skip


def _spent(steps: Mapping[str, Any] | None) -> Spent | None:
    if not steps:
        return None
    work = {str(name): float(seconds) for name, seconds in steps["work"].items()}
    return Spent(
        wait=float(steps["wait"]),
        copy=float(steps.get("copy") or 0.0),
        forward=float(steps["forward"]),
        backward=float(steps["backward"]),
        work=work,
    )


def _windows(planned: Sequence[Window], ended: Sequence[Window]) -> tuple[Window, ...]:
    """Plans and ends put together; of a window that was done twice, the last."""
    ends = {window.number: window for window in ended}
    both: dict[int, Window] = {}
    for plan in planned:
        end = ends.get(plan.number, plan)
        both[plan.number] = Window(
            number=plan.number, picked=plan.picked, population=plan.population, notes=plan.notes,
            batches=end.batches, of=end.of, finished=end.finished, seconds=end.seconds, spent=end.spent,
            by_importance=plan.by_importance,
        )  # fmt: skip
    return tuple(both[number] for number in sorted(both))


def _evaluations(parts: Sequence[Sequence[Event]], odd: Counter[str]) -> tuple[Evaluation, ...]:
    """Validation results; what a process that went on did again takes the place of what it had been."""

    def make(event: Event) -> Evaluation:
        return Evaluation(window=int(event["window"]), progress=float(event["progress"]), metric=float(event["metric"]))

    found: list[Evaluation] = []
    for part in parts:
        new = [one for e in part if e["kind"] == "evaluated" and (one := _try(make, e, odd)) is not None]
        if new:
            found = [one for one in found if (one.window, one.progress) < (new[0].window, new[0].progress)]
        found += new
    return tuple(found)


def _added(
    parts: Sequence[Sequence[Event]], kind: str, take: Callable[[Event], Mapping[str, Any]], odd: Counter[str]
) -> dict[str, Any]:
    """Counts that grow over a process: the last of each, added up."""
    total: Counter[str] = Counter()
    for part in parts:
        last = [event for event in part if event["kind"] == kind][-1:]
        for counts in (_try(take, event, odd) for event in last):
            total.update({key: value for key, value in (counts or {}).items() if isinstance(value, (int, float))})
    return dict(total)


def _fed(event: Event) -> dict[str, int]:
    own = {
        key: value
        for key, value in event.items()
        if key not in ("v", "seq", "time", "kind", "window", "broken", "cache")
    }
    return {**own, **{f"cache_{key}": value for key, value in (event.get("cache") or {}).items()}}


def _findings(event: Event) -> Findings:
    """The event's findings, every number made sure of."""
    return Findings(
        samples=int(event["samples"]),
        judged=int(event["judged"]),
        noise_rate=None if event["noise_rate"] is None else float(event["noise_rate"]),
        suspected=int(event["suspected"]),
        expected=float(event["expected"]),
        weak=str(event.get("weak") or ""),
        suspects=tuple(
            Suspect(
                id=int(one["id"]), label=int(one["label"]), guess=int(one["guess"]), confidence=float(one["confidence"]),
                reason=str(one["reason"]),
            )
            for one in event["suspects"]
        ),
        hard=tuple(
            Hard(
                id=int(one["id"]), label=int(one["label"]), guess=int(one["guess"]), mean_loss=float(one["mean_loss"]),
                confidence=None if one["confidence"] is None else float(one["confidence"]), reason=str(one["reason"]),
            )
            for one in event["hard"]
        ),
        groups=None if event["groups"] is None else int(event["groups"]),
        spare=None if event["spare"] is None else int(event["spare"]),
        copies=tuple(
            CopyGroup(
                id=int(one["id"]), members=tuple(map(int, one["members"])), confidence=float(one["confidence"]),
                reason=str(one["reason"]),
            )
            for one in event["copies"]
        ),
    )  # fmt: skip


def _forecast(event: Event) -> dict[str, float]:
    told = event["summary"]["forecast"]
    return {key: float(told[key]) for key in ("windows", "visits", "visits_full", "saved")}


def _shorter(story: Story) -> Shorter | None:
    """What fewer visits would have cost a run that did not select; asked about as many as selection would make."""
    if story.selects:
        return None
    told = story.forecast or {"saved": 0.0, "windows": float(story.epochs)}
    progress, metric = [one.progress for one in story.evaluations], [one.metric for one in story.evaluations]
    return shorter(progress, metric, share=1 - told["saved"], epochs=round(told["windows"]))


def _treated(event: Event) -> Treated:
    return Treated(
        treatment=str(event["treatment"]),
        costs={str(stage): float(cost) for stage, cost in event["costs_us"].items()},
        visits=int(event["visits"]),
        reused=int(event["reused"]),
        saved=float(event["saved_seconds"]),
    )


def _samples(event: Event) -> int:
    return int(event["samples"])


def _scored(samples: Sequence[int]) -> list[str]:
    return [f"{sum(samples):,} samples were scored in the background."] if samples else []


def _steered(event: Event) -> Steered:
    return Steered(
        window=int(event["window"]), before=float(event["from"]), after=float(event["to"]), reason=str(event["reason"])
    )


def _held(event: Event) -> Held:
    return Held(
        window=int(event.get("window") or 0), text=str(event["text"]),
        levers=tuple(
            (str(one["name"]), bool(one["exact"]), float(one["speedup"]), float(one["low"]), float(one["high"]))
            for one in event.get("levers") or ()
        ),
    )  # fmt: skip


def _decided(event: Event) -> Decided:
    def known(value: Any) -> float | None:
        return None if value is None else float(value)

    ends = event.get("interval")
    return Decided(
        window=int(event["window"]), lever=str(event["lever"]), action=str(event["action"]), reason=str(event["reason"]),
        predicted=known(event.get("predicted")), measured=known(event.get("measured")),
        interval=None if ends is None or None in ends else (float(ends[0]), float(ends[1])),
    )  # fmt: skip


def _broken(event: Event) -> Broken:
    return Broken(id=int(event["id"]), name=str(event["name"]), reason=str(event["reason"]))


def _first_of_each(broken: Iterable[Broken]) -> tuple[Broken, ...]:
    return tuple({one.id: one for one in reversed(list(broken))}.values())[::-1]


# ---------------------------------------------------------------- what is odd


def _oddities(log: Log, run: Mapping[str, Any], windows: Sequence[Window], resumed: int, again: int) -> list[str]:
    said: list[str] = []
    if not run:
        said.append("The log has no `run` event: its beginning is missing, and with it the settings.")
    elif run.get("salience") != __version__:
        said.append(f"The run was made by salience {run.get('salience')}; this report is by {__version__}.")
    epochs, done = run.get("epochs"), sum(window.finished for window in windows)
    if log.cut:
        said.append("The log is cut off in mid-line, as by a crash: what came before is shown.")
    if isinstance(epochs, int) and done < epochs:
        said.append(f"The run has not finished: {done} of {epochs} epochs are done.")
    if log.torn > log.cut:
        said.append(f"{count(log.torn - log.cut, 'line')} of the log could not be read.")
    if log.newer:
        said.append(f"{count(log.newer, 'event')} of a newer salience could not be read; upgrade salience to see all.")
    if resumed:
        said.append(
            f"The run was resumed {count(resumed, 'time')}; seconds of the windows that were broken off are not counted."
        )
    if again:
        said.append(f"The log holds {again + 1} runs, one after the other: this is the last. Give each its own log.")
    numbers = [event["seq"] for event in log.events if isinstance(event.get("seq"), int)]
    if len(set(numbers)) < len(numbers):
        said.append("Some events have the same number: two runs wrote this log at once, and the figures mix them.")
    return said


def _left_out(log: Log, odd: Counter[str]) -> list[str]:
    said: list[str] = []
    if log.unknown:
        kinds = ", ".join(f"{count} {kind!r}" for kind, count in sorted(log.unknown.items()))
        said.append(f"{count(sum(log.unknown.values()), 'event')} of kinds this report does not know: {kinds}.")
    lacking = odd + Counter(log.malformed)
    if lacking:
        said.append(f"{count(lacking.total(), 'event')} lacked what they should have: {', '.join(sorted(lacking))}.")
    return said
