"""Faults of a real server and of workers: nothing lost, nothing doubled, the bytes right, and no secret told."""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import signal
import threading
import time
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from server import Faults, Server
from test_source import decode, packed, shards, vector

import salience
from salience.errors import StoreError
from salience.feed import Broken
from salience.feed.reads import Reader
from salience.feed.retry import RetryPolicy
from salience.feed.source import _of_objects
from salience.feed.stores import open_store

N = 400
SECRET = "hunter2-not-for-anyone"
BAD = Faults(errors=0.05, cut=0.01, wrong=0.01, seed=5)


def far_apart(n: int = N) -> tuple[dict[str, bytes], salience.feed.Index]:
    """Shards whose samples are too far from each other for one request."""
    return shards(n, per=50, hole=70_000)


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> dict[str, bytes]:
    files, index = far_apart()
    return {**files, "index.npz": packed(index, tmp_path_factory.mktemp("index"))}


def visits(loader: salience.Loader) -> list[int]:
    """One window: every sample's bytes compared, and the ids as they came."""
    seen: list[int] = []
    for ids, (x, y) in loader:
        assert torch.equal(x, torch.stack([decode(vector(i)) for i in ids.tolist()]))
        assert torch.equal(y, ids % 4)
        seen += ids.tolist()
    return seen


def test_errors_cut_answers_and_wrong_bytes_are_survived(served):
    with Server(served, BAD) as server:
        source = salience.Source(server.url)
        assert source.read(range(N)) == [vector(i) for i in range(N)]
        assert min(server.hurt[kind] for kind in ("errors", "cut", "wrong")) > 0
        assert source.stats.requests == N + source.stats.retried + source.stats.hedged
        assert source.stats.bytes_used == N * 32


@pytest.mark.parametrize(
    "context",
    ["fork", pytest.param("spawn", marks=pytest.mark.slow), pytest.param("forkserver", marks=pytest.mark.slow)],
)
def test_several_workers_lose_and_double_nothing(served, context):
    with Server(served, BAD) as server:
        source = salience.Source(server.url)
        source.read([0])  # the main process may read before it makes workers
        loader = salience.Loader(
            source, 32, decode=decode, with_ids=True, num_workers=2, multiprocessing_context=context
        )
        assert sorted(visits(loader)) == list(range(N))
        assert source.stats.samples == N + 1
        assert source.stats.bytes_used == (N + 1) * 32


def test_a_killed_worker_stops_the_run_and_the_resumed_one_delivers_the_rest(served):
    with Server(served, BAD) as server:

        def fresh() -> salience.Loader:
            source = salience.Source(server.url)
            return salience.Loader(source, 16, decode=decode, with_ids=True, num_workers=2, prefetch_factor=1)

        before = set(multiprocessing.active_children())
        loader, seen = fresh(), []
        with pytest.raises(RuntimeError, match=r"killed by signal|exited unexpectedly"):
            for ids, _ in loader:
                seen += ids.tolist()
                for worker in [*(set(multiprocessing.active_children()) - before)][
                    :1
                ]:  # of both, PyTorch may raise later
                    os.kill(worker.pid, signal.SIGKILL)
                    time.sleep(20)  # it raises wherever the main process is
        resumed = fresh()
        resumed.load_state_dict(loader.state_dict())
        rest = visits(resumed)
        assert 0 < len(rest) < N
        assert sorted(seen + rest) == list(range(N))


def test_a_stalled_request_is_doubled(served):
    with Server(served, Faults(stalled=lambda path, nth: path == "03.tar" and nth == 0)) as server:
        index = far_apart()[1]
        reader = Reader(open_store(server.url), index, RetryPolicy(hedge_share=0.5))
        ids = list(range(50))
        assert reader.read(ids) == [vector(i) for i in ids]
        assert reader.read([150]) == [vector(150)]
        assert server.hurt["stalled"] == 1
        assert (reader.counts.hedged >= 1, reader.counts.retried) == (True, 0)


def test_a_request_that_stalls_from_the_start_is_given_up_and_repeated(served):
    with Server(served, Faults(stalled=lambda path, nth: path == "00.tar" and nth == 0)) as server:
        source = salience.Source(server.url, deadline=1.0)
        assert source.read([0]) == [vector(0)]
        assert server.hurt["stalled"] == 1
        assert source.stats.hedged == 0


