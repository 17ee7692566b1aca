"""Compare runs: results, visits and seconds, with an interval where there are several seeds.

    salience compare runs/all runs/less
    salience compare runs/all-0 runs/all-1 runs/all-2 runs/less-0 runs/less-1 runs/less-2 -o compare.html

Runs with the same settings except for the seed are one arm. Each arm is compared with the arm of the first run, seed by
seed; if the interval (Student's t, 95%) includes zero difference, the output says so.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from salience.cli.opening import open_run, run_name, write_page
from salience.cli.text import subcommand
from salience.errors import ConfigError
from salience.report.console import say, table


def add(commands: Any) -> None:
    parser = subcommand(commands, "compare", __doc__, run)
    parser.add_argument("paths", nargs="+", metavar="RUN", help="folder of a run, or its event log; two or more")
    parser.add_argument("-o", "--output", metavar="FILE", default="", help="HTML file to write")


def run(args: argparse.Namespace) -> int:
    from salience.report.compared import HEAD, compare, rows, said_of

    if len({Path(path).resolve() for path in args.paths}) < max(2, len(args.paths)):
        raise ConfigError(f"compare was given {', '.join(args.paths)}; name two or more different runs.")
    names = [run_name(Path(path)) for path in args.paths]
    names = names if len(set(names)) == len(names) else args.paths
    stories = [open_run(path, name=name, whole=False).story for path, name in zip(args.paths, names, strict=True)]
    compared = compare(stories)
    table("Side by side", HEAD, rows(compared))
    say()
    say("\n".join(said_of(compared)))
    for note in compared.notes:
        say(f"Note: {note}")
    if args.output:
        from salience.report.html import comparison_page

        write_page(comparison_page(compared), args.output)
        say(f"Written to {args.output}.")
    return 0
