"""Disks that are full, turn read-only or go away, on a real file system of a few kilobytes: training goes on and says so."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import salience
from salience.app import checkpoint
from salience.errors import StateError
from salience.events import EventLog, Warned, read, scan

from conftest import require


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    where = tmp_path / "disk"
    where.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", where], capture_output=True)
    require(mounted.returncode == 0, f"the right to mount a tmpfs ({mounted.stderr.decode().strip()})")
    yield where
    subprocess.run(["umount", "--lazy", where], check=True)


def fill(disk: Path) -> None:
    """Leave no room."""
    with (disk / "filler").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(1024))


def read_only(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)


def trained(log: Path, trouble: object = None) -> salience.Loader:
    """Three epochs, with trouble before the second and the third."""
    loader = salience.Loader(torch.utils.data.TensorDataset(torch.randn(64, 4)), 16, epochs=3, log=log)
    for epoch in range(3):
        if epoch and callable(trouble):
            trouble()
        for (x,) in loader:
            loader.loss(x.square().sum(1))
    return loader


@pytest.mark.parametrize(
    ("trouble", "why"),
    [
        (fill, "No space left on device"),
        (read_only, "Read-only file system"),
        (lambda disk: shutil.rmtree(disk / "runs", ignore_errors=True), "No such file or directory"),
    ],
    ids=["full", "read-only", "removed"],
)
def test_training_goes_on_without_its_log_and_that_is_said_once(disk, trouble, why, caplog):
    log = disk / "runs" / "run.jsonl"
    loader = trained(log, lambda: trouble(disk))
    assert loader.progress == 1.0
    assert loader.ledger.seen.tolist() == [3] * 64
    said = [record.message for record in caplog.records]
    assert said == [
        f"salience: The event log {str(log)!r} can no longer be written ({why}); training continues without it."
    ]
    kinds = [event.kind for event in loader.events.recent]
    assert kinds.count("window") == 3, "listeners and sinks no longer hear of it"


def test_a_log_that_was_cut_off_by_a_full_disk_is_read_and_continued(disk):
    log = EventLog(disk / "run.jsonl")
    log.emit(Warned(text="a"))
    fill(disk)
    for _ in range(100):
        log.emit(Warned(text="b" * 1000))
    (disk / "filler").unlink()
    whole = [event.data for event in read(disk / "run.jsonl")]
    assert whole[0] == Warned(text="a")
    EventLog(disk / "run.jsonl").emit(Warned(text="c"))
    *_, last = scan(disk / "run.jsonl")
    assert last.data == Warned(text="c")


def test_a_log_that_cannot_be_opened_is_said_before_anything_is_trained(disk):
    (disk / "run.jsonl").touch()
    read_only(disk)
    for name in ("new/run.jsonl", "new.jsonl", "run.jsonl"):
        with pytest.raises(StateError, match=r"cannot be written: Read-only file system; choose another file\."):
            EventLog(disk / name)
    with pytest.raises(StateError, match="Is a directory"):
        EventLog(disk)


def test_a_checkpoint_that_does_not_fit_says_so_and_leaves_the_one_before(disk):
    checkpoint.write(disk, {"number": 1, "weights": torch.zeros(1000)})
    with pytest.raises(StateError, match=r"No checkpoint could be written .*No space left on device"):
        checkpoint.write(disk, {"number": 2, "weights": torch.zeros(100_000)})
    assert checkpoint.newest(disk, pytest.fail)["number"] == 1
    assert sorted(path.name for path in disk.iterdir()) == [checkpoint.LAST]


def test_a_checkpoint_on_a_disk_that_is_gone_is_an_error_of_its_own(disk):
    checkpoint.write(disk, {"number": 1})
    read_only(disk)
    with pytest.raises(StateError, match=r"No checkpoint could be written .*Read-only file system"):
        checkpoint.write(disk, {"number": 2})
    assert checkpoint.newest(disk, pytest.fail)["number"] == 1


def test_the_error_of_a_training_is_not_hidden_by_clearing_up_its_folder(tmp_path):
    with pytest.raises(StateError, match="what went wrong"), checkpoint.claimed(tmp_path / "run"):
        (tmp_path / "run" / checkpoint.LOCK).unlink()
        (tmp_path / "run" / checkpoint.LOCK).mkdir()  # which cannot be unlinked
        raise StateError("what went wrong")
