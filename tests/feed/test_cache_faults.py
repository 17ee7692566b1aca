"""Faults on the cached way: of the store, of samples, of workers, of the feeder, of the whole run, of disk and Redis."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import threading
import time
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
    Batches,
    N,
    children,
    feed_events,
    make,
    objects,
    on_disk,
    right,
    same,
    share_of,
    unhurried,
    visits,
    wait_until,
)
from test_io_select import EPOCHS, SELECT
from test_redis import serving

import salience
from salience.errors import StoreError
from salience.feed import cache as cached
from salience.feed.source import _of_objects
from salience.watch.probe import Probe

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


def feeders() -> set[int]:
    return {child.pid or 0 for child in multiprocessing.active_children() if child.name == "salience-feeder"}


@pytest.fixture
def near(monkeypatch):
    """No more is read ahead than workers hold, so that a window is not over before it begins."""
    monkeypatch.setattr(cached, "MIN_READ_AHEAD_BYTES", 0)


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
    except (RuntimeError, StoreError) as error:
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
            return make(source, epochs=3, max_broken=0.1, **options)

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
def test_a_server_that_restarts_in_mid_window_is_waited_for(near, workers):
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


@pytest.mark.parametrize("workers", [0, 2])
def test_a_server_that_is_gone_stops_the_run_which_goes_on_exactly(near, workers):
    with Server(objects(400)) as server:
        source = checked(server, retries=1)

        def fresh() -> salience.Loader:
            return make(source, 16, cache="20kB", num_workers=workers)

        loader = fresh()
        said, seen = trouble(loader, {3: server.stop})
        assert "StoreError: " in said
        assert "cannot be read: the connection failed. Nothing is wrong with the run" in said
        assert 3 <= len(seen) < 25
        state = loader.state_dict()
        server.restart()
        whole = windows(make(source, 16))
        assert same(seen + windows(load(fresh(), state)), whole)
        assert same(seen + windows(load(loader, state)), whole)  # also where the old feeder is still there


def test_a_killed_worker_stops_the_run_and_the_resumed_one_delivers_the_rest():
    with Server(objects(), BAD) as server:

        def fresh() -> salience.Loader:
            return make(checked(server), cache="20kB", num_workers=2, prefetch_factor=1)

        before, loader = children(), fresh()

        def kill() -> None:
            os.kill(min(children() - before - feeders()), signal.SIGKILL)
            time.sleep(20)  # PyTorch raises wherever the main process is

        said, seen = trouble(loader, {2: kill})
        assert "RuntimeError: DataLoader worker" in said
        assert same(seen + windows(load(fresh(), loader.state_dict())), windows(make(checked(server))))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_killed_feeder_stops_the_window_and_the_next_one_has_a_new_one(near, workers):
    with Server(objects(400)) as server:
        source, others = checked(server), feeders()
        loader = make(source, 16, cache="20kB", num_workers=workers)
        said, seen = trouble(loader, {3: lambda: os.kill((feeders() - others).pop(), signal.SIGKILL)})
        assert "StoreError: The process that reads from the store died. Go on from the last checkpoint" in said
        assert 3 <= len(seen) < 25
        state = loader.state_dict()
        later = window(loader)
        right(later, source, server.objects)
        assert sorted(i for ids, _, _ in later for i in ids) == list(range(400))
        assert same(seen + windows(load(make(source, 16, cache="20kB"), state)), windows(make(source, 16)))


def steps(url: str, index: Any, folder: Path, workers: int) -> None:
    """A run that saves its state after every batch."""
    source = salience.Source(url, index=index)
    loader = make(source, cache="20kB", num_workers=workers)
    for _ in range(2):
        for ids, _ in loader:
            torch.save((ids, loader.state_dict()), folder / "half")
            os.rename(folder / "half", folder / f"{len(os.listdir(folder)):03}.pt")
    os._exit(0)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])  # idle workers look every 5 s
def test_a_killed_run_leaves_no_process_behind_and_goes_on_exactly(near, tmp_path, workers):
    with Server(objects()) as server:
        source = checked(server)
        run = FORK.Process(target=steps, args=(server.url, source.index, tmp_path, workers))
        run.start()
        assert wait_until(lambda: len(list(tmp_path.glob("*.pt"))) >= 5)
        helpers = children(run.pid or 0)
        run.kill()
        run.join()
        assert len(helpers) == 1 + workers
        assert wait_until(lambda: not any(map(runs, helpers)))
        saved = [torch.load(file, weights_only=True) for file in sorted(tmp_path.glob("*.pt"))]
        whole = windows(make(source))
        assert [ids.tolist() for ids, _ in saved] == [ids for ids, _, _ in whole[: len(saved)]]
        loader = make(source, cache="20kB", num_workers=workers)
        assert same(windows(load(loader, saved[-1][1])), whole[len(saved) :])


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture
def full_disk(tmp_path):
    """A file system with room for a few samples."""
    place = tmp_path / "small"
    place.mkdir()
    mount = shutil.which("mount")
    command = [mount or "mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(place)]
    done = mount is not None and subprocess.run(command, capture_output=True).returncode == 0
    require(done, "the right to mount a file system")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_disk_that_is_full_is_one_warning_and_the_batches_are_the_same(near, full_disk):
    with Server(objects(low=2000, high=4000)) as server:
        source = checked(server)
        loader = make(source, disk=f"{full_disk}:1GB")
        assert same(windows(loader), windows(make(source)))
        [warning] = events(loader, "warning")
        assert "takes no more samples (No space left on device)" in str(warning)
        counts = feed_events(loader)[-1]["cache"]
        assert 0 < counts["disk_bytes"] < source.sizes.sum()
        assert counts["disk_bytes"] + counts["bytes_used"] == counts["bytes"]


def test_a_redis_that_is_killed_in_mid_window_is_one_warning_and_the_batches_are_the_same(near, tmp_path):
    with Server(objects()) as server, serving(tmp_path) as redis:
        source = checked(server)
        loader = make(source, redis=redis.url)
        seen = window(loader) + window(loader, {5: redis.kill})
        assert same(seen, windows(make(source)))
        [warning] = events(loader, "warning")
        assert "is not used for now (no connection)" in str(warning)
        counts = feed_events(loader)[-1]["cache"]
        assert 0 < counts["redis_hits"] < N
        assert counts["redis_bytes"] + counts["bytes_used"] == counts["bytes"]


def delivered(url: str, index: Any, disk: str, out: Any) -> None:
    """A run of its own: what it delivered, and what it asked of the store."""
    loader = make(unhurried(salience.Source(url, index=index)), cache="20kB", disk=disk)
    out.send(([(ids, x.tolist()) for ids, x, _ in window(loader)], feed_events(loader)[-1]["cache"]))
    out.close()


def test_runs_share_a_disk_and_the_next_reads_nothing_from_the_server(tmp_path):
    with Server(objects()) as server:
        source = checked(server)

        def runs(count: int) -> list[Any]:
            pipes = [multiprocessing.Pipe(duplex=False) for _ in range(count)]
            arguments = [(server.url, source.index, str(tmp_path), there) for _, there in pipes]
            started = [FORK.Process(target=delivered, args=given) for given in arguments]
            for run in started:
                run.start()
            for _, there in pipes:
                there.close()
            found = [here.recv() for here, _ in pipes]
            for run in started:
                run.join()
            return found

        whole = [(ids, x.tolist()) for ids, x, _ in window(make(source))]
        asked = server.requests
        both = runs(2)  # at the same time
        assert [batches for batches, _ in both] == [whole, whole]
        assert N <= server.requests - asked <= 2 * N
        asked = server.requests
        [(batches, counts)] = runs(1)
        assert batches == whole
        assert server.requests == asked
        assert (counts["requests"], counts["disk_bytes"]) == (0, source.sizes.sum())
        assert not [file for file in tmp_path.rglob(".*") if file.is_file()]  # nothing half written


def on_two_ranks(work: Callable[..., None], *arguments: Any) -> list[Any]:
    """What `work(rank, *arguments, pipe)` sends, in a process a rank."""
    pipes = [multiprocessing.Pipe(duplex=False) for _ in range(2)]
    ranks = [FORK.Process(target=work, args=(k, *arguments, pipes[k][1])) for k in range(2)]
    for rank in ranks:
        rank.start()
    for _, there in pipes:
        there.close()
    found = [here.recv() for here, _ in pipes]
    for rank in ranks:
        rank.join()
    return found


def rank_work(rank: int, meet: Path, url: str, index: Any, out: Any) -> None:
    """Two windows with a cache and without, a state in the middle of the second, and the rest of it resumed."""
    try:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", init_method=meet.as_uri(), rank=rank, world_size=2)
        source = unhurried(salience.Source(url, index=index))

        def fresh(**options: Any) -> salience.Loader:
            return make(source, 4, epochs=2, select="infobatch", **options)

        states: list[Any] = []
        loader = fresh(cache=share_of(source, 0.25))
        loader.probe = Probe(first=2, depth=4, timed=4) if rank == 0 else None  # it holds batches back, the other waits
        seen = window(loader, dict.fromkeys(range(1, 16), dist.barrier))
        counts, processes = loader._run.feeding.feed.counts(), len(feeders())
        dist.barrier()
        seen += window(loader, {6: lambda: states.append(loader.state_dict())})
        again = load(fresh(cache=share_of(source, 0.25)), states[0])
        rest = windows(again)
        plain = windows(fresh())
        ids = [i for batch, _, _ in seen[:15] for i in batch]
        out.send((ids, processes, counts, visits(seen), visits(plain), same(rest, seen[21:]), len(seen)))
        dist.barrier()
    except BaseException:
        out.send(traceback.format_exc())
    os._exit(0)  # Gloo's threads do not always end


def test_ranks_of_a_node_share_one_feeder_and_resume_together(near, tmp_path):
    with Server(objects()) as server:
        index, meet = checked(server).index, tmp_path / "meet"
        asked = server.requests
        found = on_two_ranks(rank_work, meet, server.url, index)
        assert not [text for text in found if isinstance(text, str)], found
        assert sorted(found[0][0] + found[1][0]) == list(range(N))
        assert [processes for _, processes, *_ in found] == [1, 0]
        assert sorted(found[0][3] + found[1][3]) == sorted(found[0][4] + found[1][4])
        for _, _, counts, _, _, as_resumed, batches in found:
            assert (counts["samples"], counts["requests"], counts["fetched_samples"]) == (N, N, N)  # each once
            assert as_resumed
            assert batches > 21
        assert server.requests > asked + 2 * N


def rank_with_broken(rank: int, meet: Path, url: str, index: Any, allowed: float, out: Any) -> None:
    """Windows until the run is stopped, or three."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=meet.as_uri(), rank=rank, world_size=2)
    loader = make(salience.Source(url, index=index, retries=1), 4, epochs=3, max_broken=allowed)
    try:
        windows(loader, 3)
        out.send(("", loader.epoch))
    except Exception as error:
        out.send((str(error), loader.epoch))
    dist.barrier()
    os._exit(0)


