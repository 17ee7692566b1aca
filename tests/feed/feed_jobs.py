"""Jobs of a shared feed as real processes, which report every batch that they get."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import time
import zlib
from typing import Any

import numpy as np
import torch

import salience

Batch = tuple[list[int], int]
"""Ids, and a checksum of everything in the batch."""


def decode(data: bytes) -> torch.Tensor:
    """Slow enough that several jobs are at it together."""
    time.sleep(0.0005)
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8)[:96].astype(np.float32))


def other_decode(data: bytes) -> torch.Tensor:
    return torch.tensor([float(len(data)), float(data[0])])


def halve(sample: torch.Tensor) -> torch.Tensor:
    return sample / 2


def noise(sample: torch.Tensor) -> torch.Tensor:
    return sample + torch.randn(())


def stages() -> list[salience.Stage]:
    return [salience.Stage(halve, random=False), salience.Stage(noise, random=True)]


def checksum(batch: Any) -> int:
    parts = batch if isinstance(batch, (list, tuple)) else [batch]
    return zlib.crc32(b"".join(part.numpy().tobytes() for part in parts))


def alone(source: salience.Source, *, epochs: int = 1, **options: Any) -> list[Batch]:
    """The batches of a job without a feed."""
    loader = salience.Loader(source, with_ids=True, **options)
    return [(ids.tolist(), checksum(batch)) for _ in range(epochs) for ids, batch in loader]


class JobProcess:
    """A process that goes through a Loader on a SharedFeed. `go` lets it begin; without it, it begins at once."""

    def __init__(self, url: str, *, feed: dict[str, Any], wait: bool = False, **options: Any) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_main, args=(theirs, url, feed, wait, options))
        self.process.start()
        theirs.close()
        self.got: list[Batch] = []
        self.said: list[str] = []

    def go(self) -> None:
        self.pipe.send("go")

    def begun(self) -> JobProcess:
        """Wait until it has its Loader."""
        kind, what = self._hear()
        assert kind == "begun", what
        return self

    def wait_for(self, batches: int) -> None:
        """Wait until it has got that many."""
        while len(self.got) < batches:
            kind, what = self._hear()
            assert kind == "batch", what
            self.got.append(what)

    def finish(self) -> list[Batch]:
        """All its batches."""
        while True:
            kind, what = self._hear()
            if kind == "over":
                self.said = what
                break
            assert kind == "batch", what
            self.got.append(what)
        self.process.join(20)
        return self.got

    def kill(self) -> None:
        os.kill(self.process.pid or 0, signal.SIGKILL)
        self.process.join()

    def _hear(self) -> tuple[str, Any]:
        if not self.pipe.poll(60):
            raise AssertionError("the job says nothing")
        return self.pipe.recv()


def _main(pipe: Any, url: str, feed: dict[str, Any], wait: bool, options: dict[str, Any]) -> None:
    epochs, pause = options.pop("epochs", 1), options.pop("pause", 0.0)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger().addHandler(handler)
    with contextlib.suppress(BrokenPipeError):
        try:
            loader = salience.Loader(salience.SharedFeed(url, **feed), with_ids=True, **options)
            pipe.send(("begun", None))
            if wait:
                pipe.recv()
            for _ in range(epochs):
                for ids, batch in loader:
                    pipe.send(("batch", (ids.tolist(), checksum(batch))))
                    time.sleep(pause)
            pipe.send(("over", said))
        except Exception as error:
            pipe.send(("failed", f"{type(error).__name__}: {error}"))
    os._exit(0)
