"""A Source: samples by number from folders, shards and servers, and a Loader that reads from it batch by batch."""

from __future__ import annotations

import io
import os
import pickle
import tarfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import xxhash
from server import Server

import salience
from salience.errors import ConfigError, DataError
from salience.feed import Broken, Index
from salience.feed.index import Names
from salience.feed.ranges import coalesce
from salience.feed.reads import Reader
from salience.feed.retry import RetryPolicy, hedge_delay, may_hedge
from salience.feed.source import _of_objects
from salience.feed.stores import LocalStore

from conftest import make_model

N = 60


def vector(i: int) -> bytes:
    """Sample i: eight float32."""
    return np.random.default_rng(i).normal(size=8).astype(np.float32).tobytes()


def decode(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(data, dtype=np.float32).copy())


def shards(n: int = N, per: int = 20, hole: int = 100) -> tuple[dict[str, bytes], Index]:
    """Shards of `per` samples with holes between them, and their index; class i % 4."""
    files: dict[str, bytes] = {}
    samples = [vector(i) for i in range(n)]
    for k in range(0, n, per):
        files[f"{k // per:02d}.tar"] = b"".join(b"\0" * hole + sample for sample in samples[k : k + per])
    step = hole + len(samples[0])
    index = Index(
        names=Names.of([f"{i:04d}.bin" for i in range(n)]), shards=tuple(files),
        shard_sizes=np.array([len(file) for file in files.values()], np.int64),
        shard=np.arange(n, dtype=np.int32) // per, offset=(np.arange(n, dtype=np.int64) % per) * step + hole,
        size=np.full(n, len(samples[0]), np.int64),
        check=np.array([xxhash.xxh3_64_intdigest(sample) for sample in samples], np.uint64),
        label=np.arange(n, dtype=np.int32) % 4, classes=("a", "b", "c", "d"),
    )  # fmt: skip
    return files, index


def packed(index: Index, tmp_path: Path) -> bytes:
    index.save(tmp_path / "made.npz")
    return (tmp_path / "made.npz").read_bytes()


@pytest.fixture
def shard_folder(tmp_path) -> Path:
    files, index = shards()
    folder = tmp_path / "shards"
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    index.save(folder / "index.npz")
    return folder


def rewrite(folder: Path, **change) -> None:
    replace(Index.load(folder / "index.npz"), **change).save(folder / "index.npz")


def spoil(folder: Path, i: int) -> None:
    """Change a byte of sample i without changing its index."""
    index = Index.load(folder / "index.npz")
    file = folder / index.path(i)
    data = bytearray(file.read_bytes())
    data[int(index.offset[i])] ^= 1
    file.write_bytes(data)


def test_a_folder_is_a_sample_an_object_and_a_class_a_directory(tmp_path):
    for name in ("cat/2", "cat/1", "ape/1", ".hidden/x"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    source = salience.Source(tmp_path)
    assert (len(source), source.classes, source.labels.tolist()) == (3, ("ape", "cat"), [0, 1, 1])
    assert source.read([2, 0, 2]) == [b"cat/2", b"ape/1", b"cat/2"]
    assert [source.names[i] for i in range(3)] == ["ape/1", "cat/1", "cat/2"]
    assert source.index.shard.tolist() == [-1, -1, -1]


def test_shards_are_read_by_their_index_in_few_requests(shard_folder):
    source = salience.Source(shard_folder)
    ids = np.random.default_rng(0).permutation(N).tolist()
    assert source.read(ids) == [vector(i) for i in ids]
    assert source.stats.requests == 3
    assert source.stats.bytes_used == source.sizes.sum()
    assert (
        source.stats.bytes_sent - source.stats.bytes_used == 57 * 100
    )  # the holes between them, not the first of a shard


def test_a_server_sends_the_index_once_and_the_shards_by_range(tmp_path):
    files, index = shards()
    with Server({**files, "index.npz": packed(index, tmp_path)}) as server:
        source = salience.Source(server.url)
        assert source.read([5, 45]) == [vector(5), vector(45)]
        assert server.asked["index.npz "] == 1
        assert source.stats.bytes_sent == 2 * 32
        again = pickle.loads(pickle.dumps(source))
        assert again.read([7]) == [vector(7)]
        assert server.asked["index.npz "] == 1


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ([], "nothing at"),
        (["x.tar"], "salience pack --index-only"),
    ],
)
def test_a_folder_that_cannot_be_used_says_why(tmp_path, made, said):
    for name in made:
        (tmp_path / name).write_bytes(b"\0" * 1024)
    with pytest.raises(DataError, match=said):
        salience.Source(tmp_path)


