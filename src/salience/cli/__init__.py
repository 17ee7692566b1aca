"""The `salience` command: one module per subcommand, whose docstring is its help."""

from __future__ import annotations

import argparse
import os
import re
import sys
from types import ModuleType

from salience.cli import compare, demo, doctor, feed, pack, plugins, profile, report, score, scores, train, tune
from salience.cli.text import sentence
from salience.errors import ConfigError, SalienceError, did_you_mean

COMMANDS: tuple[ModuleType, ...] = (
    demo,
    train,
    tune,
    feed,
    profile,
    report,
    compare,
    pack,
    scores,
    score,
    plugins,
    doctor,
)


def main(argv: list[str] | None = None) -> int:
    """Run one command line. Returns the exit status: 0, 2 for an error with a known cause, 130 for Ctrl-C."""
    given = sys.argv[1:] if argv is None else argv
    if not given:
        parser().print_help()
        return 0
    args, unknown = parse(given)
    try:
        if unknown:
            known = set(re.findall(r"--[a-z][a-z-]*", args.parser.format_help()))
            raise ConfigError(f"This command takes no {unknown[0]!r}.{did_you_mean(unknown[0], known)}")
        status: int = args.run(args)
        sys.stdout.flush()
        return status
    except SalienceError as error:
        if args.debug:
            raise
        print(f"salience: {sentence(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        if args.debug:
            raise
        print(f"salience: {stop or 'interrupted.'}", file=sys.stderr)
        return 130
    except BrokenPipeError:  # as in `salience plugins | head`: the reader has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def parse(given: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse a command line, with unknown arguments apart; those after -- belong to a script, as `arguments`."""
    own = given[: given.index("--")] if "--" in given else given
    args, unknown = parser().parse_known_args(scores.with_action(own))
    args.arguments = given[len(own) + 1 :]
    return args, unknown


def parser() -> argparse.ArgumentParser:
    from salience import __version__

    made = argparse.ArgumentParser(
        prog="salience", description="Train on what matters: an importance-aware training accelerator for PyTorch."
    )
    made.add_argument("--version", action="version", version=f"salience {__version__}")
    made.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = made.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add(commands)
    return made
