"""The I/O benchmark's own parts: a server that counts what it sends, and rows that deliver what was planned."""

from __future__ import annotations

import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from salience.feed.simulate import fetched

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def importable() -> Iterator[None]:
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


def ask(url: str, method: str = "GET", **headers: str) -> tuple[int, bytes, Any]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method=method, headers=headers)) as answer:
            return answer.status, answer.read(), answer.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(), error.headers


def test_server_answers_ranges_and_counts_the_bytes_of_bodies(tmp_path: Path) -> None:
    from store_server import running

    data = bytes(range(256)) * 40
    (tmp_path / "a.bin").write_bytes(data)
    with running(tmp_path, rate=10e6, latency=0.001) as store:
        url = f"{store.url}/a.bin"
        assert ask(url)[:2] == (200, data)
        assert ask(url, Range="bytes=10-19")[:2] == (206, data[10:20])
        assert ask(url, Range="bytes=-5")[:2] == (206, data[-5:])
        assert ask(url, Range=f"bytes={len(data)}-")[0] == 416
        assert ask(f"{store.url}/../a.txt")[0] == 404
        status, body, headers = ask(url, "HEAD")
        assert (status, body, headers["Content-Length"]) == (200, b"", str(len(data)))
        counts = store.counts()
        assert (counts.bytes, counts.requests) == (len(data) + 15, 6)
        assert store.ranges() == [("a.bin", 0, len(data)), ("a.bin", 10, 10), ("a.bin", len(data) - 5, 5)]
        store.reset(rate=0)
        assert (store.counts().bytes, store.counts().requests) == (0, 0)


def test_a_row_sends_what_the_simulation_says_and_every_byte_has_its_sample(tmp_path: Path) -> None:
    from io_bound import of_samples, percentile
    from io_rig import SHARE, Bench, Row, Scale, consume, make
    from rivals import policy
    from store_server import running

    index = make(tmp_path, 100, size=20_000)
    plans = percentile(index.size, 3)
    simulated = fetched(policy("impact", int(SHARE * index.nbytes), index.size), plans, index.size)
    with running(tmp_path, rate=0, latency=0) as store:
        bench = Bench(url=store.url, folder=tmp_path, index=index, scale=Scale())
        row = Row(name="impact", plan="percentile", options=bench.write("percentile", plans))
        windows = consume(bench, row, [0.0] * 3, ranges=True)
    for window, expected, (ids, _) in zip(windows, simulated, plans, strict=True):
        ranges = [(path.removeprefix("shards/"), start, size) for path, start, size in window.ranges]
        sent, between = of_samples(ranges, index)
        assert sent.sum() + between == window.bytes
        sent, _ = of_samples(dict.fromkeys(ranges), index)  # a slow answer may have been asked for twice
        assert window.numbers.tolist() == bench.numbers[ids].tolist()
        assert sent.sum() == pytest.approx(expected, rel=0.05)  # what is put out while a batch holds it may stay
        assert set(np.flatnonzero(sent)) <= {*ids.tolist()}
        assert (sent[sent > 0] == index.size[sent > 0]).all()


def test_picks_follow_importance_and_importance_does_not_follow_size() -> None:
    from io_rig import pick, spread
    from rivals import bound

    rng = np.random.default_rng(0)
    sizes = rng.lognormal(0, 0.4, 1500)
    importance = spread(sizes)
    assert sorted(importance.tolist()) == pytest.approx(np.arange(1500) / 1500)
    missed = (importance * sizes)[importance < 0.8].sum() / sizes.sum()
    assert missed == pytest.approx(bound(0.2, 1.0), abs=0.001)  # of the 0.016 that the bar allows; by chance 0.003 off
    often = np.mean([pick(importance, rng) for _ in range(2000)], axis=0)
    assert np.abs(often - importance).max() < 0.06  # more than five standard deviations of 2000 coins


def test_uniform_runs_and_speedups_are_read_between_the_runs_that_were_made() -> None:
    from io_replay import Point, gap_at, reached_by

    curve = [Point(name="", kind="uniform", accuracy=a, seconds=s, passes=s) for a, s in ((89.0, 10.0), (91.0, 30.0))]
    assert reached_by(curve, 90.0) == pytest.approx(20.0)
    assert reached_by(curve, 88.0) is None
    assert reached_by(curve, 92.0) == 30.0
    assert gap_at([(2.0, 0.5), (3.0, 1.5)], 2.4) == pytest.approx(0.9)
    assert gap_at([(2.0, 0.5)], 2.4) is None
