"""The rig of the I/O benchmark: samples in a store, plans as traces, and rows that run in fresh processes and are checked."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import peers
import salience
from caches import Plans
from salience.feed.index import Index
from salience.feed.pack import PackSettings, pack
from store_server import Store

RATE, LATENCY, SHARE = 80e6, 0.02, 0.2
RATIOS = (10, 3, 1)
"""I/O:compute."""
DEFAULT = "planned"


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    samples: int = 1500
    measured: int = 2
    """Windows at each ratio."""
    settings: int = 3
    """Of each peer."""
    windows: int = 30
    """Of a whole run."""
    without: tuple[str, ...] = ()
    """Peers that cannot be installed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    name: str
    plan: str
    options: dict[str, Any] = field(default_factory=dict)

    def open(self, bench: Bench, folder: Path) -> Iterable[Any]:
        cache = int(SHARE * bench.index.nbytes)
        if self.name == "litdata":
            return peers.litdata(bench.url, cache, folder, **self.options)
        if self.name == "webdataset":
            return peers.webdataset(bench.url, cache, folder, shards=bench.index.shards, **self.options)
        return peers.ours(bench.url, cache, policy=self.name, **self.options)


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    numbers: np.ndarray
    """Of the samples delivered, in order, int64 [n]."""
    seconds: float
    bytes: int
    requests: int
    ranges: list[tuple[str, int, int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """What all rows share."""

    url: str
    folder: Path
    index: Index
    scale: Scale

    @property
    def numbers(self) -> np.ndarray:
        """Of each sample in the index, the number in its first bytes, int64 [n]."""
        return np.array([int(Path(self.index.names[i]).stem) for i in range(len(self.index))])

    def pause(self, ratio: float) -> float:
        """Seconds of compute for a sample, at I/O:compute = ratio:1."""
        return self.index.nbytes / len(self.index) / RATE / ratio

    def write(self, name: str, plans: Plans) -> dict[str, Any]:
        """The plans as a trace; options of a row of ours."""
        trace = salience.Trace(self.folder / "traces" / name)
        for window, (ids, importance) in enumerate(plans):
            trace.write(
                salience.Plan(
                    window=window, population=len(self.index), batch_size=peers.BATCH, ids=ids.astype(np.int64),
                    weights=np.ones(len(ids), np.float32), importance=importance[ids],
                    level=np.zeros(len(ids), np.uint8), importance_of_all=importance.astype(np.float16),
                )
            )  # fmt: skip
        return {"trace": str(trace.folder), "windows": len(plans)}

    def run(self, row: Row, pauses: Sequence[float], plans: Plans | None = None, ranges: bool = False) -> list[Window]:
        """Each window in turn; `plans` is what must have been delivered, everything where there is none."""
        least = sum(self.index.nbytes / RATE + pause * len(self.index) for pause in pauses)
        windows: list[Window] = apart(20 + 4 * least, consume, self, row, pauses, ranges)
        numbers = self.numbers
        for k, window in enumerate(windows):
            wanted, got = (
                (numbers[plans[k][0]], window.numbers) if plans else (np.sort(numbers), np.sort(window.numbers))
            )
            if not np.array_equal(wanted, got):
                raise SystemExit(f"{row.name}: what was delivered is not what was planned; the row is worth nothing.")
        return windows


def consume(bench: Bench, row: Row, pauses: Sequence[float], ranges: bool) -> list[Window]:
    store, out = Store(bench.url), list[Window]()
    loader = row.open(bench, Path(tempfile.mkdtemp(dir=bench.folder)))
    for pause in pauses:
        numbers: list[int] = []
        store.reset()
        begin = time.perf_counter()
        for batch in loader:
            numbers.extend(batch[:, 0].tolist())
            time.sleep(pause * len(batch))
        seconds, counts = time.perf_counter() - begin, store.counts()
        out.append(
            Window(
                numbers=np.array(numbers), seconds=seconds, bytes=counts.bytes, requests=counts.requests,
                ranges=store.ranges() if ranges else [],
            )
        )  # fmt: skip
    return out


def apart(limit: float, work: Callable[..., Any], *args: Any) -> Any:
    """The result of `work` in a fresh process, given up after `limit` seconds: stores' clients do not survive each other."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["salience"])  # and torch with it, once instead of in every process
    here, there = context.Pipe()
    process = context.Process(target=_send, args=(there, work, args))
    process.start()
    there.close()
    try:
        done, answer = here.recv() if here.poll(limit) else (False, f"it was given up after {limit:.0f} s")
    except EOFError:
        done, answer = False, "the process died"
    process.join(10 if done else 0)
    process.kill()
    process.join()
    if not done:
        raise RuntimeError(answer)
    return answer


def _send(there: Any, work: Callable[..., Any], args: Sequence[Any]) -> None:
    multiprocessing.set_start_method("fork", force=True)  # for loader workers, as in any program
    said = os.dup(1)
    os.dup2(2, 1)  # what peers print does not belong on stdout
    try:
        answer = True, work(*args)
    except Exception as error:
        answer = False, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    os.dup2(said, 1)
    there.send(answer)


def spread(sizes: np.ndarray) -> np.ndarray:
    """Importances 0/n, 1/n, ... spread evenly over large and small samples, float32 [n]: chance would move bytes by 5%."""
    places = np.empty(len(sizes))
    places[np.argsort(sizes, kind="stable")] = np.arange(len(sizes)) * (5**0.5 - 1) / 2 % 1
    return (np.argsort(np.argsort(places)) / len(sizes)).astype(np.float32)


def pick(importance: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """P(pick) = importance, bool [n]; of twenty samples of like importance as many as that says, to within one."""
    n = len(importance)
    places = rng.permuted(np.tile(np.arange(20.0), (-(-n // 20), 1)), axis=1)
    chances = ((places + rng.random(places.shape)) / 20).ravel()[:n]
    picked = np.empty(n, dtype=bool)
    picked[np.argsort(importance, kind="stable")] = chances < np.sort(importance)
    return picked


def make(folder: Path, n: int, size: int = 115_000) -> Index:
    """Samples of about `size` bytes as files, and in tar shards."""
    rng = np.random.default_rng(0)
    (folder / "raw").mkdir()
    sizes = rng.lognormal(np.log(size), 0.4, n).astype(int)
    for i, length in enumerate(sizes.tolist()):
        (folder / "raw" / f"{i:06}.bin").write_bytes(i.to_bytes(8, "little") + rng.bytes(max(0, length - 8)))
    return pack(folder / "raw", folder / "shards", PackSettings(shard_size=shard_size(int(sizes.sum()))))


def shard_size(total: int) -> int:
    """Bytes of a shard or chunk: a ninth of the cache, since from larger ones the others would have little to keep."""
    return int(SHARE * total / 9)
