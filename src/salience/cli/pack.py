"""Pack a folder into tar shards with a byte index, or index the shards you have.

    salience pack photos/ shards/ --shard-size 64MiB    class = directory; ordinary WebDataset tars and index.npz
    salience pack --index-only shards/                  an index for existing tars, nothing is repacked
    salience pack --check shards/                       read everything back and compare it with the index

Samples are shuffled by --shuffle-seed, so that any contiguous range of a shard mixes the classes. .txt and .json files
stay with the file of the same name. If the command was killed, run it again to continue.
"""

from __future__ import annotations

import argparse
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from salience.cli.text import subcommand
from salience.errors import ConfigError, StateError
from salience.report.console import bars, say

if TYPE_CHECKING:
    from salience.feed import Index
    from salience.feed.tars import Progress


def add(commands: Any) -> None:
    parser = subcommand(commands, "pack", __doc__, run)
    parser.usage = "salience pack DIR OUT [options] | --index-only SHARDS | --check OUT"
    parser.add_argument("words", nargs="*", metavar="DIR OUT", help="folder to pack, and folder for the shards")
    parser.add_argument("--shard-size", default="64MiB", metavar="SIZE", help="of a shard at most (default: 64MiB)")
    parser.add_argument("--shuffle-seed", type=int, default=0, metavar="N", help="of the samples' order (default: 0)")
    parser.add_argument("--jobs", type=int, default=4, metavar="N", help="shards at the same time (default: 4)")
    parser.add_argument("--index-only", metavar="SHARDS", help="make the index of a folder of plain .tar files")
    parser.add_argument("--no-checksums", action="store_true", help="with --index-only: read headers alone")
    parser.add_argument("--check", metavar="OUT", help="read shards back and compare them with their index")


def run(args: argparse.Namespace) -> int:
    if sum((bool(args.words), args.index_only is not None, args.check is not None)) != 1 or len(args.words) not in (
        0,
        2,
    ):
        raise ConfigError("pack takes DIR and OUT, or --index-only SHARDS, or --check OUT.")
    if args.no_checksums and args.index_only is None:
        raise ConfigError("--no-checksums goes with --index-only; what pack writes has checksums.")
    from salience.feed.sizes import parse_bytes

    size = parse_bytes(args.shard_size)
    if args.index_only is not None:
        return _index(Path(args.index_only), not args.no_checksums, args.jobs)
    return _check(Path(args.check), args.jobs) if args.check is not None else _pack(args, size)


def _pack(args: argparse.Namespace, size: int) -> int:
    from salience.feed.pack import PackSettings, pack

    folder, out = args.words
    with _shown("pack", "repeat the command to continue: complete shards are kept") as progress:
        index = pack(
            folder, out, PackSettings(shard_size=size, seed=args.shuffle_seed), jobs=args.jobs, progress=progress
        )
    say(f"{_what(index)} in {out}.")
    return 0


def _index(shards: Path, checksums: bool, jobs: int) -> int:
    from salience.feed import index as indices
    from salience.feed.tars import index_shards, save

    if (shards / indices.FILE).exists():
        raise StateError(f"{shards} has an {indices.FILE}; check it with --check, or remove it to make it again.")
    with _shown("index", "nothing was written") as progress:
        index, skipped = index_shards(shards, checksums=checksums, jobs=jobs, progress=progress)
    save(index, shards)
    left_out = f" {skipped:,} entries are no samples (folders, links, hidden files, lone classes)." if skipped else ""
    say(f"{_what(index)} in {shards}.{left_out}")
    return 0


def _check(out: Path, jobs: int) -> int:
    from salience.feed.tars import check

    with _shown("check", "nothing was changed") as progress:
        index, problems = check(out, jobs=jobs, progress=progress)
    for problem in problems:
        say(problem)
    if problems:
        say(f"Not as the index says: {len(problems):,} of {len(index.shards):,} shards; the rest is.")
        return 1
    known = int((index.check != 0).sum())
    read = "every checksum fits" if known == len(index) else f"{known:,} checksums fit, the others are not known"
    say(f"All is as the index says: {_what(index)}; {read}.")
    return 0


@contextmanager
def _shown(name: str, interrupted: str) -> Generator[Progress]:
    """Show a progress bar in bytes; on Ctrl-C, say what was finished."""
    from salience.report.words import size

    try:
        with bars() as shown:
            yield lambda done, total: shown.update(name, done, total, f"{size(done)} of {size(total)}")
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(f"interrupted; {interrupted}.") from stop


def _what(index: Index) -> str:
    from salience.report.words import size

    classes = f" of {len(index.classes):,} classes" if index.classes else ""
    return f"{len(index):,} samples{classes}, {size(index.nbytes)}, {len(index.shards):,} shards"
