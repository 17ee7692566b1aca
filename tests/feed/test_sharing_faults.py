"""Processes that die, stop or fall behind: the others go on, nothing is lost, nothing is left behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from feed_jobs import JobProcess, alone, decode
from server import Server

import salience
from salience.feed.index import Index
from salience.feed.sharing import finding

pytest_plugins = ("feed_fixtures",)
pytestmark = pytest.mark.usefixtures("feeds")


def until(true: Callable[[], bool]) -> None:
    """Wait until it is true."""
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def status(name: str) -> dict[str, Any]:
    found = finding.ask(name, "status")
    assert found is not None
    return found


def test_a_job_killed_in_mid_batch_holds_up_nobody(served: Server, shards: Path, index: Index) -> None:
    feed = {"index": index, "decode": decode, "name": "killed", "cache": "32MiB"}
    doomed = JobProcess(served.url, feed=feed, batch_size=16, epochs=50, pause=0.01).begun()
    job = JobProcess(served.url, feed=feed, batch_size=16, epochs=3).begun()
    doomed.wait_for(3)
    doomed.kill()
    assert job.finish() == alone(salience.Source(shards, decode=decode), batch_size=16, epochs=3)
    until(lambda: not status("killed")["jobs"])
    assert status("killed")["claims"] == status("killed")["pins"] == 0


def test_a_job_survives_the_death_of_its_feed_and_starts_it_anew(served: Server, shards: Path, index: Index) -> None:
    feed = {"index": index, "decode": decode, "name": "dies", "cache": "32MiB"}
    jobs = [
        JobProcess(served.url, feed=feed, batch_size=16, seed=seed, epochs=3, pause=0.02, num_workers=seed).begun()
        for seed in range(2)
    ]
    for job in jobs:
        job.wait_for(4)
    old = status("dies")["pid"]
    os.kill(old, signal.SIGKILL)
    source = salience.Source(shards, decode=decode)
    for seed, job in enumerate(jobs):
        assert job.finish() == alone(source, batch_size=16, seed=seed, epochs=3)
        assert any("died; this job reads by itself until it is back" in text for text in job.said)
    assert status("dies")["pid"] != old


def test_a_stopped_feed_stays_stopped_and_its_jobs_go_on(served: Server, shards: Path, index: Index) -> None:
    feed = {"index": index, "decode": decode, "name": "stopped", "cache": "32MiB"}
    job = JobProcess(served.url, feed=feed, batch_size=16, epochs=2, pause=0.03).begun()
    job.wait_for(2)
    finding.ask("stopped", "stop")
    assert job.finish() == alone(salience.Source(shards, decode=decode), batch_size=16, epochs=2)
    assert finding.ask("stopped", "status") is None
    assert sum("was stopped" in text for text in job.said) == 1


def test_a_paused_job_is_waited_for_no_longer_than_was_agreed_and_is_told(
    served: Server, shards: Path, index: Index
) -> None:
    feed = {"index": index, "decode": decode, "name": "paused", "cache": 8000, "patience": 0.3}
    jobs = [JobProcess(served.url, feed=feed, wait=True, batch_size=8).begun() for _ in range(2)]
    wanted = alone(salience.Source(shards, decode=decode), batch_size=8)
    for job in jobs:
        job.go()
    slow, fast = jobs
    slow.wait_for(1)
    assert slow.process.pid is not None
    os.kill(slow.process.pid, signal.SIGSTOP)
    try:
        assert fast.finish() == wanted
    finally:
        os.kill(slow.process.pid, signal.SIGCONT)
    assert slow.finish() == wanted
    assert any("behind others with the same plan" in text for text in slow.said)
    assert not any("behind" in text for text in fast.said)


def test_of_jobs_that_start_a_feed_at_once_one_does(served: Server, index: Index) -> None:
    feed = {"index": index, "decode": decode, "name": "race", "cache": "32MiB"}
    jobs = [JobProcess(served.url, feed=feed, batch_size=16, wait=True) for _ in range(3)]
    for job in jobs:
        job.begun()
    assert len(status("race")["jobs"]) == 3
    for job in jobs:
        job.go()
    assert len({str(job.finish()) for job in jobs}) == 1


def test_nothing_is_left_of_a_feed(shards: Path, feeds: Path) -> None:
    before = set(os.listdir("/dev/shm")) if Path("/dev/shm").is_dir() else set[str]()
    feed = salience.SharedFeed(shards, name="clean", linger=0.2, decode=decode)
    loader = salience.Loader(feed, batch_size=16)
    assert len(list(loader)) == 10
    pid = status("clean")["pid"]
    del loader
    until(lambda: finding.ask("clean", "status") is None)
    until(lambda: not Path(f"/proc/{pid}").exists())
    assert [file.suffix for file in feeds.iterdir()] == [".lock"]
    assert not Path("/dev/shm").is_dir() or set(os.listdir("/dev/shm")) <= before


def test_a_socket_left_by_a_killed_feed_is_no_obstacle(shards: Path, feeds: Path) -> None:
    first = salience.SharedFeed(shards, name="again", decode=decode)
    os.kill(status("again")["pid"], signal.SIGKILL)
    until(lambda: finding.ask("again", "status") is None)
    assert (feeds / "again.sock").exists()
    assert salience.SharedFeed(shards, name="again", decode=decode).started
    assert len(list(salience.Loader(first, batch_size=16))) == 10
