"""A story as one HTML file: no script, no request, light and dark, for a phone and for paper.

The page forbids itself everything but inline style and inline pictures (Content-Security-Policy), and every text of the
data is escaped.
"""

from __future__ import annotations

import base64
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from salience._version import __version__
from salience.errors import MissingExtra
from salience.feed.sizes import size
from salience.report import words
from salience.report.charts import Chart, Series, bars, columns, lines
from salience.report.compared import HEAD, Arm, Comparison, rows, sentences
from salience.report.story import GROUPS, HARDEST, MEMBERS, SUSPECTS, Decided, Evaluation, Story

CLASSES = 20
"""Classes shown in a chart; of more, the most uneven."""
ARMS = 6
"""Arms drawn in a chart: as many as there are colours."""

Pictures = Mapping[int, bytes]
"""PNG or JPEG of the samples shown."""


def page(story: Story, *, pictures: Pictures | None = None, baseline: Comparison | None = None) -> str:
    """The report of one run."""
    return _render(
        "report.html",
        story=story,
        verdict=words.verdict(story),
        tiles=_tiles(story),
        baseline=baseline,
        compared=[] if baseline is None else [sentences(one) for one in baseline.differences],
        head=HEAD,
        rows=[] if baseline is None else rows(baseline),
        results=[one for one in (_results(story, baseline), _seconds(story)) if one is not None],
        waiting=words.waiting(story),
        timeline=[one for one in (_timeline(story), _work(story)) if one is not None],
        decided=[_decision(one) for one in story.decided],
        selected=[
            one
            for one in (_kept(story), _by_importance(story), _times(story), _losses(story), _balance(story))
            if one is not None
        ],
        dropped=_dropped(story),
        reasons=_reasons(story),
        bytes=_bytes(story),
        stages=_stages(story),
        suspects=() if story.findings is None else story.findings.suspects[:SUSPECTS],
        hard=() if story.findings is None else story.findings.hard[:HARDEST],
        copies=() if story.findings is None else story.findings.copies[:GROUPS],
        members=MEMBERS,
        pictures={i: data_uri(data) for i, data in (pictures or {}).items()},
        settings=_settings(story),
        started=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(story.started)),
    )


def comparison_page(comparison: Comparison) -> str:
    """Several runs side by side."""
    return _render(
        "compare.html",
        comparison=comparison,
        compared=[sentences(one) for one in comparison.differences],
        head=HEAD,
        rows=rows(comparison),
        charts=[one for one in (_paths(comparison.arms), *_means(comparison.arms)) if one is not None],
    )


def data_uri(picture: bytes) -> str:
    """A PNG or JPEG as part of the page."""
    kind = "png" if picture.startswith(b"\x89PNG") else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(picture).decode('ascii')}"


def _render(template: str, **values: Any) -> str:
    try:
        import jinja2
    except ImportError as cause:
        raise MissingExtra.of("jinja2", "report", "writing a report as HTML") from cause
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "pages"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"percent": words.percent, "seconds": words.seconds, "size": size}
    return environment.get_template(template).render(version=__version__, **values)


# ---------------------------------------------------------------- figures at the top


def _tiles(story: Story) -> list[tuple[str, str, str]]:
    """(figure, what it is, a word beside it)."""
    tiles: list[tuple[str, str, str]] = []
    if story.metric is not None:
        name = "test accuracy" if story.measure == "accuracy" else "validation metric"
        tiles.append((words.metric(story, story.metric), name, f"best {words.metric(story, story.best)}"))
    tiles.append((f"{story.share:.0%}", "of all visits", f"{story.visits:,} of {story.full:,}"))
    tiles.append((words.seconds(story.seconds), "training", "without evaluation"))
    tiles.append((f"{story.own:.1%}", "salience's own", words.seconds(sum(story.overhead.values()))))
    if story.findings is not None and story.findings.judged and not story.findings.weak:
        found = story.findings
        tiles.append((f"{found.suspected:,}", "labels look wrong", f"of {found.judged:,} judged"))
    if story.findings is not None and story.findings.spare is not None:
        tiles.append(
            (f"{story.findings.spare:,}", "near-copies", f"in {words.count(story.findings.groups or 0, 'group')}")
        )
    return tiles


