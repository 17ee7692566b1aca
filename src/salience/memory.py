"""Memory shared by processes of one node: created by one of them, opened by the others.

On Linux it is an anonymous memory file. It has no name and needs no room in /dev/shm, so that nothing is left behind by a crash
and it works in small containers; other processes open it through the one that created it. On other systems it is a file
that only its owner may open, with a name that cannot be guessed, removed by the process that created it.

Processes that share data without a lock need an order: first the data, then the flag that announces it. x86 keeps stores and
loads in program order; ARM and others do not. So every such protocol has a `fence()` between data and flag on both sides:
a memory barrier on processors that need one.
"""

from __future__ import annotations

import mmap
import os
import platform
import secrets
import tempfile
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from salience.errors import StateError

if TYPE_CHECKING:  # the process of a shared feed does without torch
    from salience.ranks import Ranks

STORES_IN_ORDER = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")
"""True if the processor keeps stores in order, and loads too."""


@dataclass(frozen=True, slots=True)
class Token:
    """What another process of the node needs to open a piece of memory while its creator holds it."""

    path: str
    size: int
    inode: int
    """Distinguishes this file from a later one with the same number or name."""


class Memory:
    """A block of `size` bytes, initially zero. Only pages that are written use memory. Unpickling opens the same block."""

    def __init__(self, size: int) -> None:
        fd, path = _anonymous() or _named(_folder(size))
        shown = f"/proc/{os.getpid()}/fd/{fd}" if path is None else path
        self._begin(fd, Token(shown, size, os.fstat(fd).st_ino), path, new=True)

    @classmethod
    def open(cls, token: Token) -> Memory:
        """The same memory in another process."""
        self = object.__new__(cls)
        self.__setstate__(token)
        return self

    def __getstate__(self) -> Token:
        return self.token

    def __setstate__(self, token: Token) -> None:
        link = token.path.startswith("/proc/")  # made by the kernel; any other link must not be followed
        try:
            fd = os.open(token.path, os.O_RDWR | os.O_CLOEXEC | (0 if link else os.O_NOFOLLOW))
        except OSError as cause:
            raise StateError(
                f"The shared memory {token.path} cannot be opened ({cause.strerror}): the process that made it has let go of "
                "it, belongs to another user, or runs in another container; processes of one node must see each other."
            ) from cause
        found = os.fstat(fd)
        if (found.st_ino, found.st_size) != (token.inode, _whole(token.size)):
            os.close(fd)
            raise StateError(f"The shared memory {token.path} is gone: the process that made it has let go of it.")
        self._begin(fd, token, None, new=False)

    def _begin(self, fd: int, token: Token, unlink: str | None, *, new: bool) -> None:
        self.token, self.size, self.fd = token, token.size, fd
        self.close = weakref.finalize(self, _release, fd, unlink, os.getpid())
        """Release the memory, so that others can no longer open it. Arrays in it stay valid."""
        try:
            if new:
                os.ftruncate(fd, _whole(token.size))
            self.buffer = mmap.mmap(fd, _whole(token.size))
        except OSError as cause:
            self.close()
            raise StateError(f"{token.size:,} bytes of shared memory cannot be allocated: {cause.strerror}.") from cause

    def array(self, dtype: npt.DTypeLike, count: int, offset: int = 0) -> npt.NDArray[Any]:
        """An array of `count` elements starting at byte `offset`; all processes see what is written to it."""
        return np.frombuffer(self.buffer, dtype=dtype, count=count, offset=offset)


def node_memory(ranks: Ranks | None, size: int) -> Memory:
    """Memory shared by all ranks of a node, created by the first of them. Collective; if one rank fails, all do."""
    if ranks is None:
        return Memory(size)
    memory: Memory | None = None
    trouble: Exception | None = None
    try:
        memory = Memory(size) if ranks.leads_node else None
    except StateError as error:
        trouble = error
    path, inode = ranks.node_broadcast(("", 0) if memory is None else (memory.token.path, memory.token.inode))
    if path and memory is None:
        try:
            memory = Memory.open(Token(path, size, inode))
        except StateError as error:
            trouble = error
    ranks.agree(trouble, StateError("Another rank has no shared memory; its message says why."))
    assert memory is not None
    return memory


def fence() -> None:
    """Order all stores and loads before this call before those after it, as other processes see them.

    A lock that is released orders what came before, one that is acquired what comes after, and no processor moves an acquire
    before an earlier release. The lock is a new one, so that a fork finds nobody holding it.
    """
    if STORES_IN_ORDER:
        return
    lock = threading.Lock()
    for _ in range(2):
        with lock:
            pass


def _whole(size: int) -> int:
    """`size` rounded up to whole pages, at least one."""
    return max(1, -(-size // mmap.PAGESIZE)) * mmap.PAGESIZE


def _anonymous() -> tuple[int, None] | None:
    """A file without a name that only its owner can open; None if the system does not have such files, or forbids them."""
    try:
        fd = os.memfd_create("salience")
    except (AttributeError, OSError):
        return None
    os.fchmod(fd, 0o600)
    return fd, None


def _named(folder: Path) -> tuple[int, str]:
    """A new file that nobody else can have prepared and only its owner can open."""
    path = str(folder / f"salience-{secrets.token_hex(16)}")
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), path
    except OSError as cause:
        raise StateError(
            f"Shared memory needs a file in {str(folder)!r}, which cannot be made ({cause.strerror}); set TMPDIR to a folder "
            "that can be written to."
        ) from cause


def _folder(size: int) -> Path:
    """A folder in memory if there is enough room, otherwise the temporary folder."""
    for folder in (Path("/dev/shm"), Path(tempfile.gettempdir())):
        if folder.is_dir() and os.access(folder, os.W_OK):
            room = os.statvfs(folder)
            if room.f_bavail * room.f_frsize > 2 * size:
                return folder
    return Path(tempfile.gettempdir())


def _release(fd: int, path: str | None, owner: int) -> None:
    os.close(fd)
    if path is not None and os.getpid() == owner:  # a forked process lets go of its copy
        Path(path).unlink(missing_ok=True)
