"""Faults on the cached way: of the store, of samples, of workers, of the feeder, of the whole run, of disk and Redis."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import subprocess
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import xxhash
from server import Faults, Server
from test_cache import (
    N,
    Batches,
    children,
    feed_events,
    go,
    make,
    mark,
    objects,
    on_disk,
    right,
    same,
    served,
    share_of,
    wait_until,
)
from test_redis import serving

import salience
from salience.errors import StoreError
from salience.feed.source import _of_objects

from conftest import require

pytest.importorskip("obstore")
FORK = multiprocessing.get_context("fork")
BAD = Faults(errors=0.05, cut=0.01, wrong=0.01, seed=5)


def checked(server: Server, **options: Any) -> salience.Source:
    """The server's objects with their checksums."""
    names = sorted(server.objects)
    index = _of_objects([(name, len(server.objects[name])) for name in names], server.url)
    checks = [xxhash.xxh3_64_intdigest(server.objects[name]) for name in names]
    return salience.Source(server.url, index=replace(index, check=np.array(checks, np.uint64)), **options)


def events(loader: salience.Loader, kind: str) -> list[dict[str, Any]]:
    return [event for event in loader.events.recent if event["kind"] == kind]


def take(loader: salience.Loader, stop: int, at: dict[int, Callable[[], None]] | None = None) -> Batches:
    """The next `stop` batches; `at` a number of them something happens."""
    seen: Batches = []
    for ids, (x, _) in loader:
        seen.append((ids.tolist(), x, loader.loss(x[:, 0].float() + ids).item()))
        (at or {}).get(len(seen), lambda: None)()
        if len(seen) == stop:
            break
    return seen


def trouble(loader: salience.Loader, at: dict[int, Callable[[], None]]) -> tuple[str, Batches]:
    """What stops the run, and the batches before it."""
    seen: Batches = []
    try:
        for ids, (x, _) in loader:
            seen.append((ids.tolist(), x, loader.loss(x[:, 0].float() + ids).item()))
            at.get(len(seen), lambda: None)()
    except (StoreError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}", seen
    return "", seen


def resumed(loader: salience.Loader, state: Any, windows: int = 2) -> Batches:
    """What the run delivers that goes on from `state`."""
    loader.load_state_dict(pickle.loads(pickle.dumps(state)))
    return [batch for _ in range(loader.epoch, windows) for batch in take(loader, -1)]


def whole_run(server: Server, windows: int = 2, **options: Any) -> Batches:
    """Without a cache and without trouble."""
    loader = make(served(server), **options)
    return [batch for _ in range(windows) for batch in take(loader, -1)]


@pytest.mark.parametrize("workers", [0, 2])
def test_broken_samples_are_stood_in_for_and_told_as_without_a_cache(workers):
    with Server(objects()) as server:

        def fresh(**options: Any) -> salience.Loader:
            return make(source, epochs=3, select="default", max_broken=0.1, **options)

        source = checked(server, retries=1)
        names = [source.names[i] for i in (5, 50, 100)]
        del server.objects[names[0]]
        server.objects[names[1]] = server.objects[names[1]][:-7]
        server.objects[names[2]] = b"x" + server.objects[names[2]][1:]
        plain, loader = fresh(), fresh(cache=share_of(source, 0.3), num_workers=workers)
        whole = [batch for _ in range(3) for batch in take(plain, -1)]
        states: list[Any] = []
        seen = take(loader, -1)
        seen += take(loader, -1, {4: lambda: states.append(loader.state_dict())})
        seen += take(loader, -1)
        assert same(seen, whole)
        told = [sorted((e["id"], e["name"], e["reason"]) for e in events(run, "broken")) for run in (plain, loader)]
        assert told[0] == told[1]
        assert [(i, name) for i, name, _ in told[1]] == [(5, names[0]), (50, names[1]), (100, names[2])]
        assert [part in report for report in (loader.report(),) for part in ("not there", "cut off", "checksum")]
        assert same(resumed(fresh(cache=share_of(source, 0.3)), states[0], 3), whole[len(seen) - len(whole) + 19 :])
