"""Opens the files of a run for the commands that report on it: its log, and the files beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from salience.cli.text import written
from salience.errors import ConfigError, StateError
from salience.events import RunStarted
from salience.events.coding import plain
from salience.files import write_text

if TYPE_CHECKING:
    from salience.ledger import Ledger
    from salience.report.story import Story
    from salience.select.findings import Groups


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """A run's story, and where its pictures can be found."""

    story: Story
    ledger: Ledger | None
    settings: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """The saved knowledge about a run's samples: its ledger and the files beside it."""

    ledger: Ledger
    near: Groups | None
    """Near-copies, if they were searched for."""
    classes: Sequence[str] | None
    """Names of the classes."""
    file: Callable[[int], str] | None
    """Function from the id of a sample to the name of its file."""


def kept(given: str | Path, folder: Path | None = None) -> Kept:
    """The ledger at `given` (a folder or the file itself), and the files beside it in `folder` (default: that folder)."""
    from salience import ledger as ledgers
    from salience.app import checkpoint
    from salience.select.findings import load_copies

    folder = folder or (Path(given) if Path(given).is_dir() else None)
    found = ledgers.load(checkpoint.ledger_file(given))
    if folder is None:
        return Kept(ledger=found, near=None, classes=None, file=None)
    copies = folder / checkpoint.COPIES
    return Kept(
        ledger=found, near=load_copies(copies, found.n) if copies.exists() else None,
        classes=_checkpoint(folder).get("classes"), file=checkpoint.read_names(folder, found.n),
    )  # fmt: skip


def open_run(given: str, *, name: str = "", ledger: str = "", whole: bool = True) -> Opened:
    """The run at `given`, its folder or its event log. `whole=False` leaves out the ledger and what depends on it."""
    from salience.app import checkpoint
    from salience.report.reader import read_log, story_of
    from salience.report.story import shown
    from salience.select.findings import findings
    from salience.select.presets import preset_name

    path = Path(given)
    folder = path if path.is_dir() else path.parent if path.name == checkpoint.LOG else None
    log = read_log(log_file(given))
    saved, notes, known = _checkpoint(folder), list[str](), None
    at = ledger or (folder if folder is not None and (folder / checkpoint.LEDGER).exists() else None)
    try:
        known = kept(at, folder) if whole and at else None
    except StateError as cause:
        if ledger:
            raise
        notes.append(f"{cause} It was left out.")
    settings: dict[str, Any] = plain(saved.get("config", {}))  # a checkpoint of an older salience may hold passwords
    run = next((event.data for event in reversed(log.events) if isinstance(event.data, RunStarted)), RunStarted())
    if known is not None and run.population not in (0, known.ledger.n):
        notes.append(f"The ledger is of {known.ledger.n:,} samples, the run of {run.population:,}; it was left out.")
        known = None
    named = preset_name(run.select) if isinstance(run.select, Mapping) else ""
    story = story_of(
        log, name=name or run_name(path), settings=settings, classes=saved.get("classes"), preset=named, notes=notes
    )  # fmt: skip
    if known is None:
        return Opened(story=story, ledger=None, settings=settings)
    if ledger or story.findings is None or story.findings.visits is None:  # a run that finished has told them
        windows = round(sum(window.done for window in story.windows))
        story = replace(story, findings=findings(known.ledger, known.near, windows=windows, visits=story.visits))
    if known.file is not None:
        story = replace(story, files={i: known.file(i) for i in shown(story)})
    return Opened(story=story, ledger=known.ledger, settings=settings)


def log_file(given: str) -> Path:
    """The event log of a run, given by its folder or by the log itself."""
    from salience.app import checkpoint

    path = Path(given)
    return path / checkpoint.LOG if path.is_dir() else path


def run_name(path: Path) -> str:
    """The name of a run: that of its folder, or that of the file for a log elsewhere."""
    where = path.resolve()
    return where.name if path.is_dir() else where.parent.name if where.name == "run.jsonl" else where.stem


def write_page(text: str, output: str) -> None:
    """Write an HTML file; it appears whole or not at all."""
    path = Path(output)
    if path.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"-o {output!r} is to be an HTML file; choose a name that ends in .html.")
    with written(path):
        write_text(path, text)


def _checkpoint(folder: Path | None) -> dict[str, Any]:
    """The contents of the newest checkpoint of `salience train`, or nothing; a damaged one is not touched."""
    from salience.app import checkpoint

    for name in () if folder is None else (checkpoint.LAST, checkpoint.PREVIOUS):
        try:
            return checkpoint.read(folder / name) if folder is not None else {}
        except StateError:
            continue
    return {}
