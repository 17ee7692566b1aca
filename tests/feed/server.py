"""A real HTTP server on loopback: range requests, counters, and faults that depend on nothing but the request."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit


@dataclass(frozen=True)
class Faults:
    """Shares of GET requests that go wrong, drawn from (seed, path, range, how often it was asked for)."""

    errors: float = 0.0
    cut: float = 0.0
    wrong: float = 0.0
    seed: int = 0
    delay: float = 0.0
    """Seconds before every answer, as over a long link."""
    stalled: Callable[[str, int], bool] = lambda path, nth: False
    """True if this request (path, how often it was asked for before) is never answered."""

    def of(self, what: str, nth: int) -> str:
        u = random.Random(f"{self.seed}:{what}:{nth}").random()
        for name in ("errors", "cut", "wrong"):
            u -= getattr(self, name)
            if u < 0:
                return name
        return ""


class Server:
    """Serves `objects` (path -> bytes) at `url`. As a context; `restart()` goes away and comes back at the same port."""

    def __init__(self, objects: dict[str, bytes], faults: Faults | None = None) -> None:
        self.objects, self.faults = objects, faults or Faults()
        self.requests, self.bytes = 0, 0
        self.asked: Counter[str] = Counter()
        self.hurt: Counter[str] = Counter()
        self.lock = threading.Lock()
        self.over = threading.Event()
        self.port = 0
        self.denied: set[str] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Server:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.stop()

    def stop(self) -> None:
        """Connections that are open are cut, as by a process that dies."""
        self._http.shutdown()
        self._http.socket.shutdown(socket.SHUT_RDWR)  # forked processes have it too, and would keep the port open
        self._http.server_close()
        for connection in list(self._http.open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def restart(self) -> None:
        self._start()

    def _start(self) -> None:
        server = self

        class Handler(_Handler):
            owner = server

        self._http = _HTTP(("127.0.0.1", self.port), Handler)
        self.port = self._http.server_address[1]
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()


class _HTTP(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 256
    block_on_close = False

    def __init__(self, *args: Any) -> None:
        self.open: set[socket.socket] = set()
        super().__init__(*args)

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        self.open.add(connection)
        return connection, address

    def shutdown_request(self, request: Any) -> None:
        self.open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hangs up is nothing to print."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    owner: Server

    def do_HEAD(self) -> None:
        data = self.owner.objects.get(unquote(self.path).lstrip("/"))
        self._say(404 if data is None else 200, b"", length=len(data or b""))

    def do_GET(self) -> None:
        owner, path = self.owner, unquote(self.path).lstrip("/")
        ranged = self.headers.get("Range", "")
        with owner.lock:
            owner.requests += 1
            nth = owner.asked[what := f"{path} {ranged}"]
            owner.asked[what] += 1
        time.sleep(owner.faults.delay)
        data = owner.objects.get(path)
        query = parse_qs(urlsplit(path).query)
        if "list-type" in query:
            data = self._listing(urlsplit(path).path.strip("/"), query.get("prefix", [""])[0])
        if path in owner.denied:
            return self._say(403, b"")
        if data is None:
            return self._say(404, b"")
        if owner.faults.stalled(path, nth):
            with owner.lock:
                owner.hurt["stalled"] += 1
            owner.over.wait(30)
            self.close_connection = True
            return None
        total, where = len(data), None
        if ranged:
            first, last = ranged.removeprefix("bytes=").split("-")
            if int(first) >= total:
                return self._say(416, b"")
            stop = min(int(last) + 1, total)
            data, where = data[int(first) : stop], f"bytes {first}-{stop - 1}/{total}"
        fault = owner.faults.of(what, nth)
        with owner.lock:
            owner.hurt[fault] += bool(fault)
            owner.bytes += len(data)
        if fault == "errors":
            return self._say(500, b"sorry")
        if fault == "wrong":
            data = bytes([data[0] ^ 1]) + data[1:]
        if fault == "cut":
            self._say(206 if where else 200, data[: len(data) // 2], length=len(data), where=where)
            self.close_connection = True
            return None
        return self._say(206 if where else 200, data, where=where)

    def _listing(self, bucket: str, prefix: str) -> bytes:
        """As S3 answers ListObjectsV2."""
        found = {
            k.removeprefix(f"{bucket}/"): v for k, v in self.owner.objects.items() if k.startswith(f"{bucket}/{prefix}")
        }
        rows = [
            f"<Contents><Key>{key}</Key><LastModified>2025-01-01T00:00:00.000Z</LastModified><Size>{len(data)}</Size></Contents>"
            for key, data in found.items()
        ]
        return f"<ListBucketResult><KeyCount>{len(rows)}</KeyCount>{''.join(rows)}</ListBucketResult>".encode()

    def _say(self, status: int, body: bytes, *, length: int | None = None, where: str | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.send_header("Last-Modified", "Wed, 01 Jan 2025 00:00:00 GMT")
        self.send_header("ETag", '"one"')
        if where:
            self.send_header("Content-Range", where)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""