# ---------------------------------------------------------------- charts


def _over(runs: Sequence[tuple[str, Sequence[tuple[float, float]]]]) -> tuple[list[float], list[Series]]:
    """Several curves over one axis: the union of their places, None where a curve has no value."""
    x = sorted({at for _, points in runs for at, _ in points})
    curves = [(name, dict(points)) for name, points in runs]
    return x, [Series(name=name, values=[curve.get(at) for at in x]) for name, curve in curves]


def _results(story: Story, baseline: Comparison | None) -> Chart | None:
    if not story.evaluations:
        return None
    runs = [(story.name, [(float(one.window), one.metric) for one in story.evaluations])]
    for other in () if baseline is None else baseline.arms[0].stories[:1]:
        runs.append((f"baseline {other.name}", [(float(one.window), one.metric) for one in other.evaluations]))
    x, series = _over(runs)
    name = "Test accuracy" if story.measure == "accuracy" else "Validation metric"
    return lines(name, x, series, x_label="epochs done", form=_metric_form(story))


def _metric_form(story: Story) -> Callable[[float], str]:
    shares = all(0 <= one.metric <= 1 for one in story.evaluations)
    return words.percent if shares else words.short


def _seconds(story: Story) -> Chart | None:
    done = [window for window in story.windows if window.of]
    if not done:
        return None
    parts = [Series(name="seconds", values=[window.seconds for window in done])]
    return columns(
        "Seconds an epoch", [str(w.number + 1) for w in done], parts, x_label="epoch", form=lambda v: f"{v:.3g} s"
    )


def _timeline(story: Story) -> Chart | None:
    """Seconds of every epoch by what the loop did in them."""
    done = [window for window in story.windows if window.spent is not None]
    if not done:
        return None
    spent = [window.spent for window in done if window.spent is not None]
    rest = [max(0.0, w.seconds - s.wait - s.copy - s.forward - s.backward) for w, s in zip(done, spent, strict=True)]
    copies = [one.copy for one in spent]
    series = [
        Series(name="waiting for batches", values=[one.wait for one in spent]),
        *([Series(name="copying to the device", values=copies)] if any(copies) else []),
        Series(name="forward", values=[one.forward for one in spent]),
        Series(name="backward and optimizer", values=[one.backward for one in spent]),
        Series(name="planning and the rest", values=rest),
    ]
    names = [str(window.number + 1) for window in done]
    return columns("Seconds of the loop", names, series, x_label="epoch", form=lambda v: f"{v:.3g} s")


def _work(story: Story) -> Chart | None:
    work = {name: spent for name, spent in story.work.items() if spent > 0}
    if not work:
        return None
    names = sorted(work, key=lambda name: -work[name])
    values = [Series(name="seconds", values=[work[name] for name in names])]
    return bars("Seconds of the workers", names, values, form=words.seconds, what="stage")


def _decision(one: Decided) -> tuple[str, str, str, str, str, str]:
    """A row: epoch, lever, what was done, predicted, measured with its interval, why."""
    measured = "" if one.measured is None else f"{one.measured:.2f}x"
    predicted = "" if one.predicted is None else f"{one.predicted:.2f}x"
    if one.interval is not None:
        ends = f" ({one.interval[0]:.2f} to {min(one.interval[1], 99.0):.2f})"
        measured, predicted = (measured + ends, predicted) if measured else (measured, predicted + ends)
    return str(one.window + 1), one.lever, one.action, predicted, measured, one.reason


