"""Text of the command line: errors as one sentence, docstrings as help."""

from __future__ import annotations

import argparse
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from salience.errors import StateError, printable


def sentence(error: BaseException) -> str:
    """The message of an error, on one line.

    A DataLoader re-raises a worker's error with the worker's traceback as its text; the message is at its end.
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


@contextmanager
def written(path: str | Path) -> Generator[None]:
    """Turn an error with the file given as -o into one sentence."""
    try:
        yield
    except OSError as cause:
        raise StateError(f"{str(path)!r} cannot be written: {cause.strerror or cause}; choose another -o.") from cause
