"""A store to measure against: HTTP/1.1 with ranges, one bandwidth for all connections together, latency, and counts.

    python benchmarks/store_server.py FOLDER --rate 80e6 --latency 0.02     # prints its address, serves until killed

    GET, HEAD /path            the file of that path below FOLDER, or its Range; also what S3 clients ask (path style)
    GET /-/counts              {"bytes": of bodies sent, "requests": answered, "seconds": since the reset}
    GET /-/ranges              [[path, first byte, bytes sent], ...] of every body since the reset
    GET /-/reset?rate=&latency=    counts from 0, and other terms where they are given; rate 0 = as fast as it goes

All bodies draw on one token bucket that holds 25 ms at most, in turns of 32 KiB, so a second connection brings no second
bandwidth and no 50 ms see more than 1.5 times their share. Latency goes before the first byte of every answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import mmap
import socket
import subprocess
import sys
import time
import urllib.request
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

DEPTH = 0.025
"""Seconds of bandwidth the bucket holds."""
TICK = 0.002
TURN = 32 * 1024
BUFFER = 256 * 1024
"""Bytes of a socket's send buffer: what counts as sent is at most this far ahead of what was received."""
REASONS = {200: "OK", 206: "Partial Content", 400: "Bad Request", 404: "Not Found", 416: "Range Not Satisfiable"}


class Files:
    """Files below a folder as memory, mapped when they are first asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self._mapped: dict[str, tuple[memoryview, str]] = {}

    def get(self, path: str) -> tuple[memoryview, str] | None:
        """The bytes and when they were modified."""
        if path not in self._mapped:
            file = (self.root / path).resolve()
            if not file.is_relative_to(self.root) or not file.is_file():
                return None
            with file.open("rb") as handle:
                size = file.stat().st_size
                data = memoryview(mmap.mmap(handle.fileno(), 0, prot=mmap.PROT_READ) if size else b"")
            self._mapped[path] = data, formatdate(file.stat().st_mtime, usegmt=True)
        return self._mapped[path]


class Bucket:
    """Bandwidth of all connections together: those with something to send take turns."""

    def __init__(self, rate: float) -> None:
        self._waiting: deque[Connection] = deque()
        self._ticking = False
        self.set(rate)

    def set(self, rate: float) -> None:
        self.rate, self._tokens, self._last = rate, 0.0, time.monotonic()

    def join(self, connection: Connection) -> None:
        self._waiting.append(connection)
        if not self._ticking:
            self._tick()

    def _tick(self) -> None:
        now = time.monotonic()
        self._tokens = min(self._tokens + (now - self._last) * self.rate, DEPTH * self.rate)
        self._last = now
        while self._waiting and (self._tokens > 0 or not self.rate):
            connection = self._waiting.popleft()
            sent = connection.send(TURN if self.rate else BUFFER)
            self._tokens -= sent if self.rate else 0
            if connection.ready:
                self._waiting.append(connection)
        self._ticking = bool(self._waiting)
        if self._ticking:
            asyncio.get_running_loop().call_later(TICK, self._tick)


class Shop:
    """What all connections share."""

    def __init__(self, root: Path, rate: float, latency: float) -> None:
        self.files, self.bucket, self.latency = Files(root), Bucket(rate), latency
        self.reset()

    def reset(self) -> None:
        self.bytes = self.requests = 0
        self.ranges: list[list[str | int]] = []
        self.since = time.monotonic()

    def control(self, what: str, query: dict[str, list[str]]) -> bytes | None:
        if what == "ranges":
            return json.dumps(self.ranges).encode()
        if what == "reset":
            self.bucket.set(float(query.get("rate", [self.bucket.rate])[0]))
            self.latency = float(query.get("latency", [self.latency])[0])
            self.reset()
        elif what != "counts":
            return None
        seconds = time.monotonic() - self.since
        return json.dumps({"bytes": self.bytes, "requests": self.requests, "seconds": seconds}).encode()


class Connection(asyncio.Protocol):
    """One keep-alive connection, one answer after the other."""

    def __init__(self, shop: Shop) -> None:
        self.shop = shop
        self._asked = b""
        self._busy = False
        self._body = memoryview(b"")
        self._range: list[str | int] = ["", 0, 0]
        self._free = True
        """Whether the socket takes more."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._out = transport
        transport.set_write_buffer_limits(high=BUFFER)

    def connection_lost(self, exc: Exception | None) -> None:
        self._body = memoryview(b"")

    def pause_writing(self) -> None:
        self._free = False

    def resume_writing(self) -> None:
        self._free = True
        if self._body:
            self.shop.bucket.join(self)

    def data_received(self, data: bytes) -> None:
        self._asked += data
        self._next()

    def _next(self) -> None:
        head, end, rest = self._asked.partition(b"\r\n\r\n")
        if self._busy or not end:
            return
        self._asked, self._busy = rest, True
        line, *fields = head.decode("latin-1").split("\r\n")
        headers = {name.strip().lower(): value.strip() for name, _, value in (field.partition(":") for field in fields)}
        method, _, target = line.partition(" ")
        url = urlsplit(target.rpartition(" ")[0])
        path = unquote(url.path).lstrip("/")
        if path.startswith("-/"):
            body = self.shop.control(path[2:], parse_qs(url.query))
            self._head(404 if body is None else 200, len(body or b""))
            self._out.write(body or b"")
            return self._done()
        self.shop.requests += 1
        asyncio.get_running_loop().call_later(self.shop.latency, self._answer, method, path, headers.get("range", ""))

    def _answer(self, method: str, path: str, ranged: str) -> None:
        if self._out.is_closing():
            return
        found = self.shop.files.get(path) if method in ("GET", "HEAD") else None
        if found is None:
            self._head(404 if method in ("GET", "HEAD") else 400, 0)
            return self._done()
        data, modified = found
        start, stop = span(ranged, len(data))
        if start >= stop and ranged:
            self._head(416, 0, f"Content-Range: bytes */{len(data)}")
            return self._done()
        where = (f"Content-Range: bytes {start}-{stop - 1}/{len(data)}",) if ranged else ()
        kept = ("Accept-Ranges: bytes", f'ETag: "{len(data)}"', f"Last-Modified: {modified}")
        self._head(206 if ranged else 200, stop - start, *where, *kept)
        self._body = data[start:stop] if method == "GET" else self._body
        if not self._body:
            return self._done()
        self._range = [path, start, 0]
        self.shop.ranges.append(self._range)
        if self._free:
            self.shop.bucket.join(self)

    def _head(self, status: int, length: int, *more: str) -> None:
        lines = (f"HTTP/1.1 {status} {REASONS[status]}", f"Content-Length: {length}", *more)
        self._out.write(("\r\n".join(lines) + "\r\n\r\n").encode())

    def _done(self) -> None:
        self._busy = False
        self._next()

    @property
    def ready(self) -> bool:
        return self._free and bool(self._body)

    def send(self, most: int) -> int:
        """Send up to `most` bytes of the body; how many."""
        part, self._body = self._body[:most], self._body[most:]
        if not part or self._out.is_closing():
            self._body = memoryview(b"")
            return 0
        self.shop.bytes += len(part)
        self._range[2] += len(part)  # pyright: ignore[reportOperatorIssue]
        self._out.write(part)
        if not self._body:
            self._done()
        return len(part)


