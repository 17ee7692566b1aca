"""A listing finds every image once, in a fixed order, and is remembered exactly as long as it is true."""

from __future__ import annotations

import gzip
import io
import os
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest

from salience.app import listing as module
from salience.app.listing import Listing, list_images, splits
from salience.errors import ConfigError, DataError

PLAIN = ("cat/b.jpg", "cat/a.PNG", "dog/deep/er/c.webp", "dog/d.gif", "ant/e.jpeg")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def make(root: Path, *names: str) -> Path:
    """Files that only look like images; listing never opens them. Old enough for their folders to be remembered."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(os.fsencode(name))
    settle(root)
    return root


def settle(root: Path) -> None:
    for folder in [root, *(path for path in root.rglob("*") if path.is_dir())]:
        os.utime(folder, ns=(10**18, 10**18))


def make_tar(path: Path, *names: str, mode: str = "w") -> Path:
    with tarfile.open(path, mode) as archive:  # pyright: ignore[reportCallIssue, reportArgumentType]
        for name in names:
            header = tarfile.TarInfo(name)
            header.size = len(name)
            archive.addfile(header, io.BytesIO(name.encode()))
    return path


def names(found: Listing) -> list[str]:
    return [found.name(i) for i in range(len(found))]


def same(one: Listing, other: Listing) -> bool:
    return (one.root, one.kind, one.classes, names(one)) == (
        other.root,
        other.kind,
        other.classes,
        names(other),
    ) and all(
        np.array_equal(getattr(one, field), getattr(other, field)) for field in ("labels", "sizes", "data_offsets")
    )


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What was really walked, as opposed to remembered."""
    walked: list[object] = []
    for name in ("_from_folder", "_from_tar"):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, real=real: (walked.append(a[0]), real(*a))[1])
    return walked


def test_folder_lists_classes_and_nested_images_in_sorted_order(tmp_path: Path, cache: Path):
    root = make(tmp_path / "data", *PLAIN, "dog/notes.txt", "dog/.hidden.png", ".git/x.png", "README.md")
    found = list_images(root, cache_dir=cache)
    assert found.classes == ("ant", "cat", "dog")
    assert names(found) == ["ant/e.jpeg", "cat/a.PNG", "cat/b.jpg", "dog/d.gif", "dog/deep/er/c.webp"]
    assert found.labels.tolist() == [0, 1, 1, 2, 2]
    assert (found.labels.dtype, found.names.dtype, found.name_offsets.dtype) == (np.int32, np.uint8, np.int64)
    assert found.kind == "folder"


def test_tar_lists_the_same_as_the_folder_with_sizes_and_offsets(tmp_path: Path, cache: Path):
    folder = list_images(make(tmp_path / "data", *PLAIN), cache_dir=cache)
    tar = make_tar(tmp_path / "data.tar", *(f"./{name}" for name in PLAIN))
    found = list_images(tar, cache_dir=cache)
    assert names(found) == names(folder)
    assert found.labels.tolist() == folder.labels.tolist()
    data = tar.read_bytes()
    for i, name in enumerate(names(found)):
        start = int(found.data_offsets[i])
        assert data[start : start + int(found.sizes[i])] == f"./{name}".encode()


@pytest.mark.parametrize("wrapper", ["", "cifar10/"])
@pytest.mark.parametrize("held_out", ["test", "val", "valid", "validation"])
@pytest.mark.parametrize("as_tar", [False, True])
def test_splits_are_found_also_inside_a_wrapper(tmp_path: Path, cache: Path, wrapper: str, held_out: str, as_tar: bool):
    files = [f"{wrapper}train/a/1.png", f"{wrapper}train/b/2.png", f"{wrapper}train/c/3.png"]
    files += [f"{wrapper}{held_out}/a/4.png", f"{wrapper}{held_out}/c/5.png"]
    path = make_tar(tmp_path / "x.tar", *files) if as_tar else make(tmp_path / "x", *files)
    assert splits(path, cache_dir=cache) == ("train", "test")
    train, test = (list_images(path, split=split, cache_dir=cache) for split in ("train", "test"))
    assert len(train) == 3
    # c is class 2 in both, although the held-out split has no b.
    assert test.classes == train.classes == ("a", "b", "c")
    assert test.labels.tolist() == [0, 2]
    assert same(test, list_images(path, split=held_out, cache_dir=cache))


def test_asking_a_tar_for_its_splits_remembers_what_the_scan_found(tmp_path: Path, cache: Path, scans: list[object]):
    tar = make_tar(tmp_path / "x.tar", "train/a/1.png", "test/a/2.png")
    assert splits(tar, cache_dir=cache) == splits(tar, cache_dir=cache) == ("train", "test")
    list_images(tar, split="train", cache_dir=cache)
    list_images(tar, split="test", cache_dir=cache)
    assert scans == []


