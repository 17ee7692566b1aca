"""Jobs that share a feed get what they would have got alone, and the node reads and decodes once."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from feed_jobs import JobProcess, alone, decode, other_decode, stages
from server import Server

import salience
from salience.errors import ConfigError
from salience.feed.index import Index
from salience.feed.sharing import finding

pytest_plugins = ("feed_fixtures",)
pytestmark = pytest.mark.usefixtures("feeds")
N = 160


def test_jobs_with_one_plan_read_and_decode_once_and_get_what_they_would_get_alone(
    served: Server, shards: Path, index: Index
) -> None:
    feed = {"index": index, "decode": decode, "name": "one", "cache": "32MiB"}
    jobs = [
        JobProcess(served.url, feed=feed, wait=True, batch_size=16, num_workers=1, epochs=2, augment=stages())
        for _ in range(3)
    ]
    for job in jobs:
        job.begun()
    for job in jobs:
        job.go()
    got = [job.finish() for job in jobs]
    wanted = alone(salience.Source(shards, decode=decode), batch_size=16, epochs=2, augment=stages())
    assert got == [wanted] * 3
    status = finding.ask("one", "status")
    assert status is not None
    assert status["published"] == N
    assert served.bytes <= 1.1 * sum(file.stat().st_size for file in shards.glob("*.tar"))


def test_jobs_with_plans_and_seeds_of_their_own_share_what_is_deterministic(
    served: Server, shards: Path, index: Index
) -> None:
    feed = {"index": index, "decode": decode, "name": "several", "cache": "32MiB"}
    jobs = [JobProcess(served.url, feed=feed, batch_size=16, seed=seed, augment=stages()) for seed in range(2)]
    jobs.append(JobProcess(served.url, feed={**feed, "decode": other_decode}, batch_size=10, seed=2, num_workers=1))
    got = [job.begun().finish() for job in jobs]
    source = salience.Source(shards, decode=decode)
    assert got[:2] == [alone(source, batch_size=16, seed=seed, augment=stages()) for seed in range(2)]
    assert got[2] == alone(source.using(decode=other_decode), batch_size=10, seed=2)
    status = finding.ask("several", "status")
    assert status is not None
    assert status["published"] == 2 * N  # once as the first two want them, once as the third does


def test_a_late_joiner_finds_what_is_in_the_cache(served: Server, index: Index) -> None:
    feed = {"index": index, "decode": decode, "name": "late", "cache": "32MiB"}
    JobProcess(served.url, feed=feed, batch_size=16).begun().finish()
    before = served.bytes
    assert len(JobProcess(served.url, feed=feed, batch_size=16, seed=5).begun().finish()) == N // 16
    assert (
        served.bytes <= before + 1
    )  # a source asks for one byte when it is opened, to see whether the server knows ranges


def test_a_feed_without_room_still_delivers_everything(served: Server, shards: Path, index: Index) -> None:
    feed = {"index": index, "decode": decode, "name": "narrow", "cache": 2000}
    job = JobProcess(served.url, feed=feed, batch_size=16, epochs=2).begun()
    assert job.finish() == alone(salience.Source(shards, decode=decode), batch_size=16, epochs=2)


def test_what_cannot_be_shared_is_decoded_by_each_and_said(shards: Path, caplog: pytest.LogCaptureFixture) -> None:
    feed = salience.SharedFeed(shards, name="closure", decode=lambda data: len(data))
    loader = salience.Loader(feed, batch_size=16)
    assert sum(len(batch[1]) for batch in loader) == N
    assert "this job decodes for itself" in caplog.text
    status = feed.status()
    assert status is not None
    assert status["published"] == 0


def test_bytes_are_shared_where_nothing_is_decoded(shards: Path) -> None:
    feed = salience.SharedFeed(shards, name="bytes")
    plain = salience.Loader(salience.Source(shards), batch_size=16)
    for wanted, got in zip(plain, salience.Loader(feed, batch_size=16), strict=True):
        assert wanted[0] == got[0]
        assert torch.equal(wanted[1], got[1])


def test_a_feed_of_other_data_under_the_same_name_is_refused(shards: Path, tmp_path: Path) -> None:
    salience.SharedFeed(shards, name="taken")
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "1.bin").write_bytes(b"other")
    with pytest.raises(ConfigError, match="reads other data"):
        salience.SharedFeed(tmp_path, name="taken")
    assert salience.SharedFeed(shards, name="taken").started is False


def test_a_job_of_another_version_is_refused(shards: Path) -> None:
    feed = salience.SharedFeed(shards, name="versions")
    answer = finding.ask("versions", "fits", {"identity": feed._identity, "version": "0.0.1"})
    assert answer is not None
    assert "this job is salience 0.0.1" in answer["text"]
    fits = finding.ask("versions", "fits", {"identity": feed._identity})
    assert fits is not None
    assert fits["text"] == ""


def test_a_cache_larger_than_the_machine_is_refused(shards: Path) -> None:
    with pytest.raises(ConfigError, match="of memory; use disk="):
        salience.SharedFeed(shards, cache="900TiB")


@pytest.mark.parametrize("name", ["", "../x", "a b", "x" * 65])
def test_a_name_that_is_no_file_name_is_refused(shards: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="no name for a feed"):
        finding.socket_of(name)


def test_options_of_the_feed_are_refused_by_the_loader(shards: Path) -> None:
    feed = salience.SharedFeed(shards, name="options")
    with pytest.raises(ConfigError, match="give it to the SharedFeed"):
        salience.Loader(feed, batch_size=16, cache="1MiB")


def test_jobs_on_a_feed_share_their_ledger_until_the_feed_ends(shards: Path, feeds: Path) -> None:
    feed = salience.SharedFeed(shards, name="knows")
    first = salience.Loader(feed, batch_size=16, ledger="share")
    for batch in first:
        first.loss(torch.ones(len(batch[1])))
    second = salience.Loader(salience.SharedFeed(shards, name="knows"), batch_size=16, ledger="share")
    assert (second.ledger.seen == 1).all()
    status = feed.status()
    assert status is not None
    finding.ask("knows", "stop")
    end = time.monotonic() + 30
    while Path(f"/proc/{status['pid']}").exists():
        assert time.monotonic() < end
        time.sleep(0.02)
    assert not list(feeds.glob("*.ledgers"))
