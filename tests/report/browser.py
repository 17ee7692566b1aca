"""A real Chromium without a window, driven over a pipe by the DevTools protocol: no driver, no port, no library."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import subprocess
from pathlib import Path
from typing import Any

PATIENCE = 60
"""Seconds after which an answer does not come any more."""
QUIET = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-extensions", "--disable-sync",
)  # fmt: skip


class Browser:
    """One Chromium with one tab. `events` are those of the page since it was opened."""

    def __init__(self, program: str, folder: Path) -> None:
        self.events: list[dict[str, Any]] = []
        self._count, self._rest = 0, b""
        commands, self._to = os.pipe()
        self._from, answers = os.pipe()
        high = [fcntl.fcntl(end, fcntl.F_DUPFD, 20) for end in (commands, answers)]
        # Chromium takes commands from file 3 and answers to file 4.
        script = f'exec "$0" "$@" 3<&{high[0]} 4>&{high[1]}'
        options = [*QUIET, f"--user-data-dir={folder}", "--remote-debugging-pipe", "about:blank"]
        with (folder / "log.txt").open("wb") as log:
            self.process = subprocess.Popen(
                ["bash", "-c", script, program, *options], pass_fds=high, stdout=log, stderr=log
            )
        for end in (commands, answers, *high):
            os.close(end)
        target = self.call("Target.createTarget", session="", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", session="", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, *, session: str | None = None, **params: Any) -> dict[str, Any]:
        self._count += 1
        session = self._session if session is None else session
        message = {"id": self._count, "method": method, "params": params, **({"sessionId": session} if session else {})}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, page: Path, *, width: int, height: int = 900, dark: bool = False) -> None:
        """Load a file, at a width, as in daylight or at night."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=page.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._next()

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def picture(self, path: Path) -> Path:
        """The whole page as PNG."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))
        return path

    def complaints(self) -> list[str]:
        """What the console has to say: errors, warnings, things the page's own policy forbids."""
        wanted = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [json.dumps(event["params"]) for event in self.events if event["method"] in wanted]

    def requests(self) -> list[str]:
        """Addresses the page asked for, its pictures within itself aside."""
        asked = [e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"]
        return [url for url in asked if not url.startswith("data:")]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._to)
        os.close(self._from)

    def _next(self) -> dict[str, Any]:
        """The next message; events are kept."""
        while b"\0" not in self._rest:
            assert select.select([self._from], [], [], PATIENCE)[0], "Chromium does not answer"
            more = os.read(self._from, 1 << 20)
            assert more, "Chromium has ended"
            self._rest += more
        first, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(first)
        if "method" in message:
            self.events.append(message)
        return message