def _by_importance(story: Story) -> Chart | None:
    """What was picked of the least and of the most important samples, over time."""
    done = [window for window in story.windows if len(window.by_importance) == 10]
    if not done or all(share == 1 for window in done for share in window.by_importance):
        return None
    groups = (("least important tenth", 0, 1), ("middle", 4, 6), ("most important tenth", 9, 10))
    series = [
        Series(name=name, values=[sum(w.by_importance[low:high]) / (high - low) for w in done])
        for name, low, high in groups
    ]
    return lines(
        "Share visited, by importance", [w.number + 1.0 for w in done], series, x_label="epoch", form=words.percent,
        least=0.0,
    )  # fmt: skip


def _kept(story: Story) -> Chart | None:
    if not story.windows or not story.selects:
        return None
    shares = [w.picked / w.population if w.population else None for w in story.windows]
    return columns(
        "Share of the samples that was visited", [str(w.number + 1) for w in story.windows],
        [Series(name="visited", values=shares)], x_label="epoch", form=words.percent,
    )  # fmt: skip


def _times(story: Story) -> Chart | None:
    known = story.known
    if known is None or not known.counted or not story.selects:
        return None
    names = [str(low) if low == high else f"{low} to {high}" for low, high, _ in known.times]
    note = f"In every epoch {known.always:,}, in some {known.sometimes:,}, in none {known.never:,}."
    return columns(
        "How often samples were trained on", names, [Series(name="samples", values=[n for *_, n in known.times])],
        x_label="times", form=words.short, note=note,
    )  # fmt: skip


def _losses(story: Story) -> Chart | None:
    known = story.known
    if known is None or not known.edges:
        return None
    names = [f"{low:.2g} to {high:.2g}" for low, high in zip(known.edges, known.edges[1:], strict=False)]
    if story.selects and known.counted:
        parts = zip(("in more than half of the epochs", "in half or fewer"), known.losses, strict=True)
        series = [Series(name=name, values=values) for name, values in parts if any(values)]
    else:
        series = [Series(name="samples", values=[sum(column) for column in zip(*known.losses, strict=True)])]
    every = (len(known.edges) - 1) // 4
    feet = [(float(i), f"{known.edges[i]:.2g}") for i in range(0, len(known.edges), every)]
    return columns(
        "Importance: the samples by mean loss", names, series, x_label="mean loss", form=words.short, feet=feet,
        note="Easy on the left, hard on the right; what importance is made of.",
    )  # fmt: skip


def _balance(story: Story) -> Chart | None:
    known = story.known
    if known is None or not known.classes or not story.selects:
        return None
    shown = [one for one in known.classes if one.visits is not None]
    note = ""
    if len(shown) > CLASSES:
        shown = sorted(shown, key=lambda one: abs((one.visits or 0.0) / one.share - 1), reverse=True)[:CLASSES]
        note = f"The {CLASSES} most uneven of {len(known.classes)} classes."
    return bars(
        "Class balance before and after",
        [story.class_name(one.label) for one in shown],
        [
            Series(name="of the samples", values=[one.share for one in shown]),
            Series(name="of the visits", values=[one.visits for one in shown]),
        ],
        form=lambda v: f"{v:.1%}",
        what="class",
        note=note,
    )


def _dropped(story: Story) -> Chart | None:
    """What every filter left out, window by window."""
    names = list(dict.fromkeys(note.name for window in story.windows for note in window.notes))
    series = [
        Series(name=name, values=[sum(n.dropped for n in w.notes if n.name == name) for w in story.windows])
        for name in names
    ]
    series = [one for one in series if any(one.values)]
    if not series:
        return None
    epochs = [str(window.number + 1) for window in story.windows]
    return columns(
        "Samples that filters left out", epochs, series[:ARMS], x_label="epoch", form=words.short,
        note=f"All by {series[0].name}." if len(series) == 1 else "",
    )  # fmt: skip


