"""auto over a network: the cache is on from the first window, is judged, and changes no batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from server import Faults, Server
from test_cache import N, go, make, objects, on_disk, same, served

import salience
from salience.events import read

pytest.importorskip("obstore")


def test_over_a_network_the_cache_is_on_from_the_first_window(tmp_path: Path):
    with Server(objects(), Faults(delay=0.05)) as server:  # so that a cache surely pays

        def loader(**more: Any) -> salience.Loader:
            return make(served(server), epochs=5, num_workers=1, **more)

        plain, asked = go(loader(), 5), server.requests
        log = tmp_path / "log.jsonl"
        assert same(go(loader(auto=True, log=log), 5), plain)
        assert server.requests - asked == N  # each sample once
        events = list(read(log))
        first = next(event for event in events if event["kind"] == "settings")
        assert (first["window"], first["cache"]) == (0, sum(map(len, server.objects.values())))
        [tried] = [e for e in events if e["kind"] == "decision" and e["action"] == "try" and "cache" in e["lever"]]
        assert tried["window"] == 1
        assert "filled it" in tried["reason"]
        assert loader(auto=True, cache=5000)._run.deciding.settings.cache == 5000  # what was given stays
        assert same(go(loader(auto=log), 5), plain)


def test_from_a_folder_it_is_not(tmp_path: Path):
    source = salience.Source(on_disk(tmp_path, objects()))
    assert salience.Loader(source, 6, epochs=5, decode=torch.tensor, auto=True)._run.deciding.settings.cache == 0
