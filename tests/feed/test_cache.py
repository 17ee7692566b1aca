"""The cached way through the Loader: the same batches as without, fewer bytes, and memory used again only when it may be."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from server import Faults, Server
from test_source import packed, shards

import salience
from salience.errors import ConfigError, DataError, StoreError
from salience.feed import cache as cached
from salience.feed.cache import Handle
from salience.feed.pack import PackSettings, pack
from salience.feed.ranges import feeder_gap
from salience.feed.shared import SERIAL_SHIFT, WHOLE, Shared
from salience.feed.simulate import Lru, NeverEvict, fetched
from salience.feed.sizes import size
from salience.feed.source import _of_objects
from salience.feed.space import slot
from salience.watch.probe import Probe

pytest.importorskip("obstore")
N = 120
Objects = dict[str, bytes]
Batches = list[tuple[list[int], torch.Tensor, float]]


def objects(n: int = N, low: int = 200, high: int = 2000) -> Objects:
    """Samples of four classes with `low` to `high` bytes."""
    rng = np.random.default_rng(n)
    return {f"c{i % 4}/{i:04}.bin": rng.bytes(int(rng.integers(low, high + 1))) for i in range(n)}


def mark(data: Any) -> torch.Tensor:
    """Bytes, or a view of them, as two numbers that no other sample has."""
    return torch.tensor([len(data), zlib.crc32(data)])


def on_disk(folder: Path, files: Objects) -> Path:
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    return folder


def served(server: Server) -> salience.Source:
    """The server's objects, each a sample; nothing is asked for twice for being slow, so that bytes can be compared."""
    index = _of_objects(sorted((path, len(data)) for path, data in server.objects.items()), server.url)
    return unhurried(salience.Source(server.url, index=index))


def unhurried(source: salience.Source) -> salience.Source:
    source.reader.retry = replace(source.reader.retry, hedge_least=60.0)
    return source


def share_of(source: salience.Source, share: float) -> int:
    return int(share * source.sizes.sum())


def make(source: salience.Source, batch_size: int = 8, **options: Any) -> salience.Loader:
    return salience.Loader(source, batch_size, decode=options.pop("decode", mark), with_ids=True, **options)


def go(loader: salience.Loader, windows: int, pause: float = 0.0) -> Batches:
    """What every batch was, and its loss."""
    seen: Batches = []
    for _ in range(loader.epoch, windows):
        for ids, (x, y) in loader:
            time.sleep(pause)
            assert torch.equal(y, torch.from_numpy(loader.dataset.source.labels)[ids])
            loss = loader.loss((ids * 7919 % 101 + x.sum(1) % 7 + loader.epoch).float() / 101)
            seen.append((ids.tolist(), x, loss.item()))
    return seen


def same(one: Batches, two: Batches) -> bool:
    return len(one) == len(two) and all(
        a[0] == b[0] and torch.equal(a[1], b[1]) and a[2] == b[2] for a, b in zip(one, two, strict=True)
    )


def visits(seen: Batches) -> list[tuple[int, list[int]]]:
    """Which samples were visited, with what they were, in whatever order."""
    return sorted((i, row) for ids, x, _ in seen for i, row in zip(ids, x.tolist(), strict=True))


def right(seen: Batches, source: salience.Source, files: Objects) -> None:
    """Every sample has its own bytes."""
    for ids, x, _ in seen:
        assert torch.equal(x, torch.stack([mark(files[source.names[i]]) for i in ids]))


def feed_events(loader: salience.Loader) -> list[dict[str, Any]]:
    return [event for event in loader.events.recent if event["kind"] == "feed"]


def children(of: int | str = "self") -> set[int]:
    """Processes of a process, those that ended and were not waited for included."""
    return {int(pid) for file in Path(f"/proc/{of}/task").glob("*/children") for pid in file.read_text().split()}


def wait_until(true: Callable[[], bool], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.01)
    return true()


@contextlib.contextmanager
def store(kind: str, folder: Path) -> Iterator[Callable[[], salience.Source]]:
    """A way to open the same samples again: "objects" or "shards", "local" or "http"."""
    layout, where = kind.split()
    if layout == "objects":
        files = objects()
    else:
        files, index = shards(N)
        files["index.npz"] = packed(index, folder)
    if where == "local":
        on_disk(folder / "set", files)
        yield lambda: salience.Source(folder / "set")
    else:
        with Server(files) as server:
            yield lambda: served(server) if layout == "objects" else unhurried(salience.Source(server.url))


