"""Messages between a feed and its jobs: a JSON object and arrays of int64, over a Unix socket. Nothing is unpickled."""

from __future__ import annotations

import asyncio
import json
import select
import socket
import struct
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
_HEAD = struct.Struct(">II")
MAX_MESSAGE_BYTES = (1 << 31) - 1
"""Maximum size of a part of a message; anything larger is not one of our messages."""


class Gone(ConnectionError):
    """The other side is gone."""


@dataclass(frozen=True, slots=True)
class Message:
    """A message: its kind, its words, and the arrays that belong to it."""

    words: Mapping[str, Any]
    arrays: Mapping[str, Ids] = field(default_factory=dict[str, Ids])

    @property
    def kind(self) -> str:
        return str(self.words.get("kind", ""))

    def array(self, name: str) -> Ids:
        """The array with this name; empty if there is none."""
        return self.arrays.get(name, np.empty(0, dtype=np.int64))


def packed(kind: str, words: Mapping[str, Any] | None = None, **arrays: npt.ArrayLike) -> bytes:
    """A message as bytes."""
    numbers = {name: np.ascontiguousarray(array, dtype=np.int64).reshape(-1) for name, array in arrays.items()}
    said = {**(words or {}), "kind": kind, "arrays": {name: len(array) for name, array in numbers.items()}}
    text = json.dumps(said, separators=(",", ":")).encode()
    body = b"".join(array.tobytes() for array in numbers.values())
    return _HEAD.pack(len(text), len(body)) + text + body


def _unpacked(text: bytes, body: bytes) -> Message:
    words = json.loads(text)
    arrays: dict[str, Ids] = {}
    start = 0
    for name, count in words.pop("arrays").items():
        arrays[name] = np.frombuffer(body, dtype=np.int64, count=count, offset=start)
        start += 8 * count
    return Message(words, arrays)


async def read_message(reader: asyncio.StreamReader) -> Message:
    """The next message of a stream; raises asyncio.IncompleteReadError at its end."""
    text, body = _HEAD.unpack(await reader.readexactly(_HEAD.size))
    if max(text, body) > MAX_MESSAGE_BYTES:
        raise ConnectionError("no message of ours")
    return _unpacked(await reader.readexactly(text), await reader.readexactly(body))


class Line:
    """The job's end of a connection. Every failure raises Gone."""

    def __init__(self, path: str, timeout: float | None = 60.0) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout)
        self.close = weakref.finalize(self, self._socket.close)
        """Close this process's end."""
        try:
            self._socket.connect(path)
        except OSError as cause:
            self.close()
            raise Gone(str(cause)) from cause

    def tell(self, kind: str, words: Mapping[str, Any] | None = None, **arrays: npt.ArrayLike) -> None:
        """Send a message without waiting for an answer."""
        try:
            self._socket.sendall(packed(kind, words, **arrays))
        except OSError as cause:
            raise Gone(str(cause)) from cause

    def ask(self, kind: str, words: Mapping[str, Any] | None = None, **arrays: npt.ArrayLike) -> Message:
        """Send a message and wait for the answer."""
        self.tell(kind, words, **arrays)
        return self.hear()

    def hear(self) -> Message:
        """The next message."""
        try:
            return self._hear()
        except (OSError, ValueError) as cause:  # ValueError: bytes that are no message
            raise Gone(str(cause)) from cause

    def waiting(self) -> bool:
        """True if there is a message that was not read yet."""
        return bool(select.select([self._socket], [], [], 0)[0])

    def _hear(self) -> Message:
        text, body = _HEAD.unpack(self._exactly(_HEAD.size))
        if max(text, body) > MAX_MESSAGE_BYTES:
            raise Gone("no message of ours")
        return _unpacked(self._exactly(text), self._exactly(body))

    def _exactly(self, count: int) -> bytes:
        data = bytearray(count)
        view, got = memoryview(data), 0
        while got < count:
            step = self._socket.recv_into(view[got:])
            if not step:
                raise Gone("the connection was closed")
            got += step
        return bytes(data)
