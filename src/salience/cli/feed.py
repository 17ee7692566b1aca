"""Start, watch and stop feeds that the jobs of this machine share: bytes are read and samples decoded once for all of them.

    salience feed start photos --data photos/ --cache 8GiB
    salience train --data photos/ --feed photos --seed 1 --out runs/1    # and --seed 2, 3, ... beside it
    salience feed status
    salience feed stop photos

`start` serves the images that `salience train` would train on; with --all, every sample, like `salience.SharedFeed(url,
name=...)`. A feed started here runs until it is stopped. A feed started by a job ends a minute after the last job.
"""

from __future__ import annotations

import argparse
from typing import Any

from salience.cli.text import subcommand
from salience.errors import ConfigError
from salience.report.console import columns, say

ACTIONS = ("start", "status", "stop")


def add(commands: Any) -> None:
    parser = subcommand(commands, "feed", __doc__, run)
    parser.add_argument("action", choices=ACTIONS, help="what to do")
    parser.add_argument("name", nargs="?", default="", help="name of the feed; without it, `status` shows all")
    parser.add_argument("--data", default="", help="with start: folder, tar or URL, as for `salience train`")
    parser.add_argument(
        "--cache", default="", metavar="SIZE", help="memory for decoded samples (8GiB); without it, a quarter"
    )
    parser.add_argument("--size", type=int, default=0, help="pixels of a side, as for `salience train`")
    parser.add_argument(
        "--all", action="store_true", help="every sample below --data, not the images of the train split"
    )


def run(args: argparse.Namespace) -> int:
    if args.action != "status" and not args.name:
        raise ConfigError(f"Which feed? Write `salience feed {args.action} NAME`.")
    if args.action == "start":
        say(_started(args))
        return 0
    from salience.feed.sharing import finding

    if args.action == "stop":
        if finding.ask(args.name, "stop") is None:
            raise ConfigError(f"No feed {args.name!r} runs here; `salience feed status` shows those that do.")
        say(f"The feed {args.name!r} was stopped; its jobs read by themselves from here on.")
        return 0
    found = [finding.ask(name, "status") for name in ([args.name] if args.name else finding.names())]
    say("\n\n".join(told(status) for status in found if status is not None) or "No feed runs here.")
    return 0


def told(status: dict[str, Any]) -> str:
    """What a feed does, and for which jobs."""
    from salience.feed.sizes import size

    text = (
        f"{status['name']}: {status['url']}, process {status['pid']}. The store sent {size(status['bytes_sent'])} in "
        f"{status['requests']:,} requests; {status['published']:,} samples were decoded, and {status['held']:,} lie in "
        f"{size(status['used'])} of memory."
    )
    rows = [("process", "window", "batch", "samples", "were there", "decoded itself", "")]
    for job in status["jobs"]:
        rows.append(
            (
                str(job["pid"]), str(job["window"]), f"{job['batch']} of {job['batches']}", f"{job['samples']:,}",
                f"{job['hits']:,}", f"{job['decoded']:,}", "fell behind" if job["demoted"] else "",
            )
        )  # fmt: skip
    return f"{text}\n{columns(rows)}" if status["jobs"] else f"{text} No job reads from it."


def _started(args: argparse.Namespace) -> str:
    """Start a feed that runs until it is stopped."""
    if not args.data:
        raise ConfigError(f"What is it to read? Write `salience feed start {args.name} --data FOLDER_OR_URL`.")
    if args.all:
        from salience.feed.sharing.shared import SharedFeed

        feed = SharedFeed(args.data, name=args.name, cache=args.cache or None, linger=None)
    else:
        from salience.app.data import open_split

        feed = open_split(args.data, size=args.size, cache=args.cache, feed=args.name, linger=None).train
    state = "runs" if feed.started else "ran already"
    return f"The feed {args.name!r} {state}, with {len(feed):,} samples of {args.data}."