@pytest.mark.parametrize("as_tar", [False, True])
def test_without_splits_there_are_none_and_a_wrapper_is_stepped_through(tmp_path: Path, cache: Path, as_tar: bool):
    files = ("data/a/1.png", "data/b/2.png")
    path = make_tar(tmp_path / "x.tar", *files) if as_tar else make(tmp_path / "x", *files)
    assert splits(path, cache_dir=cache) == splits(path, cache_dir=cache) == ()
    assert list_images(path, cache_dir=cache).classes == ("a", "b")


def test_a_lone_folder_of_images_is_the_only_class(tmp_path: Path, cache: Path):
    assert list_images(make(tmp_path / "x", "a/1.png", "a/2.png"), cache_dir=cache).classes == ("a",)


@pytest.mark.parametrize("as_tar", [False, True])
def test_a_split_must_be_named_rightly(tmp_path: Path, cache: Path, as_tar: bool):
    files = ("train/a/1.png", "val/a/2.png")
    path = make_tar(tmp_path / "x.tar", *files) if as_tar else make(tmp_path / "x", *files)
    with pytest.raises(ConfigError, match="say which one"):
        list_images(path, cache_dir=cache)
    with pytest.raises(ConfigError, match="Did you mean 'train'"):
        list_images(path, split="trian", cache_dir=cache)
    plain = make(tmp_path / "y", *PLAIN)
    with pytest.raises(ConfigError, match="no splits"):
        list_images(plain, split="train", cache_dir=cache)


def test_an_unchanged_folder_is_not_walked_again(tmp_path: Path, cache: Path, scans: list[object]):
    root = make(tmp_path / "x", *PLAIN)
    first = list_images(root, cache_dir=cache)
    assert same(first, list_images(root, cache_dir=cache))
    assert len(scans) == 1


@pytest.mark.parametrize("change", ["dog/deep/er/new.png", "emu/new.png"])
def test_a_new_file_anywhere_is_found(tmp_path: Path, cache: Path, change: str):
    root = make(tmp_path / "x", *PLAIN)
    list_images(root, cache_dir=cache)
    (root / change).parent.mkdir(exist_ok=True)
    (root / change).touch()
    assert change in names(list_images(root, cache_dir=cache))


def test_a_removed_class_is_noticed(tmp_path: Path, cache: Path):
    root = make(tmp_path / "x", *PLAIN)
    list_images(root, cache_dir=cache)
    shutil.rmtree(root / "ant")
    assert list_images(root, cache_dir=cache).classes == ("cat", "dog")


def test_a_folder_changed_just_now_is_not_remembered(tmp_path: Path, cache: Path, scans: list[object]):
    root = make(tmp_path / "x", *PLAIN)
    (root / "cat" / "new.png").touch()
    for _ in range(2):
        list_images(root, cache_dir=cache)
    assert len(scans) == 2


def test_a_rewritten_tar_is_scanned_again(tmp_path: Path, cache: Path, scans: list[object]):
    tar = make_tar(tmp_path / "x.tar", "a/1.png")
    for _ in range(2):
        assert len(list_images(tar, cache_dir=cache)) == 1
    make_tar(tar, "a/1.png", "a/2.png")
    assert len(list_images(tar, cache_dir=cache)) == 2
    assert len(scans) == 2


