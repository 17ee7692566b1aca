"""A story as one HTML file: no scripts, no requests, light and dark, for phones and for paper.

The page allows nothing but inline styles and inline pictures (Content-Security-Policy), and all text from the data is
escaped.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

from salience._version import __version__
from salience.errors import MissingExtra, StateError, printable
from salience.events import EventLog, LeverDecided
from salience.files import write_text
from salience.report import drawings, words
from salience.report.charts import Chart
from salience.report.compared import HEAD, SECONDS_NOTE, Comparison, rows, said_of
from salience.report.reader import Log, read_log, story_of
from salience.report.story import GROUPS, HARDEST, MEMBERS, SUSPECTS, Story, shown
from salience.report.text import metric, sections, verdict
from salience.report.words import Names, SampleNames

Pictures = Mapping[int, bytes]
"""PNG or JPEG of the samples shown."""


def page(story: Story, *, pictures: Pictures | None = None, baseline: Comparison | None = None) -> str:
    """The report of one run."""
    return rendered(
        "report.html",
        story=story,
        verdict=verdict(story),
        said=sections(story),
        tiles=_tiles(story),
        baseline=baseline,
        compared=[] if baseline is None else said_of(baseline),
        head=HEAD,
        seconds_note=SECONDS_NOTE,
        rows=[] if baseline is None else rows(baseline),
        results=_drawn(drawings.results(story, baseline), *drawings.training(story), drawings.seconds_per_epoch(story)),
        machine=_drawn(*drawings.machine(story)),
        classes=_drawn(drawings.accuracy_by_class(story), drawings.confused(story)),
        timeline=_drawn(drawings.timeline(story), drawings.work(story)),
        decided=[_decision(one) for one in story.decisions],
        selected=_drawn(
            drawings.kept(story),
            drawings.by_importance(story),
            drawings.times_trained(story),
            drawings.by_loss(story),
            drawings.class_balance(story),
        ),
        gradients=_drawn(drawings.near_zero_by_loss(story), drawings.near_zero_by_layer(story)),
        dropped=drawings.dropped(story),
        reasons=_reasons(story),
        bytes=drawings.bytes_sent(story),
        stages=drawings.stage_costs(story),
        suspects=() if story.findings is None else story.findings.suspects[:SUSPECTS],
        hard=() if story.findings is None else story.findings.hard[:HARDEST],
        copies=() if story.findings is None else story.findings.copies[:GROUPS],
        members=MEMBERS,
        pictures={i: data_uri(data) for i, data in (pictures or {}).items()},
        settings=_settings(story),
        started=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(story.started)),
    )


def _drawn(*charts: Chart | None) -> list[Chart]:
    return [chart for chart in charts if chart is not None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows under a heading."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def sheet(
    over: str, title: str, *, said: Sequence[str], charts: Sequence[Chart | None] = (), tables: Sequence[Table] = (),
    notes: Sequence[str] = (),
) -> str:  # fmt: skip
    """A page of sentences, charts and tables that is not about the log of one run; the sentences are its verdict."""
    return rendered("sheet.html", over=over, title=title, said=said, charts=_drawn(*charts), tables=tables, notes=notes)


def comparison_page(comparison: Comparison) -> str:
    """Several runs side by side."""
    return sheet(
        "salience compare", " · ".join(arm.name for arm in comparison.arms), said=said_of(comparison), notes=comparison.notes,
        charts=[drawings.result_over_visits(comparison.arms), *drawings.means(comparison.arms)],
        tables=[Table(title="Run by run", head=HEAD, rows=rows(comparison), note=SECONDS_NOTE)],
    )  # fmt: skip


def live_page(
    events: EventLog, *, name: str, names: SampleNames = None, classes: Names = None, preset: str = ""
) -> str:  # fmt: skip
    """The page of a run in progress, from its log if it has one, otherwise from the last events in memory."""
    path = events.path
    log = Log(events=tuple(events.recent)) if path is None or not path.exists() else read_log(path)
    story = story_of(log, name=name, classes=classes, preset=preset)
    if names is None:
        return page(story)
    return page(replace(story, files={i: words.sample_name(i, names) for i in shown(story)}))


def write_page(path: str | Path, text: str) -> None:
    """Write a page, which appears whole or not at all."""
    try:
        write_text(path, text)
    except OSError as cause:
        raise StateError(
            f"The report cannot be written to {str(path)!r}: {cause.strerror or cause}; choose another file."
        ) from cause


def framed(text: str) -> str:
    """A page inside another one, such as a notebook; neither affects the other's styles."""
    frame = "width:100%;height:40rem;border:1px solid #8884;border-radius:8px"
    return f'<iframe sandbox srcdoc="{escape(text)}" style="{frame}" title="salience report"></iframe>'