def test_a_tar_needs_no_index_where_its_headers_can_be_read(tmp_path):
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        for name in ("cat/1.bin", "ape/2.bin"):
            info = tarfile.TarInfo(name)
            info.size = len(name)
            tar.addfile(info, io.BytesIO(name.encode()))
    source = salience.Source(tmp_path / "x.tar")
    assert (source.classes, source.read([0, 1])) == (("ape", "cat"), [b"cat/1.bin", b"ape/2.bin"])
    with Server({"x.tar": (tmp_path / "x.tar").read_bytes()}) as server:
        with pytest.raises(DataError, match="salience pack --index-only"):
            salience.Source(server.url + "/x.tar")
        source = salience.Source(server.url + "/x.tar", index=source.index)
        assert source.read([1]) == [b"ape/2.bin"]
    with pytest.raises(DataError, match=r"no 'y\.tar'"):
        salience.Source(tmp_path / "y.tar")


def test_names_may_hold_any_character():
    objects = {"a b/ü%20#?.bin": b"1", "c+d/'&.bin": b"2"}
    with Server(objects) as server:
        index = _of_objects([(name, 1) for name in objects], server.url)
        assert salience.Source(server.url, index=index).read([0, 1]) == [b"1", b"2"]


def test_a_shard_that_changed_since_the_index_was_made_is_refused(shard_folder):
    with (shard_folder / "01.tar").open("ab") as file:
        file.write(b"more")
    with pytest.raises(DataError, match=r"01\.tar.*when its index was made"):
        salience.Source(shard_folder)


def test_a_shard_that_is_gone_is_named(shard_folder):
    (shard_folder / "02.tar").unlink()
    with pytest.raises(DataError, match=r"no shard '02\.tar'"):
        salience.Source(shard_folder)


def test_an_index_elsewhere_is_used_when_given(shard_folder, tmp_path):
    (shard_folder / "index.npz").rename(tmp_path / "mine.npz")
    assert salience.Source(shard_folder, index=tmp_path / "mine.npz").read([3]) == [vector(3)]
    with pytest.raises(DataError, match="no index"):
        salience.Source(shard_folder, index=tmp_path / "other.npz")


@pytest.mark.parametrize("option", [{"retries": -1}, {"concurrency": 0}, {"deadline": 0}])
def test_options_out_of_range_are_refused(tmp_path, option):
    with pytest.raises(ConfigError, match=next(iter(option))):
        salience.Source(tmp_path, **option)


def test_a_broken_sample_says_what_is_wrong_with_it(shard_folder):
    spoil(shard_folder, 30)
    source = salience.Source(shard_folder)
    good, bad = source.read([29, 30])
    assert good == vector(29)
    assert isinstance(bad, Broken)
    assert "checksum" in bad.reason
    assert source.stats.retried == 1


def test_an_object_that_went_away_or_shrank_is_broken(tmp_path):
    for name in ("1", "2", "3"):
        (tmp_path / name).write_text("text " + name)
    source = salience.Source(tmp_path)
    (tmp_path / "1").unlink()
    (tmp_path / "2").write_text("t")
    first, second, third = source.read([0, 1, 2])
    assert isinstance(first, Broken)
    assert "not there" in first.reason
    assert isinstance(second, Broken)
    assert "1 bytes of 6" in second.reason
    assert third == b"text 3"