SLOW = pytest.mark.slow
CASES: list[Any] = [
    pytest.param("objects local", {}, id="objects"),
    pytest.param("shards local", {"num_workers": 2, "select": "default"}, id="shards-workers-default"),
    pytest.param(
        "objects http", {"select": "default", "cache_policy": NeverEvict}, id="http-objects-default-never-evict"
    ),
    pytest.param("objects http", {"num_workers": 2, "views": True, "cache_policy": Lru}, id="http-objects-views-lru"),
    pytest.param("shards http", {"views": True, "share": 0}, id="http-shards-views-ahead"),
    pytest.param("shards http", {"num_workers": 2, "persistent_workers": True, "select": "infobatch"}, id="persistent"),
    *(
        pytest.param("shards http", {"num_workers": 2, "multiprocessing_context": way}, id=way, marks=SLOW)
        for way in ("forkserver", "spawn")
    ),
]


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_batches_are_the_same_with_a_cache_as_without(tmp_path, kind, options):
    """Where samples are selected, the same samples: what is in the cache comes first."""
    with store(kind, tmp_path) as source:
        options, plain = dict(options), {"epochs": 3, "select": options.get("select")}
        share = options.pop("share", 0.3)
        loader = make(source(), cache=share_of(source(), share), **plain | options)
        seen, known = go(loader, 3), go(make(source(), **plain), 3)
        assert visits(seen) == visits(known)
        assert same(seen, known) or plain["select"]
        assert (feed_events(loader)[-1]["cache"]["hits"] > 0) == (share > 0)


def test_workers_may_deliver_in_any_order(tmp_path):
    with store("objects http", tmp_path) as source:
        loader = make(source(), cache="20kB", num_workers=2, in_order=False)
        seen = go(loader, 2)
        right(seen, loader.dataset.source, objects())
        assert sorted(i for ids, _, _ in seen for i in ids) == sorted([*range(N)] * 2)


def plans(windows: int, n: int = N) -> list[tuple[np.ndarray, np.ndarray]]:
    """P(pick) = importance, a fifth of which changes from window to window: ids in order, importance of all."""
    rng = np.random.default_rng(3)
    importance = rng.permutation(n) / n
    made = []
    for _ in range(windows):
        moved = rng.random(n) < 0.2
        importance = np.where(moved, rng.random(n), importance)
        ids = rng.permutation(np.flatnonzero(rng.random(n) < importance))
        made.append((ids, importance.astype(np.float16).astype(np.float32)))
    return made


def write(folder: Path, wanted: list[tuple[np.ndarray, np.ndarray]], batch_size: int, n: int = N) -> salience.Trace:
    trace = salience.Trace(folder)
    for window, (ids, importance) in enumerate(wanted):
        ones = np.ones(len(ids), np.float32)
        trace.write(
            salience.Plan(
                window=window, population=n, batch_size=batch_size, ids=ids, weights=ones, importance=importance[ids],
                level=np.zeros(len(ids), np.uint8), importance_of_all=importance.astype(np.float16),
            )
        )  # fmt: skip
    return trace


@pytest.mark.parametrize("name", ["none", "lru", "never_evict", "shade", "icache", "impact", "planned"])
@pytest.mark.parametrize("batch_size", [1, 16])
def test_the_server_sends_what_the_policy_would_fetch(tmp_path, rivals, name, batch_size):
    wanted, files = plans(5), objects()
    with Server(files) as server:
        source = served(server)
        budget = share_of(source, 0.25)
        trace, policy = write(tmp_path, wanted, batch_size), rivals.POLICIES[name]
        loader = make(source, batch_size, select=trace, epochs=5, cache=budget, cache_policy=policy)
        sent = []
        for _ in range(5):
            before = server.bytes
            right(go(loader, loader.epoch + 1), source, files)
            sent.append(server.bytes - before)
        expected = fetched(policy(budget, source.sizes), wanted, source.sizes)
        if batch_size == 1 or name in ("none", "never_evict", "planned"):
            assert sent == expected
        else:  # a batch needs what it puts out of the cache itself, and finds it there
            assert sum(sent) <= sum(expected)
        counts = feed_events(loader)[-1]["cache"]
        assert source.stats.bytes_sent == source.stats.bytes_used == counts["bytes_used"] == sum(sent)
        assert counts["bytes"] == sum(int(source.sizes[ids].sum()) for ids, _ in wanted)
        assert counts["bound_bytes"] <= sum(sent)