def test_a_server_that_restarts_is_waited_for(served):
    with Server(served) as server:
        source = salience.Source(server.url)
        assert source.read([0]) == [vector(0)]
        server.stop()
        later = threading.Timer(0.3, server.restart)
        later.start()
        assert source.read([0, 399]) == [vector(0), vector(399)]
        later.join()


@pytest.mark.parametrize("retries", [0, 2])
def test_a_server_that_only_fails_is_asked_again_as_often_as_allowed(served, retries):
    with Server(served) as server:
        source = salience.Source(server.url, retries=retries)
        server.faults, before = Faults(errors=1.0), server.requests
        with pytest.raises(StoreError, match=r"cannot be read: the server answers with status 500"):
            source.read([0])
        assert server.requests - before == 1 + retries


def test_a_server_that_is_gone_is_an_error_and_not_a_broken_sample(served):
    with Server(served) as server:
        source = salience.Source(server.url, retries=2)
    with pytest.raises(StoreError, match=r"'00\.tar' in http://127.* cannot be read: the connection failed"):
        source.read([0])


def test_what_is_not_there_or_denied_is_asked_for_once():
    with Server({"a": b"1", "c": b"3"}) as server:
        server.denied.add("c")
        index = _of_objects([("a", 1), ("b", 1), ("c", 1)], server.url)
        reader = Reader(open_store(server.url), index)
        assert reader.read([0, 1]) == [b"1", Broken("it is not there")]
        with pytest.raises(StoreError, match="access is denied"):
            reader.read([2])
        assert (server.asked["b bytes=0-0"], server.asked["c bytes=0-0"]) == (1, 1)


def test_a_shard_that_shrank_after_opening_gives_broken_samples(served):
    objects = dict(served)
    with Server(objects) as server:
        source = salience.Source(server.url, retries=1)
        objects["00.tar"] = objects["00.tar"][:75_000]
        first, second, last = source.read([0, 1, 399])
        assert (first, last) == (vector(0), vector(399))
        assert second == Broken("it ends before the sample does")


@pytest.fixture
def s3(monkeypatch):
    """The server as an S3 endpoint, with credentials in the environment."""
    objects: dict[str, bytes] = {}
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    with Server(objects) as server:
        settings = {"ENDPOINT_URL": server.url, "ALLOW_HTTP": "true", "REGION": "x", "ACCESS_KEY_ID": "me"}
        for name, value in {**settings, "SECRET_ACCESS_KEY": SECRET, "SESSION_TOKEN": SECRET}.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        yield server


def test_a_bucket_is_listed_once_and_read_by_objects(s3):
    s3.objects.update({"b/data/cat/1": b"meow", "b/data/ape/2": b"ook", "b/other/3": b"no"})
    source = salience.Source("s3://b/data")
    assert (source.classes, source.labels.tolist()) == (("ape", "cat"), [0, 1])
    assert source.read([0, 1]) == [b"ook", b"meow"]
    with pytest.raises(salience.DataError, match="nothing at s3://b/empty"):
        salience.Source("s3://b/empty")


def test_a_run_on_a_bucket_tells_no_secret(s3, tmp_path: Path, caplog, capfd):
    files, index = shards(60)
    index.check[7] = 1
    s3.objects.update({f"b/x/{name}": data for name, data in {**files, "index.npz": packed(index, tmp_path)}.items()})
    source = salience.Source("s3://b/x", retries=1)
    log = tmp_path / "log.jsonl"
    loader = salience.Loader(source, 16, decode=decode, log=log, max_broken=0.1)
    for x, _ in loader:
        loader.loss(x.sum(1))
    report = loader.report()
    assert "0007.bin" in report
    s3.denied.add("b/x/00.tar")
    with pytest.raises(StoreError, match="access is denied") as caught:
        source.read([0])
    state = json.dumps({k: str(v) for k, v in loader.state_dict().items()})
    told = [report, log.read_text(), caplog.text, *capfd.readouterr(), str(caught.value), repr(source), state]
    assert not [text for text in told if SECRET in text]
    assert np.isin("broken", [event["kind"] for event in loader.events.recent])


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format, *args):
        pass


def test_a_server_without_ranges_is_named_when_the_source_is_opened_with_what_to_do(served, tmp_path):
    """Python's own, which sends whole files."""
    for name, data in served.items():
        (tmp_path / name).write_bytes(data)
    handler = functools.partial(Quiet, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        with pytest.raises(StoreError, match=r"does not answer range requests\. Serve the files by one that does"):
            salience.Source(f"http://127.0.0.1:{server.server_port}", decode=vector)
        server.shutdown()
        thread.join()
