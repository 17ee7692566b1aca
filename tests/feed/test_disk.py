"""The disk tier: files whole or not at all, shared by runs, within its limit; a full or broken disk is a warning."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from salience.errors import ConfigError
from salience.feed import Index, tiers
from salience.feed.disk import DISK_BLOCK_BYTES, DiskTier, open_disk, parse_disk, taken
from salience.feed.index import Names
from salience.feed.tiers import TierCounts, fits, identity, open_tiers, seal

from conftest import require

FORK = multiprocessing.get_context("fork")


def sample(i: int, size: int = 5000) -> bytes:
    return bytes([i % 251]) * (size + i % 7)


def index_of(n: int, size: int = 5000) -> Index:
    sizes = np.array([len(sample(i, size)) for i in range(n)], dtype=np.int64)
    return Index(
        names=Names.of(f"a/{i}.bin" for i in range(n)), shards=("one.tar",), shard_sizes=np.array([sizes.sum()]),
        shard=np.zeros(n, np.int32), offset=np.cumsum(sizes) - sizes, size=sizes, check=np.zeros(n, np.uint64),
        label=np.zeros(n, np.int32), classes=("a",),
    )  # fmt: skip


class Said(list[str]):
    """What a tier warned of."""

    __call__ = list.append


@pytest.fixture
def said() -> Said:
    return Said()


def opened(where: Path | str, said: Said, n: int = 100, size: int = 5000, limit: str = ":1GB") -> DiskTier:
    return open_disk(f"{where}{limit}", "0123456789abcdef", index_of(n, size).size, said)


def fill(tier: DiskTier, ids: range, size: int = 5000) -> None:
    tier.put({i: sample(i, size) for i in ids})


def files(tier: DiskTier) -> list[Path]:
    return sorted(path for path in Path(tier.folder).rglob("*") if path.is_file())


def on_disk(tier: DiskTier) -> int:
    return sum(taken(path.stat().st_size - tiers.SEAL_BYTES) for path in files(tier))


@pytest.fixture
def small_disk(tmp_path):
    """A file system of one MiB."""
    place = tmp_path / "small"
    place.mkdir()
    mount = shutil.which("mount")
    command = [mount or "mount", "-t", "tmpfs", "-o", "size=1M", "tmpfs", str(place)]
    done = mount is not None and subprocess.run(command, capture_output=True).returncode == 0
    require(done, "the right to mount a file system")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


# ---------------------------------------------------------------- keeping


def test_what_was_put_comes_back_and_nothing_else(tmp_path, said):
    tier = opened(tmp_path, said)
    fill(tier, range(0, 100, 2))
    assert tier.get(range(10)) == {i: sample(i) for i in range(0, 10, 2)}
    kept = sum(len(sample(i)) for i in range(0, 10, 2))
    total = sum(len(sample(i)) for i in range(0, 100, 2))
    assert tier.counts == TierCounts(asked=10, hits=5, hit_bytes=kept, writes=50, written_bytes=total)
    assert (tmp_path / "salience-0123456789abcdef" / "06" / "6").is_file()
    assert said == []


def test_an_empty_sample_is_kept_too(tmp_path, said):
    tier = opened(tmp_path, said)
    tier.put({3: b""})
    assert tier.get([3]) == {3: b""}


def test_a_later_run_finds_it_again_and_counts_it(tmp_path, said):
    limit = f":{4 * taken(len(sample(6)))}"
    fill(opened(tmp_path, said, limit=limit), range(3))
    later = opened(tmp_path, said, limit=limit)
    fill(later, range(10))
    assert later.get(range(10)) == {i: sample(i) for i in range(4)}
    assert (later.counts.writes, later.counts.refused) == (1, 6)
    assert said == []


@pytest.mark.parametrize(
    "hurt",
    [lambda b: b[:-1] + b"?", lambda b: b[:-1], lambda b: b"", lambda b: b"?" + b[1:], lambda b: bytes(8) + b[8:]],
)
def test_a_damaged_file_is_removed_and_may_be_written_anew(tmp_path, said, hurt):
    tier = opened(tmp_path, said)
    fill(tier, range(3))
    path = Path(tier.folder) / "01" / "1"
    path.write_bytes(hurt(path.read_bytes()))
    assert tier.get(range(3)) == {0: sample(0), 2: sample(2)}
    assert tier.counts.bad == 1
    assert not path.exists()
    fill(tier, range(3))
    assert tier.get([1]) == {1: sample(1)}
    assert said == []


def test_removing_a_damaged_file_makes_room(tmp_path, said):
    tier = opened(tmp_path, said, limit=f":{2 * taken(len(sample(6)))}")
    fill(tier, range(3))
    (Path(tier.folder) / "01" / "1").write_bytes(b"rubbish")
    assert tier.get(range(3)) == {0: sample(0)}
    fill(tier, range(2, 4))
    assert set(tier.get(range(4))) == {0, 2}


@pytest.mark.parametrize("limit", [":1GB", ""])
def test_a_folder_that_was_cleared_in_between_is_made_anew(tmp_path, said, limit):
    tier = opened(tmp_path, said, limit=limit)
    fill(tier, range(3))
    shutil.rmtree(tier.folder)
    assert tier.get(range(3)) == {}
    fill(tier, range(3))
    assert tier.get(range(3)) == {i: sample(i) for i in range(3)}
    assert said == []


@pytest.fixture
def without_xxhash(monkeypatch):
    """Switches between an installation with xxhash (False) and one without (True)."""

    def switch(missing: bool) -> None:
        monkeypatch.undo()
        if missing:
            monkeypatch.setitem(sys.modules, "xxhash", None)
        tiers._xxh3.cache_clear()

    yield switch
    switch(False)


def test_runs_with_and_without_xxhash_share_a_folder(tmp_path, said, without_xxhash):
    tier = opened(tmp_path, said)
    without_xxhash(True)
    fill(tier, range(3))
    without_xxhash(False)
    assert tier.get(range(3)) == {i: sample(i) for i in range(3)}
    fill(tier, range(3, 6))
    without_xxhash(True)
    assert set(tier.get(range(6))) == {0, 1, 2}  # it cannot tell of the others, and leaves them alone
    assert len(files(tier)) == 6
    assert tier.counts.bad == 0


def test_a_seal_fits_its_bytes_alone(without_xxhash):
    for missing in (False, True):
        without_xxhash(missing)
        assert fits(seal(b"abc"), b"abc") is True
        assert fits(seal(b"abc"), b"abd") is False
        assert fits(seal(b"abc")[:7], b"abc") is False


# ---------------------------------------------------------------- limits


def test_the_limit_counts_whole_blocks_and_is_never_exceeded_by_one_run(tmp_path, said):
    tier = opened(tmp_path, said, limit=f":{20 * DISK_BLOCK_BYTES}")
    fill(tier, range(100))
    assert on_disk(tier) == 20 * DISK_BLOCK_BYTES
    assert tier.counts.refused == 100 - tier.counts.writes
    assert said == []


def test_without_a_limit_five_per_cent_of_the_disk_stay_free(small_disk, said):
    tier = opened(small_disk, said, limit="")
    fill(tier, range(100), size=20_000)
    disk = os.statvfs(small_disk)
    assert 0.05 <= disk.f_bavail / disk.f_blocks < 0.05 + taken(20_006) / 2**20
    assert tier.counts.refused == 100 - tier.counts.writes > 0
    assert said == []


def write_all(where: Path, n: int, limit: int, start: threading.Barrier, backwards: bool) -> None:
    tier = opened(where, Said(), n, limit=f":{limit}")
    start.wait()
    for i in reversed(range(n)) if backwards else range(n):
        tier.put({i: sample(i)})


def test_two_runs_share_a_folder_and_its_limit(tmp_path, said):
    n, limit = 600, 600 * DISK_BLOCK_BYTES
    start = FORK.Barrier(2)
    runs = [FORK.Process(target=write_all, args=(tmp_path, n, limit, start, way)) for way in (False, True)]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
        assert run.exitcode == 0
    tier = opened(tmp_path, said, n)
    assert limit - 2 * taken(5006) <= on_disk(tier) <= limit + 2 * (limit // 64 + taken(5006))
    assert tier.get(range(n)) == {int(path.name): sample(int(path.name)) for path in files(tier)}
    assert tier.counts.bad == 0


def test_threads_of_one_run_keep_the_limit_and_read_only_whole_samples(tmp_path, said):
    tier = opened(tmp_path, said, limit=f":{100 * DISK_BLOCK_BYTES}")
    wrong: list[int] = []

    def work() -> None:
        for i in range(5, 95):
            tier.put({i: sample(i)})
            wrong.extend(k for k, data in tier.get(range(i - 5, i + 5)).items() if data != sample(k))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert on_disk(tier) <= 100 * DISK_BLOCK_BYTES + 4 * taken(5006)
    assert tier.counts.bad == 0
    assert said == []


def write_for_ever(where: Path) -> None:
    tier = opened(where, Said(), 10_000, 50_000)
    for i in range(10_000):
        tier.put({i: sample(i, 50_000)})


def test_a_killed_run_leaves_whole_files(tmp_path, said):
    run = FORK.Process(target=write_for_ever, args=(tmp_path,))
    run.start()
    while not (tmp_path / "salience-0123456789abcdef" / "32" / "50").exists():
        assert run.is_alive()
    run.kill()
    run.join()
    tier = opened(tmp_path, said, 10_000, 50_000)
    assert len(tier.get(range(10_000))) > 50
    assert tier.counts.bad == 0


def test_half_written_files_go_after_an_hour(tmp_path, said):
    tier = opened(tmp_path, said)
    fill(tier, range(3))
    old, new = Path(tier.folder) / "01" / ".1-dead-1", Path(tier.folder) / "01" / ".257-busy-1"
    for path in (old, new, Path(tier.folder) / "01" / ("9" * 40)):  # and what is no sample is left alone
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 4000,) * 2)
    again = opened(tmp_path, said)
    assert (old.exists(), new.exists()) == (False, True)
    assert len(again.get(range(3))) == 3


# ---------------------------------------------------------------- trouble


def test_a_full_disk_is_one_warning_and_what_is_there_is_still_read(small_disk, said):
    tier = opened(small_disk, said)
    fill(tier, range(30), size=100_000)
    fill(tier, range(30, 60), size=1000)
    assert len(said) == 1
    assert "takes no more samples (No space left on device)" in said[0]
    kept = tier.get(range(60))
    assert 8 <= len(kept) == tier.counts.writes < 11
    assert all(data == sample(i, 100_000) for i, data in kept.items())
    assert len(files(tier)) == len(kept)  # nothing half written is left
    assert tier.counts.refused == 60 - len(kept)


def test_a_disk_that_turns_read_only_is_still_read(small_disk, said):
    tier = opened(small_disk, said)
    fill(tier, range(3))
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    fill(tier, range(3, 9))
    assert tier.get(range(9)) == {i: sample(i) for i in range(3)}
    assert len(said) == 1
    assert "Read-only file system" in said[0]
    assert len(opened(small_disk, said).get(range(9))) == 3  # and in a later run


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_folder_that_cannot_be_one_is_a_warning(tmp_path, said, place):
    (tmp_path / "file").write_text("not a folder")
    tier = opened(tmp_path / place, said)
    fill(tier, range(3))
    assert tier.get(range(3)) == {}
    assert tier.counts.refused == 3
    assert len(said) == 1
    assert "cannot be read (Not a directory); the run continues without it" in said[0]


def test_a_file_that_cannot_be_read_turns_the_tier_off(tmp_path, said):
    tier = opened(tmp_path, said)
    fill(tier, range(3))
    (Path(tier.folder) / "04" / "4").mkdir(parents=True)  # what is no file cannot be read, even by root
    assert tier.get([4, 0]) == {}
    fill(tier, range(5, 9))
    assert tier.get(range(9)) == {}
    assert (tier.counts.writes, tier.counts.refused) == (3, 4)
    assert len(said) == 1


# ---------------------------------------------------------------- opening


def test_tiers_are_opened_as_written(tmp_path, said):
    index = index_of(10)
    assert open_tiers(None, None, index, "s3://b/x", said) == []
    (tier,) = open_tiers(f"{tmp_path}:1MB", None, index, "s3://b/x", said)
    assert tier.name == "disk"
    tier.put({1: sample(1)})
    assert [path.name for path in tmp_path.iterdir()] == [f"salience-{identity('s3://b/x', index)}"]
    tier.close()


def test_another_source_or_a_changed_one_has_another_identity(tmp_path, monkeypatch):
    index = index_of(10)
    name = identity("s3://b/x", index)
    assert len(name) == 16
    assert int(name, 16) >= 0
    assert identity("s3://b/x", index_of(10)) == name
    changed = [
        replace(index, names=Names.of(f"b/{i}.bin" for i in range(10))),
        replace(index, names=Names.of(f"a/{i}.bi" if i else "n" for i in range(10))),
        replace(index, shards=("two.tar",)),
        replace(index, shard_sizes=index.shard_sizes + 1),
        replace(index, offset=index.offset[::-1]),
        replace(index, size=index.size + (np.arange(10) == 3)),
        replace(index, check=index.check + np.uint64(1)),
        index_of(9),
    ]
    names = {name, identity("s3://b/y", index), *(identity("s3://b/x", other) for other in changed)}
    assert len(names) == 2 + len(changed)
    assert identity("s3://b/x", replace(index, label=index.label + 1)) == name  # the bytes are the same
    monkeypatch.chdir(tmp_path)
    assert identity("data", index) == identity(str(tmp_path / "data"), index) != identity("/data", index)


@pytest.mark.parametrize(
    ("text", "folder", "limit"),
    [
        ("/x/y:200GiB", "/x/y", 200 << 30),
        ("/x/y", "/x/y", None),
        ("/x:y/z", "/x:y/z", None),
        ("/x:y/:1kB", "/x:y", 1000),
        ("/x:1MB/", "/x:1MB", None),
    ],
)
def test_disk_is_a_folder_with_or_without_bytes(text, folder, limit):
    assert parse_disk(text) == (folder, limit)


@pytest.mark.parametrize("text", ["", ":1GB", "/x:", "/x:0", "/x:lots"])
def test_disk_that_cannot_be_meant_is_refused(text):
    with pytest.raises(ConfigError, match=r"/nvme/cache:200GiB|is not a size"):
        parse_disk(text)