def test_a_broken_sample_does_not_break_its_neighbours(shard_folder):
    source = salience.Source(shard_folder)
    with (shard_folder / "00.tar").open("r+b") as file:
        file.truncate(int(source.index.offset[18]) + 10)
    found = source.read(range(20))
    assert found[:18] == [vector(i) for i in range(18)]
    assert [part for part in found[18:] if isinstance(part, Broken)] == found[18:]


def test_a_sample_without_bytes_needs_no_request(tmp_path):
    (tmp_path / "1").touch()
    source = salience.Source(tmp_path)
    assert source.read([0]) == [b""]
    assert source.stats.requests == 0


@pytest.mark.parametrize(
    ("starts", "stops", "runs"),
    [
        ([], [], []),
        ([0, 10, 30], [10, 20, 40], [(0, 3)]),  # holes of 0 and 10
        ([0, 21], [10, 30], [(0, 1), (1, 2)]),  # a hole of 11
        ([0, 50, 95], [50, 95, 110], [(0, 2), (2, 3)]),  # 110 bytes are too many
        ([0, 200], [200, 201], [(0, 1), (1, 2)]),  # one sample may be longer
    ],
)
def test_neighbours_are_read_together(starts, stops, runs):
    assert [(run.start, run.stop) for run in coalesce(starts, stops, gap=10, longest=100)] == runs


def test_a_request_is_doubled_when_slow_and_rarely():
    policy = RetryPolicy(hedge_after=4, hedge_least=0.05, hedge_share=0.05)
    assert hedge_delay(100, 0.001, 100, policy) == 0.05
    assert hedge_delay(100, 0.1, 100, policy) == pytest.approx(0.4)
    assert hedge_delay(1000, 0.1, 100, policy) == pytest.approx(4.0)
    assert may_hedge(4, 100, policy)
    assert not may_hedge(5, 100, policy)
    assert may_hedge(0, 1, policy)
    assert not may_hedge(1, 1, policy)


def losses_of(loader: salience.Loader, model: torch.nn.Module) -> list[float]:
    with torch.no_grad():
        return [float(loader.loss(F.cross_entropy(model(x), y, reduction="none"))) for x, y in loader]


def test_a_loader_delivers_decoded_samples_with_their_labels(shard_folder):
    loader = salience.Loader(salience.Source(shard_folder), 16, decode=decode, with_ids=True)
    seen = []
    for ids, (x, y) in loader:
        seen += ids.tolist()
        assert torch.equal(x, torch.stack([decode(vector(i)) for i in ids.tolist()]))
        assert torch.equal(y, ids % 4)
    assert sorted(seen) == list(range(N))


def test_without_decode_bytes_are_delivered(tmp_path):
    for i in range(4):
        (tmp_path / f"{i}").write_bytes(vector(i))
    batches = list(salience.Loader(salience.Source(tmp_path), 4, with_ids=True))
    assert [(ids.tolist(), batch) for ids, batch in batches] == [
        (ids.tolist(), [vector(i) for i in ids.tolist()]) for ids, _ in batches
    ]


def test_the_ledger_knows_classes_and_sizes_from_the_start(shard_folder):
    loader = salience.Loader(salience.Source(shard_folder), 16, decode=decode)
    assert loader.ledger.label.tolist() == [i % 4 for i in range(N)]
    assert set(loader.ledger.size.tolist()) == {32}


def test_byte_copies_are_found_before_anything_is_read(shard_folder):
    index = shards()[1]
    same = index.check.copy()
    same[4] = same[0]
    rewrite(shard_folder, check=same)
    loader = salience.Loader(
        salience.Source(shard_folder), 16, epochs=4, decode=decode, select={"filters": ["redundancy"]}
    )
    next(iter(loader))
    assert loader.copies is not None
    assert np.flatnonzero(loader.copies.group >= 0).tolist() == [0, 4]
    assert len(loader.plan) == (N - 1) // 16 * 16


