"""Small image folders, and the command run as a user runs it, for the tests of the command line."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from PIL import Image

from salience.app.glyphs import SYMBOLS, render

COMMAND = Path(sys.executable).with_name("salience")


def photos(root: Path, n: int = 48, *, classes: int = 4, size: int = 16, prefix: str = "") -> Path:
    """`n` rendered images under root/<class>/, the class a glyph with `prefix` before it."""
    glyphs = render(n, classes=classes, size=size, copies=0, wrong=0)
    for i, (image, label) in enumerate(zip(glyphs.images, glyphs.labels, strict=True)):
        folder = root / f"{prefix}{SYMBOLS[label]}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{i:03}.png")
    return root


def salience(*args: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The installed command in a process of its own. Output goes to files: a killed run's workers outlive it a while."""
    files = [cwd / "stdout.txt", cwd / "stderr.txt"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error::ResourceWarning", **environment}
    with files[0].open("w") as out, files[1].open("w") as err:
        done = subprocess.run(
            [COMMAND, *map(str, args)], cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err, timeout=120
        )
    return subprocess.CompletedProcess(done.args, done.returncode, *(file.read_text() for file in files))


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[str]:
    """The URL of an HTTP server on loopback that answers range requests for the files of `folder`."""
    files = {f"/{path.name}": path.read_bytes() for path in folder.iterdir()}

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, *, body: bool) -> None:
            data, asked = files.get(self.path), self.headers.get("Range")
            part = data or b""
            if data is not None and asked:
                start, stop = map(int, asked.removeprefix("bytes=").split("-"))
                part = data[start : stop + 1]
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {start}-{stop}/{len(data)}")
            else:
                self.send_response(404 if data is None else 200)
            self.send_header("Content-Length", str(len(part)))
            self.end_headers()
            if body:
                self.wfile.write(part)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