def span(ranged: str, size: int) -> tuple[int, int]:
    """First byte and the one after the last of `bytes=a-b`, `bytes=a-`, `bytes=-n` or no range."""
    first, _, last = ranged.removeprefix("bytes=").partition("-")
    if not first:
        return (max(0, size - int(last)), size) if last else (0, size)
    return int(first), min(size, int(last) + 1 if last else size)


async def serve(root: Path, rate: float, latency: float) -> None:
    listening = socket.create_server(("127.0.0.1", 0), backlog=256)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
    shop = Shop(root, rate, latency)
    server = await asyncio.get_running_loop().create_server(lambda: Connection(shop), sock=listening)
    print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
    await server.serve_forever()


@dataclass(frozen=True, slots=True)
class Counts:
    bytes: int
    requests: int
    seconds: float

    def __sub__(self, before: Counts) -> Counts:
        return Counts(self.bytes - before.bytes, self.requests - before.requests, self.seconds - before.seconds)


@dataclass(frozen=True, slots=True)
class Store:
    """A running server, as its client sees it."""

    url: str

    def counts(self) -> Counts:
        return Counts(**self._ask("counts"))

    def ranges(self) -> list[tuple[str, int, int]]:
        """Path, first byte and number of bytes of every body sent."""
        return [(path, start, sent) for path, start, sent in self._ask("ranges")]

    def reset(self, *, rate: float | None = None, latency: float | None = None) -> None:
        terms = {"rate": rate, "latency": latency}
        self._ask("reset?" + "&".join(f"{name}={value}" for name, value in terms.items() if value is not None))

    def _ask(self, what: str):  # pyright: ignore[reportUnknownParameterType]
        with urllib.request.urlopen(f"{self.url}/-/{what}") as answer:
            return json.load(answer)


@contextmanager
def running(root: Path, *, rate: float, latency: float) -> Generator[Store]:
    """The server in a process of its own."""
    command = [sys.executable, __file__, str(root), "--rate", str(rate), "--latency", str(latency)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield Store(process.stdout.readline().strip())
        finally:
            process.kill()


def pull(store: Store, path: str, size: int, seconds: float, connections: int = 4) -> float:
    """Bytes a second that a client which does nothing else gets, in ranges of 1 MiB over a few connections."""
    port, part = int(store.url.rpartition(":")[2]), 1 << 20
    got, room = 0, bytearray(part)
    sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(connections)]
    begin = time.perf_counter()
    while (now := time.perf_counter()) - begin < seconds:
        for k, client in enumerate(sockets):
            start = (got + k * part) % max(1, size - part)
            client.sendall(
                f"GET /{path} HTTP/1.1\r\nHost: x\r\nRange: bytes={start}-{start + part - 1}\r\n\r\n".encode()
            )
        for client in sockets:
            head = b""
            while b"\r\n\r\n" not in head:
                head += client.recv(1)
            left = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            got += left
            while left:
                left -= client.recv_into(room, left)
    for client in sockets:
        client.close()
    return got / (now - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rate", type=float, default=0.0, help="bytes a second over all connections; 0 = no limit")
    parser.add_argument("--latency", type=float, default=0.0, help="seconds before the first byte of every answer")
    args = parser.parse_args()
    asyncio.run(serve(args.folder, args.rate, args.latency))


if __name__ == "__main__":
    main()
