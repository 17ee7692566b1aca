"""Show which labels look wrong, which images are copies, and which are hard; inspect, export and merge ledgers.

    salience scores runs/train --suspects               labels that look wrong, most certain first
    salience scores runs/train --copies --hard          near-copies, and the hardest clean samples
    salience scores runs/train --suspects --top 0 -o suspects.csv
    salience scores runs/train                          everything the run learnt, like `scores show`
    salience scores export runs/train -o scores.csv     every column of the ledger
    salience scores merge runs/a runs/b -o both.npz     one ledger from several, which then vote
    salience scores compare runs/a runs/b -o both.html  is importance a property of the data or of the model?
    salience scores history runs/train -o history.html  suspected, hard and easy samples side by side, epoch by epoch
    salience train --ledger both.npz ...

A ledger is what a run knows about every sample. Wherever one is expected (RUN), the folder of a run also works; then
samples and classes have names. If a run has the name of an action (list, show), write ./show.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from salience.cli.agreeing import compare, history
from salience.cli.opening import Kept, kept, log_file, open_run
from salience.cli.text import subcommand, written
from salience.errors import ConfigError
from salience.events import Findings
from salience.files import atomic, write_text
from salience.report import words
from salience.report.console import columns, say

if TYPE_CHECKING:
    import numpy as np

    from salience.ledger import Ledger

EXACT_DIGITS = {2: 5, 4: 9}
"""Bytes of a float -> digits that represent it exactly."""
CHUNK_ROWS = 1 << 16
ACTIONS = ("list", "show", "export", "merge", "compare", "history")
"""The first one may be left out."""
SECTIONS = {
    "suspects": "labels that look wrong: what the model says, how sure that is, and why",
    "copies": "groups of near-copies, where the run has looked for them",
    "hard": "the hardest samples whose labels are not suspected",
}


def add(commands: Any) -> None:
    made = subcommand(commands, "scores", __doc__, list_run)
    made.usage = (
        "salience scores [list] RUN [options] | show RUN | export RUN -o FILE | merge RUN RUN ... -o FILE | "
        "compare RUN RUN ... | history RUN"
    )
    actions = made.add_subparsers(title="actions", metavar="ACTION", required=True)
    made_list = _action(actions, "list", list_run, "what the run learnt, or the lists that are asked for (default)")
    for name, text in SECTIONS.items():
        made_list.add_argument(f"--{name}", action="store_true", help=f"list {text}")
    made_list.add_argument("--top", type=int, default=20, metavar="N", help="rows of each list (default: 20; 0: all)")
    made_list.add_argument(
        "--json", action="store_true", help="print the lists (all, if none is named) as one JSON object"
    )
    made_list.add_argument("-o", "--output", metavar="FILE", help="CSV file to write the lists to")
    made_show = _action(actions, "show", show, "what the run learnt")
    for part in (made_list, made_show):
        part.add_argument(
            "--epochs", type=int, default=0, metavar="N", help="length of the run to forecast (default: as long)"
        )
    made_export = _action(actions, "export", export, "every column of the ledger as CSV")
    made_export.add_argument("-o", "--output", metavar="FILE", required=True, help="CSV file to write")
    made_merge = _action(actions, "merge", merge, "one ledger of several over the same data", several=True)
    made_merge.add_argument("-o", "--output", metavar="FILE", required=True, help="ledger to write (.npz)")
    made_compare = _action(actions, "compare", compare, "how far several networks agree on their samples", several=True)
    made_compare.add_argument(
        "--top", type=int, default=10, metavar="N", help="samples that are hard to rank to list (default: 10)"
    )
    made_history = _action(
        actions, "history", history, "how suspected, hard and easy samples developed, and what separates them"
    )
    made_history.add_argument(
        "--history", metavar="FILE", help="the run's history (default: history.npz beside its ledger)"
    )
    for part in (made_compare, made_history):
        part.add_argument(
            "--wrong", metavar="FILE", help="ids of labels known to be wrong, one per line, to measure against"
        )
        part.add_argument("--json", action="store_true", help="print one JSON object")
        part.add_argument("-o", "--output", metavar="FILE", help="page to write (.html)")


def _action(actions: Any, name: str, run: Any, text: str, *, several: bool = False) -> argparse.ArgumentParser:
    made = subcommand(actions, name, f"{text[0].upper()}{text[1:]}.", run)
    if several:
        made.add_argument("ledgers", nargs="+", metavar="RUN", help="folder of a run, or ledger file")
    else:
        made.add_argument("ledger", metavar="RUN", help="folder of a run, or ledger file")
    return made


def with_action(given: list[str]) -> list[str]:
    """The command line, with the action added that `salience scores RUN` leaves out."""
    at = next((i for i, word in enumerate(given) if not word.startswith("-")), len(given))
    if given[at : at + 1] != ["scores"] or given[at + 1 : at + 2] in ([], ["-h"], ["--help"]):
        return given
    return given if given[at + 1] in ACTIONS else [*given[: at + 1], ACTIONS[0], *given[at + 1 :]]


def list_run(args: argparse.Namespace) -> int:
    """Print the lists that were asked for, or everything the run learnt."""
    if args.top < 0:
        raise ConfigError(f"--top is {args.top}; it must be at least 0, which lists all.")
    lists = [name for name in SECTIONS if getattr(args, name)]
    return find(args, lists or list(SECTIONS)) if lists or args.json or args.output else show(args)


def find(args: argparse.Namespace, lists: Sequence[str]) -> int:
    """Write the lists that were asked for, as text, JSON or CSV."""
    from salience.select.findings import findings

    known = kept(args.ledger)
    said = findings(known.ledger, known.near, top=args.top or None, names=known.classes)
    rows = {name: _rows(getattr(said, name), known) for name in lists}
    verdicts = {name: SAID[name](said) or NOT_SAID[name] for name in lists}
    if args.output:
        _write_rows(rows, Path(args.output))
    if args.json:
        counts = {name: value for name, value in asdict(said).items() if name not in SECTIONS}
        say(json.dumps({**counts, **{name: {"verdict": verdicts[name], "rows": rows[name]} for name in lists}}))
        return 0
    for number, name in enumerate(lists):
        say("\n" * bool(number) + verdicts[name])
        if rows[name] and not args.output:
            many = f"{len(rows[name]):,} " * (len(rows[name]) > 1)
            say(f"The {many}{ORDER[name]}:\n\n{_table(name, rows[name])}")
    if args.output:
        say(f"{words.count(sum(map(len, rows.values())), 'row')} written to {args.output}.")
    return 0


SAID: dict[str, Callable[[Findings], str]] = {
    "suspects": words.labels,
    "copies": words.near_copies,
    "hard": lambda found: words.hard(found) if found.hard else "",
}
NOT_SAID = {
    "suspects": "No label can be judged: give loader.loss() logits and integer targets.",
    "copies": "Near-copies were not looked for in this run.",
    "hard": "No losses were recorded: call loader.loss(losses, logits, targets) in the training step.",
}
ORDER = {"suspects": "most certain", "copies": "largest", "hard": "hardest"}
SURE = {"suspects": "wrong", "copies": "alike", "hard": "right"}
"""What the confidence of each list refers to."""


def _rows(found: Sequence[Any], known: Kept) -> list[dict[str, Any]]:
    """Findings as plain rows, with the names of files and classes if they are known."""
    rows: list[dict[str, Any]] = []
    for row in map(asdict, found):
        for key in ("label", "guess"):
            if 0 <= row.get(key, -1) < len(known.classes or ()):
                row[f"{key}_name"] = (known.classes or ())[row[key]]
        if known.file is not None:
            row["file"] = known.file(row["id"])
            if "members" in row:
                row["member_files"] = [known.file(i) for i in row["members"]]
        rows.append(row)
    return rows


def _table(name: str, rows: Sequence[dict[str, Any]]) -> str:
    """Rows as a readable table, with the file and the reason last."""
    has_file = "file" in rows[0]
    lines = [
        ["sample", SURE[name], "copies" if name == "copies" else "labelled", *(["file"] if has_file else []), "why"]
    ]
    for row in rows:
        sure = "-" if row["confidence"] is None else f"{row['confidence']:.0%}"
        cell = _members(row) if name == "copies" else str(row.get("label_name", row["label"]))
        lines.append([str(row["id"]), sure, cell, *([row["file"]] if has_file else []), row["reason"]])
    return columns(lines, right=(0, 1), indent="  ")


def _members(row: dict[str, Any]) -> str:
    others = [i for i in row["members"] if i != row["id"]]
    return ", ".join(map(str, others[:4])) + (f" and {len(others) - 4:,} more" if len(others) > 4 else "")


def _write_rows(rows: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Write all lists into one CSV; the column `list` names the list. Fields that a row lacks stay empty."""
    fields = dict.fromkeys(key for found in rows.values() for row in found for key in row)
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, ["list", *fields])
    writer.writeheader()
    for name, found in rows.items():
        for row in found:
            plain = {k: " ".join(map(str, v)) if isinstance(v, (list, tuple)) else v for k, v in row.items()}
            writer.writerow({"list": name, **plain})
    with written(path):
        write_text(path, text.getvalue())


