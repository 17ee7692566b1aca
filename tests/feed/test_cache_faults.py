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


def window(loader: salience.Loader, at: dict[int, Callable[[], Any]] | None = None) -> Batches:
    """The rest of a window; `at` so many batches, something happens."""
    seen: Batches = []
    for ids, (x, _) in loader:
        seen.append((ids.tolist(), x, loader.loss(x[:, 0].float() + ids).item()))
        (at or {}).get(len(seen), bool)()
    return seen


def windows(loader: salience.Loader, last: int = 2) -> Batches:
    return [batch for _ in range(loader.epoch, last) for batch in window(loader)]


def trouble(loader: salience.Loader, at: dict[int, Callable[[], Any]]) -> tuple[str, Batches]:
    """What stops the run, and the batches before it."""
    seen: Batches = []
    try:
        for ids, (x, _) in loader:
            seen.append((ids.tolist(), x, loader.loss(x[:, 0].float() + ids).item()))
            at.get(len(seen), bool)()
    except RuntimeError as error:  # a StoreError is one
        return f"{type(error).__name__}: {error}", seen
    return "", seen


def load(loader: salience.Loader, state: Any) -> salience.Loader:
    loader.load_state_dict(pickle.loads(pickle.dumps(state)))
    return loader


@pytest.mark.parametrize("workers", [0, 2])
def test_broken_samples_are_stood_in_for_and_told_as_without_a_cache(workers):
    with Server(objects()) as server:
        source = checked(server, retries=1)
        names = [source.names[i] for i in (5, 50, 100)]
        del server.objects[names[0]]
        server.objects[names[1]] = server.objects[names[1]][:-7]
        server.objects[names[2]] = b"x" + server.objects[names[2]][1:]

        def fresh(**options: Any) -> salience.Loader:
            return make(source, epochs=3, select="default", max_broken=0.1, **options)

        cache, states = share_of(source, 0.3), list[Any]()
        plain, loader = fresh(), fresh(cache=cache, num_workers=workers)
        whole = windows(plain, 3)
        seen = window(loader) + window(loader, {4: lambda: states.append(loader.state_dict())}) + window(loader)
        assert same(seen, whole)
        told = [sorted((e["id"], e["name"], e["reason"]) for e in events(run, "broken")) for run in (plain, loader)]
        assert told[0] == told[1]
        assert [(i, name) for i, name, _ in told[1]] == list(zip((5, 50, 100), names, strict=True))
        for reason in ("it is not there", "it is cut off", "do not have the checksum"):
            assert reason in loader.report()
        assert same(windows(load(fresh(cache=cache), states[0]), 3), whole[N // 8 + 4 :])


def test_a_sample_that_was_mended_is_read_again():
    with Server(objects()) as server:
        source = checked(server, retries=1)
        name, good = source.names[7], server.objects[source.names[7]]
        server.objects[name] = b"x" + good[1:]
        loader = make(source, cache="1GiB", max_broken=0.1)
        window(loader)
        server.objects[name] = good
        right(window(loader), source, server.objects)


@pytest.mark.parametrize("workers", [0, 2])
def test_errors_cut_answers_and_wrong_bytes_lose_and_double_nothing(workers):
    with Server(objects(400), BAD) as server:
        source = checked(server)
        loader = make(source, 16, cache=share_of(source, 0.2), num_workers=workers)
        for _ in range(2):
            seen = window(loader)
            right(seen, source, server.objects)
            assert sorted(i for ids, _, _ in seen for i in ids) == list(range(400))
        assert min(server.hurt[kind] for kind in ("errors", "cut", "wrong")) > 0
        assert not events(loader, "broken")


def test_a_stalled_connection_is_given_up_and_asked_again():
    with Server(objects()) as server:
        source = checked(server, deadline=1.0)
        server.faults = Faults(stalled=lambda path, nth: path == source.names[60] and nth == 0)
        seen = window(make(source, cache="20kB"))
        right(seen, source, server.objects)
        assert server.hurt["stalled"] == 1
        assert len(seen) == N // 8


@pytest.mark.parametrize("workers", [0, 2])
def test_a_server_that_restarts_in_mid_window_is_waited_for(workers):
    with Server(objects(400)) as server:
        source = checked(server)
        later = threading.Timer(0.3, server.restart)

        def restart() -> None:
            server.stop()
            later.start()

        loader = make(source, 4, cache="20kB", num_workers=workers)
        seen = window(loader, {3: restart})
        later.join()
        right(seen, source, server.objects)
        assert sorted(i for ids, _, _ in seen for i in ids) == list(range(400))
        assert source.stats.retried > 0


@pytest.mark.parametrize("workers", [0, 2])
def test_a_server_that_is_gone_stops_the_run_which_goes_on_exactly(workers):
    files = objects(400, low=9_000, high=20_000)  # more than is read ahead
    with Server(files) as server:
        source = checked(server, retries=1)

        def fresh() -> salience.Loader:
            return make(source, 4, cache="200kB", num_workers=workers)

        loader = fresh()
        said, seen = trouble(loader, {3: server.stop})
        assert said.startswith("StoreError: ")
        assert "cannot be read: the connection failed" in said
        assert "go on from its last checkpoint" in said
        state = loader.state_dict()
        server.restart()
        whole = windows(make(source, 4))
        assert 3 <= len(seen) < 100
        assert same(seen + windows(load(fresh(), state)), whole)
        assert same(seen + windows(load(loader, state)), whole)  # also where the old feeder is still there


def test_a_killed_worker_stops_the_run_and_the_resumed_one_delivers_the_rest():
    with Server(objects(), BAD) as server:

        def fresh() -> salience.Loader:
            return make(checked(server), cache="20kB", num_workers=2, prefetch_factor=1)

        before, loader = set(multiprocessing.active_children()), fresh()

        def kill() -> None:
            for worker in set(multiprocessing.active_children()) - before:
                if worker.name != "salience-feeder":
                    os.kill(worker.pid or 0, signal.SIGKILL)

        said, seen = trouble(loader, {2: kill})
        assert "RuntimeError: DataLoader worker" in said
        assert same(seen + windows(load(fresh(), loader.state_dict())), windows(make(checked(server))))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_killed_feeder_stops_the_window_and_the_next_one_has_a_new_one(workers):
    files = objects(400, low=9_000, high=20_000)
    with Server(files) as server:
        source = checked(server)
        loader = make(source, 4, cache="200kB", num_workers=workers)
        said, seen = trouble(loader, {3: lambda: os.kill(feeder(), signal.SIGKILL)})
        assert (
            said
            == (
                "StoreError: The process that reads from the store died. Go on from the last checkpoint, or begin the next window."
            )
            or "StoreError: Caught StoreError in DataLoader worker" in said
        )
        assert 3 <= len(seen) < 100
        state = loader.state_dict()
        whole = windows(make(source, 4), 3)
        assert same(windows(loader, 3), whole[100:])
        assert same(seen + windows(load(make(source, 4, cache="200kB"), state), 3), whole)
        sent = [event["bytes_sent"] for event in feed_events(loader)]
        assert 0 < sent[0] < sent[1]


def feeder() -> int:
    [found] = [child for child in multiprocessing.active_children() if child.name == "salience-feeder"]
    return found.pid or 0
