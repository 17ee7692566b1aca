"""Text for the terminal: errors as one sentence, docstrings as help, rows as columns."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from salience.errors import printable


def sentence(error: BaseException) -> str:
    """What an error says, on one line.

    A DataLoader raises a worker's error anew with the worker's traceback as its text; the sentence stands at its end.
    """
    text, kind = str(error), type(error)
    mark = f"{kind.__module__}.{kind.__qualname__}: "
    if "Traceback (most recent call last)" in text and mark in text:
        text = text.rpartition(mark)[2]
    return printable(" ".join(text.split()))


def subcommand(commands: Any, name: str, docstring: str | None, run: Any) -> argparse.ArgumentParser:
    """A parser for one subcommand: the first line of the docstring is its short help, the whole docstring the long one."""
    text = (docstring or "").strip()
    made: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text.partition("\n")[0].rstrip("."),
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.set_defaults(run=run, parser=made)
    return made


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of text as left-aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