def show(args: argparse.Namespace) -> int:
    """Show what a run learnt about its samples."""
    from salience.app.checkpoint import LOG
    from salience.report.text import render
    from salience.select import preset
    from salience.select.summary import summarise

    known = kept(args.ledger)
    told: dict[str, Any] = {}
    windows = max(1, int(known.ledger.last_seen.max()) + 1)
    if log_file(args.ledger).name == LOG and log_file(args.ledger).exists():
        story = open_run(args.ledger, whole=False).story
        windows = story.epochs
        told["evaluations"] = [(one.progress, one.metric) for one in story.evaluations]
        if story.selects and args.epochs <= 0:
            told["selected"] = (sum(window.finished for window in story.windows), story.visits)
    summary = summarise(known.ledger, preset("default"), windows=args.epochs if args.epochs > 0 else windows, **told)
    say(render(summary, names=known.classes))
    return 0


def export(args: argparse.Namespace) -> int:
    """Write a ledger as CSV: the sample's id and every column."""
    found = kept(args.ledger).ledger
    write_csv(found, Path(args.output))
    say(f"{found.n:,} samples written to {args.output}.")
    return 0


def merge(args: argparse.Namespace) -> int:
    """Merge several ledgers over the same data into one, so that they vote."""
    from salience import ledger as ledgers
    from salience.app.checkpoint import ledger_file

    merged = ledgers.merge([ledgers.load(ledger_file(path)) for path in args.ledgers])
    with written(args.output):
        ledgers.save(merged, args.output)
    say(f"{words.count(len(args.ledgers), 'ledger')} over {merged.n:,} samples merged into {args.output}.")
    return 0


def write_csv(found: Ledger, path: Path) -> None:
    """Write the id and every column, one sample per line; unknown values stay empty. The file appears whole or not at all."""
    columns = {name: found[name] for name in found}
    line = ",".join(["%d", *(_format(column) for column in columns.values())]) + "\n"
    with written(path), atomic(path) as file:
        file.write((",".join(["id", *columns]) + "\n").encode("ascii"))
        for start in range(0, found.n, CHUNK_ROWS):
            lists = [column[start : start + CHUNK_ROWS].tolist() for column in columns.values()]
            rows = zip(range(start, min(start + CHUNK_ROWS, found.n)), *lists, strict=True)
            file.write("".join([line % row for row in rows]).replace("nan", "").encode("ascii"))


def _format(column: np.ndarray) -> str:
    return f"%.{EXACT_DIGITS[column.itemsize]}g" if column.dtype.kind == "f" else "%d"