def test_decode_without_a_source_is_refused(problem):
    with pytest.raises(ConfigError, match=r"decode= is for a salience\.Source"):
        salience.Loader(problem, 16, decode=decode)


def test_a_broken_sample_is_stood_in_for_by_its_class_with_weight_0(shard_folder):
    spoil(shard_folder, 30)
    loader = salience.Loader(salience.Source(shard_folder), N, decode=decode, with_ids=True, max_broken=0.1)
    [(ids, (x, y))] = list(loader)
    at = ids.tolist().index(30)
    twin = next(i for i in ids.tolist() if i != 30 and i % 4 == 30 % 4)
    assert torch.equal(x[at], decode(vector(twin)))
    assert y[at] == 30 % 4
    losses = torch.rand(N)
    left = torch.arange(N) != at
    assert torch.allclose(loader.loss(losses), losses[left].sum() / N)
    seen = loader.ledger.seen
    assert (seen[30], seen.sum()) == (0, N - 1), "the loss of a stand-in says nothing of the sample it stands for"
    [event] = [event for event in loader.events.recent if event["kind"] == "broken"]
    assert (event["id"], event["name"]) == (30, "0030.bin")
    assert "checksum" in event["reason"]
    assert "'0030.bin': its bytes do not have the checksum" in loader.report()


@pytest.mark.parametrize(
    ("source_options", "options"),
    [
        ({}, {}),
        ({"cache": "1MiB"}, {}),
        ({"cache": "1MiB", "views": True}, {"num_workers": 1}),
        ({}, {"augment": [salience.Stage(torch.clone, random=False)], "treat": "echo"}),
        ({}, {"select": "selective_backprop"}),
    ],
    ids=["plain", "cache", "views", "echo", "picked"],
)
def test_what_a_stand_in_shows_is_not_recorded_under_the_broken_id(shard_folder, source_options, options):
    spoil(shard_folder, 30)
    source = salience.Source(shard_folder, decode=decode, max_broken=0.1, **source_options)
    loader = salience.Loader(source, 20, epochs=3, **options)
    model = make_model()
    for _ in range(3):
        for x, y in loader:
            logits = model(x)
            loader.loss(F.cross_entropy(logits, y, reduction="none"), logits, y).backward()
    ledger = loader.ledger
    assert (ledger.seen[30], ledger.trained[30], ledger.right[30]) == (0, 0, 0)
    assert np.isnan(ledger.mean_loss[30])
    assert ledger.label[30] == 30 % 4  # from the index
    others = np.arange(N) != 30
    assert ledger.seen[others].sum() > 2 * N


def test_a_stand_in_is_no_near_copy_and_teaches_the_proxy_nothing(shard_folder):
    spoil(shard_folder, 30)
    loader = salience.Loader(salience.Source(shard_folder, decode=decode, max_broken=0.1), N, epochs=2)
    model, proxy = make_model(), make_model()
    loader.attach(model, proxy=proxy)
    for x, y in loader:
        logits = model(x)
        loader.loss(F.cross_entropy(logits, y, reduction="none"), logits, y).backward()
    next(iter(loader))
    losses = loader._run.sensing.proxy.losses
    assert np.isnan(losses[30])
    assert np.isfinite(np.delete(losses, 30)).all()
    assert np.isnan(loader.ledger.grad_norm[30])


def test_undecodable_samples_count_as_broken(shard_folder):
    def picky(data: bytes) -> torch.Tensor:
        if data == vector(7):
            raise io.UnsupportedOperation("what is this")
        return decode(data)

    loader = salience.Loader(salience.Source(shard_folder), 20, decode=picky, max_broken=0.1)
    losses_of(loader, make_model())
    assert "it cannot be decoded (UnsupportedOperation: what is this)" in loader.report()


def test_too_many_broken_samples_stop_the_run(shard_folder):
    for i in (1, 2, 3):
        spoil(shard_folder, i)
    loader = salience.Loader(salience.Source(shard_folder), 20, decode=decode, max_broken=0.04)
    with pytest.raises(DataError, match=r"3 of 60 samples are broken, more than max_broken = 0\.04"):
        losses_of(loader, make_model())


