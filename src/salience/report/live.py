"""The page of a run in progress, from its log or the events in memory: for `loader.report("x.html")` and notebooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path

from salience.errors import ConfigError
from salience.events import EventLog
from salience.report.html import page
from salience.report.log import Log, read_log
from salience.report.story import shown
from salience.report.telling import tell
from salience.report.words import Names

SampleNames = Sequence[str] | Callable[[int], str] | None
"""What samples are called: one name per sample, or a function of the id."""


def live_page(events: EventLog, *, name: str, names: SampleNames = None, classes: Names = None) -> str:
    """The page of the run behind `events`: its file where it has one, else the last events in memory."""
    if events.path is not None and events.path.exists():
        log = read_log(events.path)
    else:
        log = Log(path=Path(), events=tuple(events.recent), torn=0, cut=False, newer=0, unknown={}, malformed={})
    story = tell(log, name=name, classes=classes)
    if names is None:
        return page(story)
    find = names if callable(names) else names.__getitem__
    try:
        return page(replace(story, files={i: str(find(i)) for i in shown(story)}))
    except (IndexError, KeyError) as cause:
        raise ConfigError(f"names has no name for a sample of this run ({cause}); give one per sample.") from cause


def framed(text: str) -> str:
    """A page inside another one, such as a notebook, whose styles it neither takes nor changes."""
    frame = "width:100%;height:40rem;border:1px solid #8884;border-radius:8px"
    return f'<iframe sandbox srcdoc="{escape(text)}" style="{frame}" title="salience report"></iframe>'