def data_uri(picture: bytes) -> str:
    """A PNG or JPEG as a data URI."""
    kind = "png" if picture.startswith(b"\x89PNG") else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(picture).decode('ascii')}"


def rendered(template: str, **values: Any) -> str:
    """Render one of this room's pages, with all text escaped."""
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
    return printable(environment.get_template(template).render(version=__version__, words=words, **values))


# ---------------------------------------------------------------- figures at the top


def _tiles(story: Story) -> list[tuple[str, str, str]]:
    """Rows of (figure, its meaning, a remark)."""
    tiles: list[tuple[str, str, str]] = []
    if story.metric is not None:
        name = "test accuracy" if story.measure == "accuracy" else "validation metric"
        tiles.append((metric(story, story.metric), name, f"best {metric(story, story.best)}"))
    if story.recorded:
        tiles.append((f"{story.visits:,}", "visits recorded", f"in {words.count(len(story.windows), 'epoch')}"))
    elif story.selects and story.run.steps is not None:
        passes = f"{story.visits / story.population:.1f} on all data" if story.population else ""
        tiles.append((f"{story.done:,}", f"epochs in {words.count(story.batches, 'step')}", passes))
    else:
        tiles.append((f"{story.share:.0%}", "of all visits", f"{story.visits:,} of {story.full:,}"))
    tiles.append((words.seconds(story.seconds), "training", "without evaluation"))
    tiles.append((f"{story.own:.1%}", "for salience itself", words.seconds(sum(story.overhead.values()))))
    if story.findings is not None and story.findings.judged and not story.findings.weak:
        found = story.findings
        tiles.append((f"{found.suspected:,}", "labels look wrong", f"of {found.judged:,} judged"))
    if story.findings is not None and story.findings.spare is not None:
        tiles.append(
            (f"{story.findings.spare:,}", "near-copies", f"in {words.count(story.findings.groups or 0, 'group')}")
        )
    return tiles


def _decision(one: LeverDecided) -> tuple[str, str, str, str, str, str]:
    """A row: epoch, lever, what was done, predicted, measured with its interval, why."""
    measured = "" if one.measured is None else f"{one.measured:.2f}x"
    predicted = "" if one.predicted is None else f"{one.predicted:.2f}x"
    low, high = one.interval or (None, None)
    if low is not None and high is not None:
        ends = f" ({low:.2f} to {min(high, 99.0):.2f})"
        measured, predicted = (measured + ends, predicted) if measured else (measured, predicted + ends)
    return str(one.window + 1), one.lever, one.action, predicted, measured, one.reason


def _reasons(story: Story) -> list[tuple[str, str, int, int, str]]:
    """Rows (filter, epochs, most dropped, most forced, reason); neighbours whose reasons only differ in numbers share a row."""
    found: list[tuple[str, str, int, int, str]] = []
    for name in dict.fromkeys(note.name for window in story.windows for note in window.plan.filters):
        run: list[tuple[int, Any]] = []
        for window in story.windows:
            for note in (n for n in window.plan.filters if n.name == name):
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
    """The reason without its numbers, for comparison."""
    return "".join(c for c in text if not (c.isdigit() or c in ".,%"))


def _settings(story: Story) -> list[tuple[str, str]]:
    """All settings, with `select` as JSON."""
    both = story.all_settings
    return [
        (
            key,
            (value or "-")
            if isinstance(value, str)
            else json.dumps(value, indent=1 if isinstance(value, dict) else None),
        )
        for key, value in both.items()
    ]
