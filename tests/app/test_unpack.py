"""A compressed tar is unpacked once, whole or not at all."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from salience.app.unpack import plain_tar
from salience.errors import DataError


def make_tar(path: Path, *names: str, mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as archive:  # pyright: ignore[reportCallIssue, reportArgumentType]
        for name in names:
            header = tarfile.TarInfo(name)
            header.size = len(name)
            archive.addfile(header, io.BytesIO(name.encode()))
    return path


def names(path: Path) -> list[str]:
    with tarfile.open(path, "r:") as archive:
        return archive.getnames()


def test_a_plain_tar_is_read_where_it_lies(tmp_path: Path):
    tar = make_tar(tmp_path / "x.tar", "a/1.png", mode="w")
    assert plain_tar(tar, tmp_path / "cache") == tar
    assert not (tmp_path / "cache").exists()


def test_tar_gz_is_unpacked_once_and_its_old_version_removed(tmp_path: Path):
    cache = tmp_path / "cache"
    path = make_tar(tmp_path / "x.tar.gz", "a/1.png")
    calls: list[tuple[int, int]] = []
    plain = plain_tar(path, cache, lambda done, total: calls.append((done, total)))
    assert calls
    assert names(plain) == ["a/1.png"]
    made = plain.stat().st_mtime_ns
    assert plain_tar(path, cache).stat().st_mtime_ns == made
    make_tar(path, "a/new.png")
    newer = plain_tar(path, cache)
    assert names(newer) == ["a/new.png"]
    assert list(cache.iterdir()) == [newer]


def test_the_cache_is_where_xdg_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert plain_tar(make_tar(tmp_path / "x.tar.gz", "a/1.png")).parent == tmp_path / "xdg" / "salience"


def test_a_truncated_tar_gz_is_refused_and_leaves_nothing_behind(tmp_path: Path):
    path = make_tar(tmp_path / "x.tar.gz", "a/1.png", "b/2.png")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="truncated or damaged"):
        plain_tar(path, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_cache_that_cannot_be_written_is_said(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"cannot be unpacked into .*XDG_CACHE_HOME"):
        plain_tar(make_tar(tmp_path / "x.tar.gz", "a/1.png"), tmp_path / "file")
