"""Find out what holds a training script back, and what could be gained.

    salience profile train.py -- --my-option 3
    salience profile --data photos/ --model resnet9
    torchrun --nproc-per-node 2 -m salience profile train.py

The script is run unchanged, with its arguments, until a few hundred steps of its salience.Loader are measured; then it is
stopped. From time to time the next batches are held back, which times the loader alone, and released one after the other,
which times the loop alone; the batches are the same as without a profile. Under torchrun, gradient sync is a row of its own:
how long the loop waits for gradients of other ranks after its backward pass, or in salience.sync.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import runpy
import sys
import tempfile
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from salience.cli.text import subcommand
from salience.errors import ConfigError, DataError
from salience.files import write_text
from salience.report.console import say

MAX_FILES_SEARCHED = 1000
"""Python files beside a script that are searched for salience."""
LOADS_AS_IT_RUNS = ("import_module", "__import__", "runpy", "exec(")
"""With these a script may import what its text does not name."""


def add(commands: Any) -> None:
    parser = subcommand(commands, "profile", __doc__, run)
    parser.add_argument(
        "script", nargs="?", help="a script that trains with salience.Loader; what it is given goes after --"
    )
    parser.add_argument("--data", metavar="DATA", help="profile `salience train` on this folder or tar instead")
    parser.add_argument("--model", default="resnet9", metavar="MODEL", help="with --data (default: resnet9)")
    parser.add_argument("--batch-size", type=int, default=128, metavar="SIZE", help="with --data (default: 128)")
    parser.add_argument("--workers", type=int, default=2, metavar="WORKERS", help="with --data (default: 2)")
    parser.add_argument(
        "--probes", type=int, default=4, metavar="COUNT", help="times to hold batches back (default: 4)"
    )
    parser.add_argument("--whole", action="store_true", help="let the script run to its end")
    parser.add_argument("--json", metavar="FILE", help="write everything measured there as well")
    parser.add_argument("--log", metavar="FILE", help="append it to an event log, for `salience report`")


def run(args: argparse.Namespace) -> int:
    if bool(args.script) == bool(args.data):
        raise ConfigError("Name a script to profile, or --data for `salience train`; one of the two.")
    if args.script and not Path(args.script).is_file():
        raise ConfigError(f"There is no script {args.script!r}; check the spelling.")
    if args.script and not _mentions_salience(Path(args.script)):
        raise ConfigError(
            f"{args.script!r} makes no salience.Loader, and only its batches can be timed: put salience.Loader in the place of "
            "DataLoader, and loader.loss(losses) in the place of losses.mean()."
        )
    if args.probes < 1:
        raise ConfigError(f"--probes is {args.probes}; it must be at least 1.")

    from salience.watch.probe import Enough, Session, profiled, profiling
    from salience.watch.usage import missing_packages

    with profiling(Session(stop=not args.whole, times=args.probes)) as session:
        try:
            _run_script(args.script, args.arguments) if args.script else _run_train(args)
        except Enough:
            pass
        except SystemExit as end:
            if end.code not in (None, 0):
                say(f"The script ended with status {end.code}.")
    if not session.found:
        raise DataError(
            "The script made no salience.Loader: there is nothing to measure. Use it in the place of DataLoader."
        )
    found = session.measured()
    if found is None:
        steps = max(steps.count for _, steps, _ in session.found)
        raise DataError(
            f"The script made {steps} steps, too few to hold batches back and measure; let it train longer, or use "
            "smaller batches."
        )
    costs, steps = found
    from salience.report.profile import rendered

    if int(os.environ.get("RANK") or 0):
        return 0  # under torchrun rank 0 speaks
    made = profiled(
        costs, cores=os.cpu_count() or 1, losses=steps.losses, usage=session.usage.taken(), missing=missing_packages()
    )  # fmt: skip
    say(rendered(made))
    if args.json:
        write_text(args.json, json.dumps(asdict(made), indent=1))
    if args.log:
        from salience.events import EventLog

        EventLog(args.log).emit(made)
    return 0


def _mentions_salience(script: Path) -> bool:
    """True if the script or a module that it imports from beside it says salience: what can be known before it is run.

    A script that finds its modules while it runs may import any of those beside it.
    """
    folder, todo, known = script.resolve().parent, [script.resolve()], set[Path]()
    while todo:
        file = todo.pop()
        if file in known or not file.is_file():
            continue
        known.add(file)
        text = file.read_text(encoding="utf-8", errors="replace")
        if "salience" in text:
            return True
        if any(word in text for word in LOADS_AS_IT_RUNS):
            todo += islice(folder.rglob("*.py"), MAX_FILES_SEARCHED)
        todo += _imported(text, [folder, *file.parents[: len(file.parents) - len(folder.parents)]])
    return False


def _imported(text: str, folders: list[Path]) -> list[Path]:
    """Files that the modules imported in `text` may be, under each of the folders."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except SyntaxError:
        return []
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            base = f"{node.module}." if node.module else ""
            names |= {base.rstrip("."), *(base + alias.name for alias in node.names)}
    parts = [name.split(".") for name in names if name]
    paths = [folder.joinpath(*one[:k]) for folder in folders for one in parts for k in range(1, len(one) + 1)]
    return [file for path in paths for file in (path.with_suffix(".py"), path / "__init__.py")]


def _run_script(script: str, arguments: list[str]) -> None:
    """Run a script like `python script arguments`."""
    argv, path = sys.argv, sys.path[:]
    sys.argv, sys.path[0] = [script, *arguments], str(Path(script).resolve().parent)
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        sys.argv, sys.path[:] = argv, path


def _run_train(args: argparse.Namespace) -> None:
    from salience.app.train import train
    from salience.config import TrainConfig

    with tempfile.TemporaryDirectory(prefix="salience-profile-") as folder:
        train(
            TrainConfig(
                data=args.data,
                model=args.model,
                epochs=100,
                batch_size=args.batch_size,
                workers=args.workers,
                sync="allreduce" if int(os.environ.get("WORLD_SIZE") or 1) > 1 else "",
                out=folder,
            )
        )
