"""A folder for the feeds of a test, and shards that a server and a local folder both have."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from server import Server

from salience.feed.index import Index
from salience.feed.pack import PackSettings, pack
from salience.feed.sharing import finding

N = 160


@pytest.fixture
def feeds(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Feeds of this test alone; none of them is left behind."""
    with tempfile.TemporaryDirectory(prefix="sf") as folder:
        monkeypatch.setenv("SALIENCE_FEEDS", folder)
        Path(folder).chmod(0o700)
        yield Path(folder)
        for name in finding.names():
            status = finding.ask(name, "stop")
            if status is not None:
                os.kill(int(status["pid"]), signal.SIGTERM)


@pytest.fixture(scope="session")
def shards(tmp_path_factory: Any) -> Path:
    """N samples of 1 to 3 kB in shards, packed."""
    root: Path = tmp_path_factory.mktemp("samples")
    rng = np.random.default_rng(0)
    for i in range(N):
        file = root / "raw" / f"c{i % 4}" / f"{i:04}.bin"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(rng.bytes(int(rng.integers(1000, 3000))))
    pack(str(root / "raw"), str(root / "packed"), PackSettings(shard_size=64 * 1024))
    return root / "packed"


@pytest.fixture
def served(shards: Path) -> Iterator[Server]:
    """The shards over HTTP, with counts of what was sent."""
    with Server({file.name: file.read_bytes() for file in shards.iterdir()}) as server:
        yield server


@pytest.fixture(scope="session")
def index(shards: Path) -> Index:
    return Index.load(shards / "index.npz")
