"""Train an image classifier from a folder (class = directory), a tar of one, or packed shards, here or at a URL.

    salience train --data photos/ --model resnet9 --epochs 10
    salience train --data photos.tar.gz --select default --out runs/less
    salience train --data s3://bucket/shards --cache 4GiB --treat reuse --auto
    salience train --resume --out runs/less
    torchrun --nproc-per-node 2 -m salience train --data photos/ --balance --sync auto

If there is no test split, every tenth image of each class is held out. Without --select, training is plain, and
a report says what could be saved. --resume continues a killed run with its settings; options given again must be
the same. Ranks that torchrun restarts (--max-restarts) continue by themselves. A model of your own is code, which
a checkpoint alone never runs: pass --model again, or --trust.
"""

from __future__ import annotations

import argparse
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from salience.cli.text import subcommand
from salience.config import TrainConfig, read_toml, train_config
from salience.errors import MASK, ConfigError
from salience.report.console import say


def add(commands: Any) -> None:
    parser = subcommand(commands, "train", __doc__, run)
    parser.add_argument("--config", metavar="FILE", help="TOML file with [train] and [select]; the command line wins")
    parser.add_argument(
        "--trust", action="store_true", help="with --resume: import the model that the checkpoint names"
    )
    for field in fields(TrainConfig):
        assert field.default is not MISSING
        flag, text = f"--{field.name.replace('_', '-')}", str(field.metadata["help"])
        if isinstance(field.default, bool):
            parser.add_argument(flag, action="store_true", default=argparse.SUPPRESS, help=text)
            continue
        usual = "" if field.default in ("", 0) else f" (default: {field.default})"
        parser.add_argument(
            flag,
            type=type(field.default),
            default=argparse.SUPPRESS,  # only what was given: the rest comes from the file or the checkpoint
            metavar=field.name.rpartition("_")[2].upper(),
            help=text + usual,
        )


def run(args: argparse.Namespace) -> int:
    given = _from_file(args.config) if args.config else {}
    given |= {f.name: getattr(args, f.name) for f in fields(TrainConfig) if hasattr(args, f.name)}
    config = train_config(given)

    from salience.app import checkpoint  # and with it torch: not before the options are known to make sense
    from salience.app.train import train

    saved = None
    if config.resume or checkpoint.restarted(Path(config.out)):
        saved = checkpoint.newest(Path(config.out), say)
        config = train_config({**saved["config"], **given})
        _check_trust(config, given, trusted=args.trust)
        if MASK in config.sinks:
            raise ConfigError(
                f"The run sent figures to {config.sinks!r}, and a checkpoint keeps no password: give --sinks again, or the "
                "URL without it and MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the environment."
            )
    try:
        train(config, saved)
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(_advice(config, checkpoint.exists(Path(config.out)))) from stop
    return 0


def _from_file(path: str) -> dict[str, Any]:
    """The [train] table, and the file itself as `select` if it has a [select] table."""
    tables = read_toml(path)
    given = dict(tables.get("train", {}))
    if "select" in tables:
        if given.get("select"):
            raise ConfigError(
                f"{path!r} has train.select = {given['select']!r} and a [select] table; keep one of them."
            )
        if not path.endswith(".toml"):
            raise ConfigError(f"{path!r} has a [select] table, so its name must end in .toml; rename it.")
        given["select"] = str(Path(path).resolve())
    return given


def _check_trust(config: TrainConfig, given: dict[str, Any], *, trusted: bool) -> None:
    """Refuse a checkpoint whose model is code unless it is trusted: a checkpoint may come from anyone."""
    if ":" in config.model and "model" not in given and not trusted:
        raise ConfigError(
            f"The checkpoint in {config.out!r} names the model {config.model!r}, which is code to import; say so yourself "
            f"with --model {config.model}, or --trust the checkpoint."
        )


def _advice(config: TrainConfig, has_checkpoint: bool) -> str:
    if not has_checkpoint:
        return "interrupted before the first checkpoint; there is nothing to continue from."
    model = f" --model {config.model}" if ":" in config.model else ""
    return f"interrupted; continue from the last checkpoint with: salience train --resume --out {config.out}{model}"