@pytest.mark.parametrize("damage", [b"", b"rubbish", None])
def test_a_damaged_cache_file_is_ignored_and_rewritten(tmp_path: Path, cache: Path, damage: bytes | None):
    root = make(tmp_path / "x", *PLAIN)
    first = list_images(root, cache_dir=cache)
    (file,) = cache.glob("*.npz")
    intact = file.read_bytes()
    file.write_bytes(intact[: len(intact) // 2] if damage is None else damage)
    assert same(first, list_images(root, cache_dir=cache))
    assert file.read_bytes() == intact
    assert [path.name for path in cache.iterdir()] == [file.name]


def test_a_cache_that_cannot_be_written_is_no_obstacle(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    blocked = tmp_path / "file"
    blocked.touch()
    assert len(list_images(make(tmp_path / "x", *PLAIN), cache_dir=blocked)) == 5
    assert "not remembered" in caplog.text


def test_the_cache_is_where_xdg_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    list_images(make(tmp_path / "x", *PLAIN))
    assert list((tmp_path / "xdg" / "salience").glob("*.npz"))


def test_tar_gz_is_unpacked_once_and_its_old_version_removed(tmp_path: Path, cache: Path):
    path = make_tar(tmp_path / "x.tar.gz", *PLAIN, mode="w:gz")
    calls: list[tuple[int, int]] = []
    found = list_images(path, cache_dir=cache, progress=lambda done, total: calls.append((done, total)))
    assert calls
    assert found.kind == "tar"
    assert found.root.parent == cache
    made = found.root.stat().st_mtime_ns
    assert list_images(path, cache_dir=cache).root.stat().st_mtime_ns == made
    make_tar(path, "a/new.png", mode="w:gz")
    newer = list_images(path, cache_dir=cache)
    assert names(newer) == ["a/new.png"]
    assert list(cache.glob("*.tar")) == [newer.root]


def test_members_that_point_outside_are_skipped(tmp_path: Path, cache: Path):
    tar = make_tar(tmp_path / "x.tar", "a/1.png", "../a/2.png", "/a/3.png", "a/../../4.png", "a/._1.png")
    assert names(list_images(tar, cache_dir=cache)) == ["a/1.png"]


def test_of_a_member_written_twice_the_last_one_counts(tmp_path: Path, cache: Path):
    tar = make_tar(tmp_path / "x.tar", "a/1.png", "a/2.png", "a/1.png")
    found = list_images(tar, cache_dir=cache)
    assert names(found) == ["a/1.png", "a/2.png"]
    assert found.data_offsets[0] > found.data_offsets[1]


def test_names_that_are_not_utf8_survive(tmp_path: Path, cache: Path):
    name = os.fsdecode(b"a/\xff\xe9.png")
    try:
        root = make(tmp_path / "x", name)
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    for _ in range(2):
        assert names(list_images(root, cache_dir=cache)) == [name]


def test_links_in_a_circle_end(tmp_path: Path, cache: Path):
    root = make(tmp_path / "x", *PLAIN)
    (root / "cat" / "again").symlink_to(root / "cat")
    assert len(list_images(root, cache_dir=cache)) == 5


def test_progress_counts_class_folders(tmp_path: Path, cache: Path):
    calls: list[tuple[int, int]] = []
    list_images(make(tmp_path / "x", *PLAIN), cache_dir=cache, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(1, 3), (2, 3), (3, 3)]


def test_a_missing_path_is_named(tmp_path: Path, cache: Path):
    with pytest.raises(DataError, match=r"there is no file or folder .*nowhere"):
        list_images(tmp_path / "nowhere", cache_dir=cache)


@pytest.mark.parametrize("content", [(), ("notes.txt",), ("a/notes.txt",)])
@pytest.mark.parametrize("as_tar", [False, True])
def test_a_set_without_images_is_refused(tmp_path: Path, cache: Path, content: tuple[str, ...], as_tar: bool):
    root = tmp_path / "x"
    root.mkdir()
    path = make_tar(tmp_path / "x.tar", *content) if as_tar else make(root, *content)
    for _ in range(2):
        with pytest.raises(DataError, match="holds no"):
            list_images(path, cache_dir=cache)


@pytest.mark.parametrize("as_tar", [False, True])
def test_images_without_class_folders_are_refused(tmp_path: Path, cache: Path, as_tar: bool):
    path = make_tar(tmp_path / "x.tar", "1.png") if as_tar else make(tmp_path / "x", "1.png")
    with pytest.raises(DataError, match="no class folders"):
        list_images(path, cache_dir=cache)
    assert splits(path, cache_dir=cache) == ()


@pytest.mark.parametrize("keep", [512 + 100, 512 + 512, 1536, 1536 + 100, 3 * 1024])
def test_a_truncated_tar_is_refused(tmp_path: Path, cache: Path, keep: int):
    tar = make_tar(tmp_path / "x.tar", "a/1.png", "a/2.png", "a/3.png")
    tar.write_bytes(tar.read_bytes()[:keep])
    with pytest.raises(DataError, match="truncated or damaged"):
        list_images(tar, cache_dir=cache)


def test_a_truncated_tar_gz_is_refused_and_leaves_nothing_behind(tmp_path: Path, cache: Path):
    path = make_tar(tmp_path / "x.tar.gz", *PLAIN, mode="w:gz")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="truncated or damaged"):
        list_images(path, cache_dir=cache)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize(
    "content",
    [b"", b"PK\x03\x04 a zip", b"x" * 5000, gzip.compress(b"x" * 5000, mtime=0)],
    ids=["empty", "zip", "text", "gzip"],
)
def test_a_file_that_is_no_tar_is_refused(tmp_path: Path, cache: Path, content: bytes):
    (tmp_path / "x.tar").write_bytes(content)
    with pytest.raises(DataError, match=r"x\.tar is not a tar archive"):
        list_images(tmp_path / "x.tar", cache_dir=cache)


def test_an_index_out_of_range_is_refused(tmp_path: Path, cache: Path):
    found = list_images(make(tmp_path / "x", *PLAIN), cache_dir=cache)
    for i in (-1, 5):
        with pytest.raises(IndexError):
            found.name(i)
