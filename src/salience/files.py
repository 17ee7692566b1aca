"""Files that appear whole or not at all, and arrays in them without pickle."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import zipfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np
from numpy.lib import format as npy

from salience.errors import StateError


@contextmanager
def atomic(
    path: str | Path, *, part: str | Path | None = None, previous: str | Path | None = None, sync: bool = True
) -> Generator[BinaryIO]:
    """A file to write to, which becomes `path` at the end of the block; after an exception `path` is as it was.

    The file is written beside `path`, under a name of its own or as `part` (a name that stays the same is overwritten by the
    next run where one was killed). What `path` was before is kept as `previous`, if that is given. With `sync`, the contents
    survive a power cut. An exception of the block is raised as it is, whatever becomes of the clean-up.
    """
    path = Path(path)
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
    """Write a text file in UTF-8; it appears whole or not at all."""
    with atomic(path) as file:
        file.write(text.encode())


def write_npz(path: str | Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays into one file, without pickle; folders are made where they are missing."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic(path) as file:
        np.savez(file, allow_pickle=False, **arrays)  # pyright: ignore[reportArgumentType]


def read_npz(path: str | Path, wanted: str, what: str) -> dict[str, Any]:
    """All arrays of a file that `write_npz` wrote with format `wanted`; never unpickles, and reads no more than the file."""
    try:
        with Path(path).open("rb") as file:
            arrays = _arrays(file)
    except FileNotFoundError as cause:
        raise StateError(f"There is no {what} at {str(path)!r}.") from cause
    except Exception as cause:  # a damaged file can break a parser in any way
        raise StateError(f"{str(path)!r} is damaged or not a {what}: {cause or type(cause).__name__}.") from cause
    found = str(arrays.pop("format", "nothing"))
    if found != wanted:
        raise StateError(f"{str(path)!r} is not a {what}: its format is {found!r}, wanted {wanted!r}.")
    return arrays


def _arrays(file: BinaryIO) -> dict[str, np.ndarray]:
    """The arrays of an npz without compression; each must be as large as its header says before memory is taken for it."""
    left = os.fstat(file.fileno()).st_size
    arrays: dict[str, np.ndarray] = {}
    with zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            name = member.filename.removesuffix(".npy")
            left -= member.file_size
            if member.compress_type != zipfile.ZIP_STORED or left < 0 or name in arrays:
                raise ValueError(f"{name!r} is compressed, larger than the file or there twice")
            with archive.open(member) as stream:
                header = _size(stream)
            if header != member.file_size:
                raise ValueError(f"{name!r} has {member.file_size} bytes, and its header says {header}")
            with archive.open(member) as stream:
                arrays[name] = npy.read_array(stream, allow_pickle=False)
    return arrays


def _size(stream: IO[bytes]) -> int:
    """Bytes of a header and of what it announces, from the start of an array's file."""
    version = npy.read_magic(stream)
    read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    if version not in read:
        raise ValueError(f"arrays of format {version} are not read")
    shape, _, dtype = read[version](stream)
    if dtype.hasobject or not dtype.itemsize or min(shape, default=0) < 0:
        raise ValueError(f"an array of shape {shape} and {dtype} is not read")
    return stream.tell() + math.prod(shape) * dtype.itemsize


def _sync_folder(folder: Path) -> None:
    """Make the rename itself survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # not every file system can
            os.fsync(handle)
    finally:
        os.close(handle)
