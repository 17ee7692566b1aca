"""Show what this machine has, and what is missing for which feature.

    salience doctor
    salience doctor --run train.py

Nothing is changed, and nothing that is missing is an error. With --run it reads a training script, runs nothing of it, and
lists the levers that it leaves unused: compilation, memory formats, fused optimizers, workers and others.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from salience.cli.text import subcommand
from salience.report.console import columns, say


class Extra(NamedTuple):
    package: str
    extra: str
    purpose: str


EXTRAS = (
    Extra("pillow", "images", "`salience train`, `salience demo`: reading and rendering images"),
    Extra("obstore", "feed", "data in s3://, gs://, az:// and https://"),
    Extra("xxhash", "feed", "checksums of samples"),
    Extra("redis", "redis", "a cache that several nodes share"),
    Extra("rich", "cli", "live progress bars; plain lines without it"),
    Extra("jinja2", "report", "`salience report` and `compare` as HTML"),
    Extra("psutil", "watch", "how busy processors, memory, disk and network are"),
    Extra("nvidia-ml-py", "watch", "how busy GPUs are"),
    Extra("tensorboard", "tensorboard", "the sink tensorboard:FOLDER"),
    Extra("wandb", "wandb", "the sink wandb:PROJECT"),
    Extra("mlflow-skinny", "mlflow", "the sink mlflow:URI"),
    Extra("lightning", "lightning", "`salience.frameworks.lightning`"),
    Extra("transformers", "transformers", "`salience.frameworks.transformers`"),
    Extra("accelerate", "accelerate", "loops of Accelerate, and `salience.frameworks.transformers`"),
    Extra("datasets", "datasets", "data sets of Hugging Face"),
    Extra("ray", "ray", "`salience tune`, `salience.frameworks.ray`"),
    Extra("optuna", "tune", "`salience.tune_select`"),
    Extra("pytorch-optimizer", "large", "`salience.large.optimizer`: LARS, LAMB, NovoGrad"),
)
"""The optional packages of pyproject.toml; a test compares."""
NUMERICS_IN_WORDS = {"exact": "exact", "rounding": "the same up to rounding", "lossy": "lossy"}
SMALL_SHM = 1 << 30
"""With less than this many bytes of /dev/shm, workers may run out: they pass every batch through it."""


def add(commands: Any) -> None:
    parser = subcommand(commands, "doctor", __doc__, run)
    parser.add_argument(
        "--run", dest="script", metavar="FILE", help="a training script: list the levers it leaves unused"
    )


def run(args: argparse.Namespace) -> int:
    if args.script:
        return of_script(args.script)
    from salience import __version__

    versions = {extra.package: version(extra.package) for extra in EXTRAS}
    rows = [
        ("salience", __version__),
        ("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        ("torch", version("torch") or "missing"),
        ("numpy", version("numpy") or "missing"),
        *accelerators(),
        ("CPU cores", cores()),
        ("memory", _gib(memory())),
        ("/dev/shm", _gib(shared_memory())),
        *((name, found or "missing") for name, found in versions.items()),
    ]
    say(columns(rows))
    say()
    complaints = advice(versions, shared_memory())
    say("\n".join(complaints) if complaints else "Nothing is missing.")
    return 0


def of_script(path: str) -> int:
    """Print the levers that a script leaves unused."""
    from salience.errors import ConfigError
    from salience.speed.script import unused_levers

    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as cause:
        why = getattr(cause, "strerror", None) or cause
        raise ConfigError(f"{path!r} cannot be read ({why}); --run takes the file of a training script.") from cause
    found = unused_levers(text, repr(path))
    for one in found:
        say(f"{path}:{one.line}: {one.lever} ({NUMERICS_IN_WORDS[one.numerics]}): {one.advice}")
    if found:
        say("\nsalience.tune(model, optimizer, loader) tries those of the step while training, and keeps what pays.")
    else:
        say("No lever that salience knows is left unused.")
    return 0


def advice(versions: dict[str, str | None], shm: int | None) -> list[str]:
    """One line for each thing that is missing, with what to do."""
    lines = [
        f"{extra.package} is missing, for {extra.purpose}: pip install 'salience[{extra.extra}]'"
        for extra in EXTRAS
        if versions[extra.package] is None
    ]
    if shm is not None and shm < SMALL_SHM:
        lines.append(
            f"/dev/shm has {_gib(shm)}, and workers pass batches through it: give a container more "
            "(docker run --shm-size=8g), or use --workers 0."
        )
    return lines


def version(package: str) -> str | None:
    """The installed version; the whole of MLflow serves as well as its slim package."""
    for name in (package, package.removesuffix("-skinny")):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return None


def accelerators() -> list[tuple[str, str]]:
    import torch

    found = [
        (f"cuda:{i}", f"{torch.cuda.get_device_name(i)}, {_gib(torch.cuda.get_device_properties(i).total_memory)}")
        for i in range(torch.cuda.device_count())
    ]
    if torch.backends.mps.is_available():
        found.append(("mps", "Apple GPU"))
    return found or [("accelerator", "none; training runs on the CPU")]


def cores() -> str:
    total = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else total
    return str(total) if usable == total else f"{usable} of {total} (this process may not use the others)"


def memory() -> int | None:
    """Bytes of memory this process may use: all of the machine's, or less in a container."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return None
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total


def shared_memory() -> int | None:
    try:
        room = os.statvfs("/dev/shm")
    except OSError:
        return None
    return room.f_blocks * room.f_frsize


def _gib(size: int | None) -> str:
    return "not known" if size is None else f"{size / (1 << 30):,.1f} GiB"