def test_a_report_compares_with_other_caches_where_there_is_a_trace(tmp_path):
    source = salience.Source(on_disk(tmp_path / "set", objects()))
    budget = share_of(source, 0.25)
    loader = make(source, select="default", epochs=3, cache=budget, trace=tmp_path / "trace")
    order = [np.concatenate([ids for ids, _, _ in go(loader, window)]) for window in (1, 2, 3)]
    text, counts = loader.report(), feed_events(loader)[-1]["cache"]
    for name, rival in (("lru_bytes", Lru), ("never_evict_bytes", NeverEvict)):
        plans = [(ids, np.ones(N, np.float32)) for ids in order]
        assert counts[name] == sum(fetched(rival(budget, source.sizes), plans, source.sizes))
        assert size(counts[name]) in text
    plain = make(source, select="default", epochs=3, cache=budget)
    go(plain, 1)
    assert "LRU" not in plain.report()
    assert "lru_bytes" not in feed_events(plain)[-1]["cache"]


@pytest.mark.parametrize("select", [None, "default"])
def test_what_was_sent_and_what_would_have_been_sent_are_the_bytes_a_server_counts(tmp_path, select):
    """Of 4 kB each, with labels: what a tar puts between them is more than a third of that."""
    on_disk(tmp_path / "set", objects(800, 4096, 4096))
    pack(tmp_path / "set", tmp_path / "out", PackSettings(shard_size=1 << 20))
    with Server({path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}) as server:
        sent: dict[float | None, int] = {}
        for share in (None, 0.0, 0.25):
            source = unhurried(salience.Source(server.url))
            loader = make(source, 32, epochs=3, select=select, cache=None if share is None else share_of(source, share))
            before = server.bytes
            go(loader, 3)
            sent[share] = server.bytes - before
            if share is not None:
                counts, report = feed_events(loader)[-1]["cache"], loader.report()
                assert counts["bytes_sent"] == sent[share] <= sent[None]
                assert counts["plain_bytes"] == pytest.approx(sent[None], rel=0.05 if select and share else 0)
                assert (
                    f"sent {size(sent[share])}; without a cache it would have sent {size(counts['plain_bytes'])}."
                    in report
                )
        assert sent[0.25] < sent[0.0]


@pytest.mark.parametrize(("mean", "gap"), [(0, 2048), (300, 2048), (4096, 2048), (6000, 3000), (115_000, 4096)])
def test_a_feeder_reads_over_headers_and_over_no_sample(mean, gap):
    assert feeder_gap(mean) == gap


@pytest.mark.parametrize("workers", [0, 2])
def test_with_each_sample_once_a_window_the_hit_rate_is_the_caches_share(workers):
    with Server(objects(low=500, high=500)) as server:
        source = served(server)
        loader = make(source, cache=share_of(source, 0.2), num_workers=workers)
        orders = [np.concatenate([ids for ids, _, _ in go(loader, window)]) for window in (1, 2, 3)]
        ones = np.ones(N, np.float32)
        never = fetched(NeverEvict(share_of(source, 0.2), source.sizes), [(ids, ones) for ids in orders], source.sizes)
        assert never == [N * 500, 0.8 * N * 500, 0.8 * N * 500]
        events = feed_events(loader)
        assert [event["cache"]["hits"] for event in events] == [0, 0.2 * N, 0.4 * N]
        assert [event["bytes_sent"] for event in events] == np.cumsum(never).tolist()
        assert server.bytes == sum(never)


@pytest.fixture
def tiny(monkeypatch):
    """A memory for one batch and part of the cache, as if both were so large that their odd pieces mattered."""
    limits = cached._limits

    def least(source: salience.Source, budget: int, batch_size: int, workers: int, ranks: int) -> Any:
        batch = sum(sorted(map(slot, source.sizes.tolist()))[-batch_size:])
        return limits(source, budget, batch_size, workers, ranks)[0], batch + budget // 4

    monkeypatch.setattr(cached, "_limits", least)


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 2, "views": True},
        {"cache_policy": Lru},
        {"num_workers": 2, "cache_policy": NeverEvict, "persistent_workers": True},
    ],
)
def test_memory_in_pieces_and_a_slow_loop_do_not_spoil_a_batch(tmp_path, tiny, options):
    files, wanted = objects(low=100, high=50_000), plans(3)
    source = salience.Source(on_disk(tmp_path / "set", files))
    loader = make(
        source, 4, select=write(tmp_path / "trace", wanted, 4), epochs=3, cache=share_of(source, 0.1), **options
    )
    right(go(loader, 3, pause=0.005), source, files)
    assert feed_events(loader)[-1]["cache"]["squeezed"]


def test_a_batch_keeps_its_memory_until_the_next_one_is_asked_for(tmp_path, tiny):
    files = objects(60, low=100, high=20_000)
    source = salience.Source(on_disk(tmp_path, files))
    loader = make(source, 4, decode=lambda view: view, collate_fn=list, views=True, cache=share_of(source, 0.1))
    held: list[tuple[list[bytes], list[memoryview]]] = []
    for _ in range(2):
        for ids, samples in loader:
            time.sleep(0.01)  # the feeder goes on meanwhile
            views, real = [view for view, _ in samples], [files[source.names[i]] for i in ids.tolist()]
            assert [bytes(view) for view in views] == real
            held.append((real, views))
    assert all(view.readonly for _, views in held for view in views)
    assert any([bytes(view) for view in views] != real for real, views in held)  # so that the test can fail


def test_a_sample_may_be_larger_than_the_cache(tmp_path):
    files = objects(40) | {"c0/large.bin": bytes(range(256)) * 400}
    source = salience.Source(on_disk(tmp_path, files))
    loader = make(source, 4, cache=8_000, num_workers=1)
    right(go(loader, 2), source, files)
    counts = feed_events(loader)[-1]["cache"]
    assert counts["hits"] > 0
    assert counts["resident_bytes"] <= 8_000
    with pytest.raises(ConfigError, match="holds no sample; the smallest has"):
        make(source, 4, cache=100)


def test_a_plan_with_larger_batches_than_the_memory_is_refused_in_a_sentence(tmp_path, tiny):
    source = salience.Source(on_disk(tmp_path / "set", objects(low=9_000, high=9_000)))
    ids = np.arange(N)
    trace = write(tmp_path / "trace", [(ids, np.ones(N, np.float32))], batch_size=N)
    loader = make(source, 2, select=trace, epochs=1, cache=0)
    with pytest.raises(StoreError, match=r"A batch of 120 samples does not fit .* make the batch smaller"):
        go(loader, 1)


def test_what_cannot_be_is_said_when_the_loader_is_made(tmp_path, problem):
    source = salience.Source(on_disk(tmp_path, objects(8)))
    for options, says in [
        ({"cache": "4GiBs"}, "is not a size"),
        ({"cache": -1}, "at least 0"),
        ({"cache": "1kB", "cache_policy": "planed"}, "Did you mean 'planned'"),
        ({"disk": f"{tmp_path}:0"}, "write DIR:BYTES"),
        ({"redis": "http://host"}, "not the URL of a Redis server"),
    ]:
        with pytest.raises(ConfigError, match=says):
            make(source, **options)
    with pytest.raises(ConfigError, match=r"for a salience\.Source"):
        salience.Loader(problem, 4, cache="1GiB")


def test_an_index_of_samples_larger_than_the_machine_is_refused_before_memory_is_asked_for(tmp_path):
    files = on_disk(tmp_path, objects(8))
    index = salience.Source(files).index
    source = salience.Source(files, index=replace(index, size=np.array([100, *[1 << 45] * 7])))
    with pytest.raises(ConfigError, match="Make the batches smaller, or the index again"):
        make(source, cache="1MiB")


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
def test_after_a_window_broken_off_the_next_ones_are_whole(options):
    files = objects()
    with Server(files) as server:
        loader, plain = (make(served(server), **options, **more) for more in ({"cache": "20kB"}, {}))
        for stop in (0, 3):
            for k, ((ids, (x, _)), (others, _)) in enumerate(zip(loader, plain, strict=False)):
                assert torch.equal(ids, others)
                right([(ids.tolist(), x, 0.0)], loader.dataset.source, files)
                if k == stop:
                    break
        assert same(go(loader, 4), go(plain, 4))
        counts = feed_events(loader)[-1]["cache"]
        assert counts["bound_bytes"] <= counts["bytes_used"] < counts["bytes"]


def test_workers_that_wait_for_the_rest_of_a_window_broken_off_are_let_go(tmp_path, monkeypatch):
    read = Handle.read

    def noted(self: Handle, ticket: int, ids: Any) -> list[Any]:
        try:
            return read(self, ticket, ids)
        except DataError:
            (tmp_path / str(os.getpid())).touch()
            raise

    monkeypatch.setattr(Handle, "read", noted)
    answered = set(objects())
    with Server(objects(), Faults(stalled=lambda path, nth: path not in answered)) as server:
        source = served(server)
        ids, _ = next(iter(make(source)))
        answered &= {source.names[i] for i in ids.tolist()}  # all but those of the first batch are never answered
        loader = make(source, cache=0, num_workers=2)
        for _ in loader:
            break
        assert len([*tmp_path.iterdir()]) == 2, "PyTorch had to kill one after five seconds"


