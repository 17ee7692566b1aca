"""`python -m salience.feed.sharing SOCKET`: the process of a feed. It reads its configuration from standard input."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
from pathlib import Path

from salience.errors import SalienceError
from salience.feed.index import Index
from salience.feed.ranges import feeder_gap
from salience.feed.sharing import finding
from salience.feed.sharing.config import FeedConfig
from salience.feed.sharing.service import Service
from salience.feed.source import Source
from salience.feed.tiers import identity, open_tiers


def main(path: str) -> None:
    config = FeedConfig.loads(sys.stdin.readline())
    if os.fork():  # nobody's child: it outlives the job that started it
        return
    os.setsid()
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        _serve(config, path)
    except SalienceError as error:
        _say(str(error))
    except Exception as error:
        _say(f"{type(error).__name__}: {error}")
    os._exit(0)  # threads of the store's client do not always end


def _serve(config: FeedConfig, path: str) -> None:
    lock = finding.locked(path)
    try:
        index = Index.load(config.index)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(config.index)
    if finding.ask(config.name, "status") is not None:
        return _say("there")
    Path(path).unlink(missing_ok=True)  # left by one that was killed
    source = Source(
        config.url, index=index, retries=config.retries, deadline=config.deadline, concurrency=config.concurrency
    )
    mean = float(index.size.mean()) if len(index) else 0.0
    reader = source.reader.for_feeder(2, min(source.reader.gap, feeder_gap(mean)))
    tiers = open_tiers(config.disk, config.redis, index, source.url, lambda text: None)
    service = Service(config, identity(source.url, index), reader, tiers)

    def begun() -> None:
        os.close(lock)
        _say("begun")

    running = asyncio.run_coroutine_threadsafe(service.run(path, begun), reader.loop)
    signal.signal(signal.SIGTERM, lambda number, frame: service.stop())
    running.result()
    shutil.rmtree(finding.ledgers_of(config.name, service.identity), ignore_errors=True)


def _say(text: str) -> None:
    """Print the first and last line for the process that started this one, and detach from its pipes."""
    quiet = os.open(os.devnull, os.O_RDWR)
    with contextlib.suppress(OSError):
        os.write(1, text.encode() + b"\n")
    for number in (0, 1, 2):
        os.dup2(quiet, number)


if __name__ == "__main__":
    main(sys.argv[1])