def test_a_batch_without_any_good_sample_stops_the_run(shard_folder):
    loader = salience.Loader(salience.Source(shard_folder), 20, decode=lambda data: 1 / 0)
    with pytest.raises(DataError, match=r"All 20 samples .* are broken.*ZeroDivisionError"):
        next(iter(loader))


def test_a_run_with_broken_samples_resumes_exactly(shard_folder):
    for i in (11, 40):
        spoil(shard_folder, i)

    def fresh() -> salience.Loader:
        source = salience.Source(shard_folder)
        return salience.Loader(source, 8, epochs=3, decode=decode, select="default", max_broken=0.1)

    model, whole = make_model(), fresh()
    values: list[float] = []
    state = None
    for _ in range(3):
        for x, y in whole:
            values.append(whole.loss(F.cross_entropy(model(x), y, reduction="none")).item())
            if len(values) == 5:
                state = pickle.loads(pickle.dumps(whole.state_dict()))
    resumed = fresh()
    resumed.load_state_dict(state)
    again = [value for _ in range(resumed.epoch, 3) for value in losses_of(resumed, model)]
    assert again == values[5:]
    assert sorted(resumed.state_dict()["parts"]["feeding"]["broken"]["ids"]) == [11, 40]


def test_threads_share_a_reader(shard_folder):
    reader = Reader(LocalStore(str(shard_folder)), shards()[1])
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: reader.read([i]), list(range(N)) * 3))
    assert found == [[vector(i)] for i in range(N)] * 3
    assert reader.counts.samples == 3 * N


def test_a_reader_refuses_numbers_it_does_not_have(shard_folder):
    reader = Reader(LocalStore(str(shard_folder)), shards()[1])
    with pytest.raises(IndexError, match="sample 60 of 60"):
        reader.read([0, N])


def test_a_shard_of_more_than_four_gib_is_read_behind_them(tmp_path):
    """Most of it is a hole in the file, which takes no room."""
    large = 5 * 2**30
    with (tmp_path / "large.tar").open("wb") as file:
        for name, size in (("a/hole.bin", large), ("b/small.bin", 5)):
            head = tarfile.TarInfo(name)
            head.size = size
            file.write(head.tobuf(tarfile.GNU_FORMAT))
            if name == "b/small.bin":
                file.write(b"after".ljust(512, b"\0"))
            else:
                file.seek(size, os.SEEK_CUR)
        file.write(bytes(1024))
    source = salience.Source(tmp_path / "large.tar")
    assert source.sizes.tolist() == [large, 5]
    assert source.index.offset[1] > 2**32
    assert source.read([1]) == [b"after"]
    source.index.save(tmp_path / "index.npz")
    assert salience.Source(tmp_path).read([1]) == [b"after"]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stages", [False, True])
def test_byte_copies_are_found_where_there_is_no_index_and_stay_known_when_reused(
    tmp_path: Path, workers: int, stages: bool
):
    """Nothing is read for them: the bytes are at hand. A reused sample is not read again, and keeps its fingerprint."""
    (tmp_path / "a").mkdir()
    for i in range(24):
        (tmp_path / "a" / f"{i:02}").write_bytes(vector(0 if i % 3 == 0 else i))
    more = {"augment": [salience.Stage(torch.neg, random=False)], "treat": "reuse"} if stages else {}
    loader = salience.Loader(
        salience.Source(tmp_path, decode=decode), 4, epochs=4, num_workers=workers, **more,
        select={"filters": [{"name": "redundancy", "visits": 1}], "keep": 1.0},
    )  # fmt: skip
    for _ in range(4):
        for x, y in loader:
            loader.loss(x.sum(1), targets=y)
    assert loader.copies is not None
    assert len(set(loader.copies.group[::3])) == 1
    assert loader.copies.group[0] >= 0
