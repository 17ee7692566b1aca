"""Finds the feeds of this machine by name, and starts them: a folder of sockets that belongs to one user."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from salience._version import __version__
from salience.errors import ConfigError, StoreError
from salience.feed.index import Index
from salience.feed.sharing.config import FeedConfig
from salience.feed.sharing.wire import Gone, Line

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
LONGEST_PATH = 100
"""Maximum number of characters in the path of a socket."""


def folder() -> Path:
    """The folder of this user's feeds, created if missing: $SALIENCE_FEEDS, or one below $XDG_RUNTIME_DIR or /tmp."""
    given, runtime = os.environ.get("SALIENCE_FEEDS"), os.environ.get("XDG_RUNTIME_DIR")
    if given:
        place = Path(given)
    elif runtime and os.access(runtime, os.W_OK):
        place = Path(runtime) / "salience"
    else:
        place = Path(tempfile.gettempdir()) / f"salience-{os.getuid()}"
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = place.lstat()
    if found.st_uid != os.getuid() or place.is_symlink() or found.st_mode & 0o077:
        raise ConfigError(
            f"{str(place)!r} is where feeds are found, and others may read or write there; set SALIENCE_FEEDS to a folder that "
            "only you may open (mode 700)."
        )
    return place


def socket_of(name: str) -> str:
    """Path of the socket of the feed with this name."""
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} is no name for a feed; use letters, digits, dots, dashes and underlines, 64 characters at most."
        )
    path = str(folder() / f"{name}.sock")
    if len(path) > LONGEST_PATH:
        raise ConfigError(f"{path!r} is too long for a socket; set SALIENCE_FEEDS to a folder with a shorter path.")
    return path


def ledgers_of(name: str, identity: str) -> Path:
    """The folder of what the jobs of a feed have learnt about its samples."""
    return Path(f"{socket_of(name).removesuffix('.sock')}.{identity[:8]}.ledgers")


def names() -> list[str]:
    """Names of the feeds that are running, or that were killed."""
    return sorted(path.stem for path in folder().glob("*.sock"))


def ask(name: str, what: str, words: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
    """A feed's answer to "status", "fits" or "stop"; None if it is not running."""
    try:
        line = Line(socket_of(name), timeout=10.0)
        try:
            return dict(line.ask("hello", {"version": __version__, **(words or {}), "role": "ask", "what": what}).words)
        finally:
            line.close()
    except Gone:
        return None


def ensure(config: FeedConfig, index: Index) -> bool:
    """Make sure that a feed with this name is running; True if it was started now."""
    if ask(config.name, "status") is not None:
        return False
    with launch(config, index) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        words = process.stdout.readline().strip() or process.stderr.read()[-500:].strip()
    if words == "there":
        return False
    if words != "begun":
        raise StoreError(f"The feed {config.name!r} could not be started: {words or 'its process ended.'}")
    return True


def launch(config: FeedConfig, index: Index) -> subprocess.Popen[str]:
    """Start the process of a feed; if several start at once, one remains. It prints "begun", "there", or what is wrong."""
    path = socket_of(config.name)
    file = f"{path.removesuffix('.sock')}.{os.getpid()}.npz"
    index.save(file)  # the process removes it
    process = subprocess.Popen(
        [sys.executable, "-m", "salience.feed.sharing", path],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, text=True,
    )  # fmt: skip
    assert process.stdin is not None
    try:
        process.stdin.write(replace(config, index=file).dumps() + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        pass  # it failed, and what it says tells why
    return process


def locked(path: str) -> int:
    """A descriptor that holds the lock on a feed's name, so that of two feeds started at once only one serves."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(f"{path.removesuffix('.sock')}.lock", flags, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor
