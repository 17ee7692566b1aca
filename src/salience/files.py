"""Files that appear whole or not at all, and arrays in them without pickle."""

from __future__ import annotations

import contextlib
import errno
import io
import math
import os
import re
import secrets
import zipfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from salience.errors import StateError

MAX_NPY_HEADER_BYTES = 512
"""The header of an array must end within this many bytes."""
NPY_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '(?P<type>[<|][biufU]\d{1,4})', 'fortran_order': (?:False|True), "
    rb"'shape': \((?P<shape>[0-9, ]*)\), \} *\n",
    re.DOTALL,
)
"""The header that `np.savez` writes for an array of numbers or text."""


@contextmanager
def atomic(
    path: str | Path, *, part: str | Path | None = None, previous: str | Path | None = None, sync: bool = True
) -> Generator[BinaryIO]:
    """A file to write to, which becomes `path` at the end of the block; after an exception `path` is unchanged.

    The file is written beside `path`, under a unique name or as `part` (a fixed name, so that the next run overwrites what a
    killed one left). The old contents of `path` are kept as `previous`, if that is given. With `sync`, the contents survive a
    power cut. An exception of the block is raised unchanged, even if cleaning up fails.
    """
    path = Path(path)
    if path.exists() and not path.is_file():  # a folder, or a device, which would be gone
        error = errno.EISDIR if path.is_dir() else errno.EINVAL
        raise OSError(error, os.strerror(error), str(path))
    given = part is not None
    part = Path(part) if part is not None else path.with_name(f".{path.name}.{secrets.token_hex(6)}.part")
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_TRUNC if given else os.O_EXCL)
    handle = os.open(part, flags, 0o666)  # less the umask, as for any other file
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            if sync:
                file.flush()
                os.fsync(file.fileno())
        if previous is not None and path.exists():
            os.replace(path, previous)
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
    if sync:
        _sync_folder(path.parent)


def write_text(path: str | Path, text: str) -> None:
    """Write a text file in UTF-8, escaping what is not valid (from a file's name, say); it appears whole or not at all."""
    with atomic(path) as file:
        file.write(text.encode(errors="backslashreplace"))


def write_npz(path: str | Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays into one file, without pickle; missing folders are created."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic(path) as file:
        np.savez(file, allow_pickle=False, **arrays)  # pyright: ignore[reportArgumentType]


def read_npz(path: str | Path, wanted: str, what: str, data: bytes | None = None) -> dict[str, Any]:
    """All arrays of a file that `write_npz` wrote with format `wanted`; never unpickles.

    Never asks for more memory than the file has bytes, whatever its headers say. `data` are its contents if they were read
    already; `path` is then only used in messages.
    """
    try:
        with Path(path).open("rb") if data is None else io.BytesIO(data) as opened, zipfile.ZipFile(opened) as file:
            entries = file.infolist()
            if sum(entry.file_size for entry in entries) > opened.seek(0, os.SEEK_END):
                raise ValueError("its arrays are larger than the file")
            arrays = {entry.filename.removesuffix(".npy"): _read_array(file, entry) for entry in entries}
            found = str(arrays.pop("format", "nothing"))
    except FileNotFoundError as cause:
        raise StateError(f"There is no {what} at {str(path)!r}.") from cause
    except MemoryError:
        raise
    except Exception as cause:  # zipfile and numpy raise many things when they are fed a damaged file
        raise StateError(f"{str(path)!r} is damaged or not a {what}: {cause}.") from cause
    if found != wanted:
        raise StateError(f"{str(path)!r} is not a {what}: its format is {found!r}, wanted {wanted!r}.")
    return arrays


def _read_array(file: zipfile.ZipFile, entry: zipfile.ZipInfo) -> np.ndarray:
    """One array, after checking its header: numpy would allocate as much memory as the header says, and evaluate it."""
    if entry.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{entry.filename!r} is compressed")
    with file.open(entry) as member:
        start = member.read(MAX_NPY_HEADER_BYTES)
        header = NPY_HEADER.match(start)
        if header is None:
            raise ValueError(f"{entry.filename!r} is not a plain array")
        count = math.prod(int(part) for part in header["shape"].split(b",") if part.strip())
        if header.end() + count * np.dtype(header["type"].decode()).itemsize != entry.file_size:
            raise ValueError(f"{entry.filename!r} does not have as many bytes as its shape says")
    with file.open(entry) as member:
        return np.lib.format.read_array(member, allow_pickle=False)


def _sync_folder(folder: Path) -> None:
    """Make the rename itself survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # not every file system can
            os.fsync(handle)
    finally:
        os.close(handle)
