"""Look into ledgers, export them and merge them.

    salience scores show runs/train
    salience scores export runs/train -o scores.csv
    salience scores merge runs/a runs/b -o both.npz
    salience train --ledger both.npz ...

A ledger is what a run knows of every sample. Wherever one is asked for, the folder of a run does as well.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from salience.cli.text import subcommand
from salience.errors import StateError

if TYPE_CHECKING:
    from salience.ledger import Ledger

DIGITS = {2: 5, 4: 9}
"""Bytes of a float -> digits that lose nothing of it."""
CHUNK = 1 << 16


def add(commands: Any) -> None:
    parts = subcommand(commands, "scores", __doc__, None).add_subparsers(metavar="ACTION", required=True)
    one = subcommand(parts, "show", "Say what a run learnt about its samples.", show)
    one.add_argument("ledger", help="ledger file, or folder of a run")
    one.add_argument(
        "--epochs", type=int, default=0, metavar="N", help="length of the run to forecast (default: as long)"
    )
    one = subcommand(parts, "export", "Write a ledger as CSV: the sample's id and every column.", export)
    one.add_argument("ledger", help="ledger file, or folder of a run")
    one.add_argument("-o", "--output", required=True, metavar="FILE", help="the CSV file to write")
    one = subcommand(parts, "merge", "Make one ledger of several over the same data, so that they vote.", merge)
    one.add_argument("ledgers", nargs="+", metavar="ledger", help="ledger file, or folder of a run")
    one.add_argument("-o", "--output", required=True, metavar="FILE", help="the ledger (.npz) to write")


def show(args: argparse.Namespace) -> int:
    from salience import ledger as ledgers
    from salience.checkpoint import ledger_file
    from salience.report.console import say
    from salience.report.observed import render
    from salience.select import preset
    from salience.select.summary import summarise

    found = ledgers.load(ledger_file(args.ledger))
    windows = args.epochs if args.epochs > 0 else max(10, int(found.last_seen.max()) + 1)
    say(render(summarise(found, preset("default"), windows=windows), names=_class_names(Path(args.ledger))))
    return 0


def export(args: argparse.Namespace) -> int:
    from salience import ledger as ledgers
    from salience.checkpoint import ledger_file
    from salience.report.console import say

    found = ledgers.load(ledger_file(args.ledger))
    write_csv(found, Path(args.output))
    say(f"{found.n:,} samples written to {args.output}.")
    return 0


def merge(args: argparse.Namespace) -> int:
    from salience import ledger as ledgers
    from salience.checkpoint import ledger_file
    from salience.report.console import say

    merged = ledgers.merge([ledgers.load(ledger_file(path)) for path in args.ledgers])
    try:
        ledgers.save(merged, args.output)
    except OSError as cause:
        raise _cannot_write(args.output, cause) from cause
    say(f"{len(args.ledgers)} ledgers over {merged.n:,} samples merged into {args.output}.")
    return 0


def write_csv(found: Ledger, path: Path) -> None:
    """id and every column, one sample a line; what is not known stays empty. The file appears whole or not at all."""
    columns = {name: found[name] for name in found}
    line = ",".join(["%d", *(_format(column) for column in columns.values())]) + "\n"
    part = path.with_name(path.name + ".part")
    try:
        with part.open("w", encoding="ascii", newline="") as file:
            file.write(",".join(["id", *columns]) + "\n")
            for start in range(0, found.n, CHUNK):
                lists = [column[start : start + CHUNK].tolist() for column in columns.values()]
                rows = zip(range(start, min(start + CHUNK, found.n)), *lists, strict=True)
                file.write("".join([line % row for row in rows]).replace("nan", ""))
        os.replace(part, path)
    except OSError as cause:
        part.unlink(missing_ok=True)
        raise _cannot_write(path, cause) from cause


def _format(column: np.ndarray) -> str:
    return f"%.{DIGITS[column.itemsize]}g" if column.dtype.kind == "f" else "%d"


def _cannot_write(path: str | Path, cause: OSError) -> StateError:
    return StateError(f"{str(path)!r} cannot be written: {cause.strerror or cause}; choose another -o.")


def _class_names(path: Path) -> list[str] | None:
    """The classes as the run called them, where `path` is its folder."""
    from salience import checkpoint

    try:
        names: list[str] = checkpoint.read(path / checkpoint.LAST)["classes"]
    except StateError:
        return None
    return names