@pytest.mark.parametrize("allowed", [0.03, 0.05])
def test_ranks_stop_together_when_all_of_them_have_found_too_many_broken(tmp_path, allowed):
    with Server(objects()) as server:
        source = checked(server)
        for i in range(0, 50, 10):
            del server.objects[source.names[i]]
        found = on_two_ranks(rank_with_broken, tmp_path / "meet", server.url, source.index, allowed)
    if allowed == 0.05:
        assert found == [("", 3), ("", 3)]
    else:
        assert all("5 of 120 samples are broken, more than max_broken = 0.03" in said for said, _ in found)
        assert [epoch for _, epoch in found] == [0, 0]  # at the end of the first window


@pytest.mark.parametrize("how", ["left", "killed"])
def test_plans_that_follow_the_cache_are_the_same_after_a_window_that_was_not_finished(near, tmp_path, how):
    """Of such a window nobody knows beforehand how far it was read; from there on all is determined."""
    folder = on_disk(tmp_path / "set", objects(240))

    def fresh() -> salience.Loader:
        source = salience.Source(folder)
        return make(source, 16, epochs=EPOCHS, select=SELECT, cache=share_of(source, 0.2))

    loader, others, states = fresh(), feeders(), list[Any]()
    for _ in range(2):
        window(loader)
    for k, (ids, (x, _)) in enumerate(loader):
        loader.loss(x[:, 0].float() + ids)
        if k == 2:
            break
    if how == "killed":
        os.kill((feeders() - others).pop(), signal.SIGKILL)
        assert wait_until(lambda: feeders() <= others)
    rest = window(loader, {2: lambda: states.append(loader.state_dict())})[2:] + windows(loader, EPOCHS)
    assert same(windows(load(fresh(), states[0]), EPOCHS), rest)
