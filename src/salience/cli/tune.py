"""Search for settings: several runs of `salience train` over one feed, by Ray Tune, where bad ones are stopped early.

    salience tune --data photos/ --model cnn --lr 0.1,0.2,0.4 --seeds 3
    salience tune --data s3://bucket/shards --lr 0.1,0.4 --batch-size 64,128 --epochs 20 --at-once 4
    salience tune --data photos/ --lr 0.1,0.4 --select default --ledger share

Options with commas are tried in every combination, with each seed. Images are fetched and decoded once for all trials. After 1,
3, 9, ... epochs only trials among the best third go on (ASHA); --all stops none. With --ledger share, trials that select
start from what a scout has learnt in one epoch instead of warming up, all from the same. Each trial is a run in a folder of
its own below --out, which `salience report`, `compare` and `scores` read. Needs pip install 'salience[ray]'.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import MISSING, fields
from typing import Any

from salience.cli.text import subcommand
from salience.config import TrainConfig, train_config
from salience.errors import ConfigError

VARIED = ("model", "lr", "batch_size", "weight_decay", "select")
"""Options that may have several values."""
PASSED = ("data", "epochs", "size", "workers", "cache", "treat", "max_broken", "device")
"""Options that are the same for every trial."""


def add(commands: Any) -> None:
    parser = subcommand(commands, "tune", __doc__, run)
    settings = {field.name: field for field in fields(TrainConfig)}
    for name in (*VARIED, *PASSED):
        field = settings[name]
        assert field.default is not MISSING
        text = str(field.metadata["help"]) + ("; several with commas" if name in VARIED else "")
        usual = "" if field.default in ("", 0) or name == "workers" else f" (default: {field.default})"
        kind = str if name in VARIED else type(field.default)
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=kind, default=argparse.SUPPRESS,
            metavar=name.rpartition("_")[2].upper(), help=text + usual,
        )  # fmt: skip
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="trials of each combination (default: 1)")
    parser.add_argument("--at-once", type=int, default=0, metavar="N", help="trials at the same time; 0 = one per CPU")
    parser.add_argument("--cpus", type=float, default=1.0, metavar="N", help="CPUs of a trial (default: 1)")
    parser.add_argument("--gpus", type=float, default=0.0, metavar="N", help="GPUs of a trial, 0.5 for two on one")
    parser.add_argument("--ledger", choices=("none", "share"), default="none", help="share what is known of samples")
    parser.add_argument("--all", action="store_true", help="train every trial to its end")
    parser.add_argument("--feed", default="", metavar="NAME", help="name of the shared feed (default: from the data)")
    parser.add_argument("--out", default="runs/tune", help="folder for the runs (default: runs/tune)")


def run(args: argparse.Namespace) -> int:
    trials = trials_of(args)
    from salience.cli.searching import search

    search(trials, args)
    return 0


def trials_of(args: argparse.Namespace) -> list[tuple[str, TrainConfig]]:
    """Every combination with every seed, each with a name; checked, so that no search begins with a wrong option."""
    if not getattr(args, "data", ""):
        raise ConfigError(
            "There is nothing to train on: --data takes a folder (class = directory), a tar of one, or a URL."
        )
    for name in ("seeds", "at_once", "cpus", "gpus"):
        least = 1 if name == "seeds" else 0
        if getattr(args, name) < least:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be at least {least}.")
    grid = {name: _values(name, getattr(args, name)) for name in VARIED if hasattr(args, name)}
    fixed = {name: getattr(args, name) for name in PASSED if hasattr(args, name)}
    fixed.setdefault("workers", 0)  # a trial has one CPU
    several = [name for name, values in grid.items() if len(values) > 1]
    found: list[tuple[str, TrainConfig]] = []
    for values in itertools.product(*grid.values()):
        chosen = dict(zip(grid, values, strict=True))
        for seed in range(args.seeds):
            parts = [f"{_short(name)}{chosen[name] or 'none'}" for name in several]
            parts += [f"seed{seed}"] if args.seeds > 1 or not several else []
            name = "-".join(parts).replace("/", "_").replace(":", "_")
            table = {**fixed, **chosen, "seed": seed, "feed": args.feed, "out": f"{args.out}/{name}"}
            found.append((name, train_config(table)))
    return found


def _values(name: str, given: str) -> list[Any]:
    """The values of an option, separated by commas."""
    kind = type(getattr(TrainConfig(), name))
    values: list[Any] = []
    for part in given.split(","):
        try:
            values.append(kind(part.strip()))
        except ValueError as cause:
            words = {int: "whole numbers", float: "numbers"}[kind]
            raise ConfigError(
                f"--{name.replace('_', '-')} is {given!r}; it must be {words}, separated by commas."
            ) from cause
    if len(set(values)) < len(values):
        raise ConfigError(f"--{name.replace('_', '-')} is {given!r}, which names a value twice; drop one.")
    return values


def _short(name: str) -> str:
    return {"batch_size": "batch", "weight_decay": "decay", "model": "", "select": ""}.get(name, name)
