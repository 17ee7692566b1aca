"""Files appear whole or not at all; what goes wrong is said as it was; arrays never come out of a pickle."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from salience.errors import StateError
from salience.files import atomic, read_npz, write_npz, write_text


def test_a_file_appears_at_the_end_and_nothing_else_is_left(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with atomic(path) as file:
        file.write(b"new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_after_an_exception_the_file_is_as_it_was(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), atomic(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_a_failing_clean_up_does_not_hide_what_went_wrong(tmp_path):
    with pytest.raises(ZeroDivisionError), atomic(tmp_path / "a.txt", part=tmp_path / "a.part"):
        (tmp_path / "a.part").unlink()  # somebody else cleaned up
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == []


def test_a_folder_that_is_not_there_is_said_by_its_own_error(tmp_path):
    with pytest.raises(FileNotFoundError), atomic(tmp_path / "no" / "a.txt"):
        pass


def test_a_file_that_a_killed_run_left_is_overwritten_and_the_last_one_kept(tmp_path):
    path, part, previous = (tmp_path / name for name in ("a", "a.part", "a.old"))
    part.write_bytes(b"half of something long")
    for text in (b"one", b"two"):
        with atomic(path, part=part, previous=previous) as file:
            file.write(text)
    assert (path.read_bytes(), previous.read_bytes(), part.exists()) == (b"two", b"one", False)


def test_a_link_in_the_way_is_not_written_through(tmp_path):
    (tmp_path / "elsewhere").write_text("precious")
    (tmp_path / "a.part").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic link"), atomic(tmp_path / "a", part=tmp_path / "a.part"):
        pass
    assert (tmp_path / "elsewhere").read_text() == "precious"


def test_a_folder_or_a_pipe_in_the_way_stays_and_is_said(tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name, why in (("folder", "Is a directory"), ("pipe", "Invalid argument")):
        with pytest.raises(OSError, match=f"{why}: '.*{name}'$"):
            write_text(tmp_path / name, "text")
    assert (tmp_path / "folder").is_dir()
    assert (tmp_path / "pipe").is_fifo()
    assert len(list(tmp_path.iterdir())) == 2


def test_permissions_are_those_of_any_other_file(tmp_path):
    code = (
        "import os, sys; from salience.files import write_text\n"
        "os.umask(0o027); write_text(sys.argv[1], 'x'); print(oct(os.stat(sys.argv[1]).st_mode & 0o777))"
    )
    said = subprocess.run([sys.executable, "-c", code, str(tmp_path / "a")], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "0o640"


def test_text_comes_back(tmp_path):
    write_text(tmp_path / "a", "ä\r\nö\n")
    assert (tmp_path / "a").read_bytes() == "ä\r\nö\n".encode()


def test_arrays_come_back_and_folders_are_made(tmp_path):
    path = tmp_path / "new" / "a.npz"
    write_npz(path, {"format": np.array("f-1"), "x": np.arange(3), "name": np.array("ö")})
    found = read_npz(path, "f-1", "thing")
    assert sorted(found) == ["name", "x"]
    np.testing.assert_array_equal(found["x"], [0, 1, 2])


def test_objects_are_neither_written_nor_read(tmp_path):
    with pytest.raises(ValueError, match="allow_pickle"):
        write_npz(tmp_path / "a.npz", {"x": np.array([{}], dtype=object)})
    assert os.listdir(tmp_path) == []
    np.savez(tmp_path / "b.npz", format=np.array("f-1"), x=np.array([{}], dtype=object))
    with pytest.raises(StateError, match="is damaged or not a thing"):
        read_npz(tmp_path / "b.npz", "f-1", "thing")


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04 half a zip", b"text"])
def test_what_is_no_such_file_is_said(tmp_path, data):
    (tmp_path / "a.npz").write_bytes(data)
    with pytest.raises(StateError, match="is damaged or not a thing"):
        read_npz(tmp_path / "a.npz", "f-1", "thing")


def test_a_lone_array_and_another_format_are_said(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(3))
    with pytest.raises(StateError, match="is damaged or not a thing"):
        read_npz(tmp_path / "a.npy", "f-1", "thing")
    write_npz(tmp_path / "b.npz", {"format": np.array("f-0")})
    with pytest.raises(StateError, match="its format is 'f-0', wanted 'f-1'"):
        read_npz(tmp_path / "b.npz", "f-1", "thing")
    with pytest.raises(StateError, match="There is no thing"):
        read_npz(tmp_path / "c.npz", "f-1", "thing")