@pytest.mark.parametrize("workers", [0, 1])
def test_an_iterator_of_an_older_window_does_not_break_off_the_new_one(tmp_path, workers):
    files = objects()
    source = salience.Source(on_disk(tmp_path, files))
    loader = make(source, cache=share_of(source, 0.2), num_workers=workers)
    old = iter(loader)
    next(old)
    new = iter(loader)
    seen = [next(new)]
    del old
    gc.collect()
    seen += list(new)
    assert sorted(i for ids, _ in seen for i in ids.tolist()) == list(range(N))


def test_a_loader_dropped_in_mid_window_leaves_nothing_behind():
    before, shm = children(), set(os.listdir("/dev/shm"))
    with Server(objects()) as server:
        loader = make(served(server), cache="20kB", num_workers=2)
        it = iter(loader)
        next(it)
        assert len(children() - before) == 3
        del it, loader
        gc.collect()
        assert wait_until(lambda: children() <= before)
    assert set(os.listdir("/dev/shm")) <= shm


def test_twenty_loaders_leak_neither_processes_nor_descriptors(tmp_path):
    on_disk(tmp_path, objects(16))
    fds: list[int] = []
    before, threads = children(), threading.active_count()
    for k in range(20):
        next(iter(make(salience.Source(tmp_path), cache=2000, disk=str(tmp_path / ".cache"))))
        if k in (3, 19):
            gc.collect()
            assert wait_until(lambda: children() <= before and threading.active_count() <= threads)
            fds.append(len(os.listdir("/proc/self/fd")))
    assert fds[0] == fds[1]


def in_a_fork(work: Callable[[], Any], daemon: bool = False) -> Any:
    """What `work` returns in a process of its own."""
    here, there = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=lambda: there.send(work()), daemon=daemon)
    process.start()
    there.close()  # so that a process that dies is the end of it
    found = here.recv()
    process.join()
    return found


def test_where_no_process_may_be_made_a_thread_feeds():
    files = objects()

    def feeds() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name == "salience-feeder"]

    def work() -> tuple[bool, set[int], list[str], list[str]]:
        source = served(server)
        loader = make(source, cache="20kB")
        seen = go(loader, 2)
        right(seen, source, files)
        made, feeding = children(), feeds()
        del loader
        gc.collect()
        wait_until(lambda: not feeds())
        return len(seen) == 30, made, feeding, feeds()

    with Server(files) as server:
        assert in_a_fork(work, daemon=True) == (True, set(), ["salience-feeder"], [])


def test_a_fork_of_the_training_process_is_refused_the_cache(tmp_path):
    loader = make(salience.Source(on_disk(tmp_path, objects(8))), cache=2000)

    def work() -> str:
        try:
            next(iter(loader))
        except ConfigError as error:
            return str(error)
        return ""

    assert in_a_fork(work) == "The cache belongs to the process that made the Loader; make one in each that iterates."


def test_memory_is_opened_by_other_processes_and_closes_nothing_of_theirs():
    shared = Shared(n=10, ranks=2, capacity=4096)
    shared.first[:] = 3, 4
    again = pickle.loads(pickle.dumps(shared))
    again.data[5:8] = b"abc"
    again.state[9] = 7
    assert bytes(shared.data[4:9]) == b"\0abc\0"
    assert (shared.state[9], again.first.tolist()) == (7, [3, 4])
    with tempfile.TemporaryFile() as file:  # may have the number of a file that was closed
        del again
        gc.collect()
        file.write(b"still open")


def test_who_waits_is_let_go_when_the_window_is_broken_off_or_has_failed():
    shared = Shared(n=1, ranks=1, capacity=64)
    handle = Handle(shared, 0, np.array([8]), views=False)
    shared.first[0] = shared.staged[0] = one = 1 << SERIAL_SHIFT
    shared.fail("the store is away", one + 5)
    with pytest.raises(StoreError, match="the store is away"):
        handle.read(one + 4, [0])
    two = 2 << SERIAL_SHIFT
    shared.first[0], shared.staged[0], shared.state[0] = two, two + 1, WHOLE
    assert handle.read(two, [0]) == [bytes(8)]  # the trouble was that of the window before
    with pytest.raises(DataError, match="broken off"):
        handle.read(one, [0])


@pytest.mark.parametrize("workers", [0, 2])
def test_what_somebody_waits_for_is_read_however_many_batches_are_held_back(tmp_path, workers):
    files = objects()
    source = salience.Source(on_disk(tmp_path, files))
    loader = make(source, 2, cache=share_of(source, 0.1), num_workers=workers)
    loader.probe = Probe(first=4, depth=16, timed=16)
    seen = go(loader, 1)
    right(seen, source, files)
    assert loader.probe.done == 1
    assert len(seen) == N // 2