def _reasons(story: Story) -> list[tuple[str, str, int, int, str]]:
    """(filter, epochs, most dropped, most forced, reason): neighbours with the same reason, numbers aside, in one row."""
    found: list[tuple[str, str, int, int, str]] = []
    for name in dict.fromkeys(note.name for window in story.windows for note in window.notes):
        run: list[tuple[int, Any]] = []
        for window in story.windows:
            for note in (n for n in window.notes if n.name == name):
                if run and _wordless(run[-1][1].reason) != _wordless(note.reason):
                    found.append(_row(name, run))
                    run = []
                run.append((window.number + 1, note))
        if run:
            found.append(_row(name, run))
    return found


def _row(name: str, run: Sequence[tuple[int, Any]]) -> tuple[str, str, int, int, str]:
    first, last = run[0][0], run[-1][0]
    epochs = str(first) if first == last else f"{first} to {last}"
    return name, epochs, max(n.dropped for _, n in run), max(n.forced for _, n in run), str(run[-1][1].reason)


def _wordless(text: str) -> str:
    """A reason without its numbers."""
    return "".join(c for c in text if not (c.isdigit() or c in ".,%"))


def _bytes(story: Story) -> Chart | None:
    feed = story.feed
    if not feed.get("cache_bytes"):
        return None
    words = {
        "bytes": "without a cache", "lru_bytes": "with LRU", "never_evict_bytes": "with one that never evicts",
        "bytes_sent": "this run", "bound_bytes": "the least possible",
    }  # fmt: skip
    keys = [key for key in words if f"cache_{key}" in feed]  # rivals are simulated only where there is a trace
    values = [float(feed[f"cache_{key}"]) for key in keys]
    return bars(
        "Bytes the store sent",
        [words[key] for key in keys],
        [Series(name="bytes", values=values)],
        form=size,
        what="cache",
    )


def _stages(story: Story) -> Chart | None:
    if story.treated is None or not story.treated.costs:
        return None
    costs = story.treated.costs
    values = [Series(name="microseconds", values=list(costs.values()))]
    return bars("Microseconds a call", list(costs), values, form=lambda v: f"{v:,.0f} µs", what="stage")


def _visits_at(story: Story, one: Evaluation) -> float:
    return float(sum(window.visits for window in story.windows if window.number < one.window))


def _paths(arms: Sequence[Arm]) -> Chart | None:
    """Result over visits, the mean of each arm's seeds."""
    runs: list[tuple[str, list[tuple[float, float]]]] = []
    for arm in arms[:ARMS]:
        told = [story for story in arm.stories if story.evaluations]
        count = min((len(story.evaluations) for story in told), default=0)
        points = [
            (
                statistics.fmean(_visits_at(story, story.evaluations[k]) for story in told),
                statistics.fmean(story.evaluations[k].metric for story in told),
            )
            for k in range(count)
        ]
        if points:
            runs.append((arm.name, points))
    if not runs:
        return None
    x, series = _over(runs)
    form = _metric_form(next(story for arm in arms for story in arm.stories if story.evaluations))
    note = f"The first {ARMS} of {len(arms)} arms." if len(arms) > ARMS else ""
    return lines("Result over visits", x, series, x_label="visits", form=form, x_form=words.short, note=note)


def _means(arms: Sequence[Arm]) -> list[Chart]:
    def bar(title: str, value: Callable[[Story], float], form: Callable[[float], str]) -> Chart:
        means = [statistics.fmean(value(story) for story in arm.stories) for arm in arms]
        return bars(title, [arm.name for arm in arms], [Series(name="mean", values=means)], form=form, what="arm")

    return [
        bar("Seconds of training", lambda story: story.seconds, words.seconds),
        bar("Visits", lambda story: float(story.visits), words.short),
    ]


def _settings(story: Story) -> list[tuple[str, str]]:
    """Everything that was set, `select` as JSON."""
    both = {**story.settings, **story.run}
    return [
        (key, value if isinstance(value, str) else json.dumps(value, indent=1 if isinstance(value, dict) else None))
        for key, value in both.items()
    ]
