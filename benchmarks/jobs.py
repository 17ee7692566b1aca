"""What do several jobs on one node gain from one feed, in time and in bytes?

    python benchmarks/jobs.py --quick

Four jobs go through the same samples behind an HTTP server with a bandwidth for all connections together. Baselines,
in the same run and with the same number of workers per job: four separate jobs, each with a cache of its own for all
samples; TensorSocket, whose one producer has the best of two numbers of workers; and one job alone, with its own
cache. Every job must get each sample once per epoch; TensorSocket leaves out two batches. Its producer reads before
the first consumer has connected, so it and the feed are compared over the last two thirds of the samples of each job.
It would embarrass us if four jobs moved more bytes than one, if TensorSocket were faster, or if one job alone were
slower through a feed than with its own cache. Jobs begin together once all have started, so that imports are not
counted.

    bytes_vs_one            bytes of four jobs through a feed, by those of one job with its own cache
    jobs_vs_separate        samples per second of all jobs, feed by separate; storage-bound, one plan
    jobs_vs_tensorsocket    the same, feed by TensorSocket, once a third of the samples has arrived
    decode_vs_separate      the same, decode-bound
    plans_bytes             bytes of separate jobs by those of a feed, four different plans
    alone_ratio             seconds of one job through a feed, by its own cache
    groups_fast             seconds of two fast jobs beside two slow ones with one plan and little memory, all four as one
                            group, by groups of equal pace; groups_slow: of the slow ones; groups_alone: of separate jobs
    search_time_ratio       CPU seconds of a search whose trials share a ledger, by one without (jobs_search.py)
    packing                 samples per second of stacked models, by those of processes (jobs_packing.py)
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

import salience
from jobs_packing import packing
from jobs_search import searches
from salience.feed.pack import PackSettings, pack
from salience.feed.sharing import finding
from store_server import Store, running

JOBS, BATCH, LATENCY = 4, 16, 0.02
ARMS = ("storage", "decode", "plans", "alone", "groups", "packing", "search")
PORTS = iter(range(21000, 29000, 10))


@dataclass(frozen=True, slots=True)
class Load:
    """What limits the jobs."""

    name: str
    rate: float
    """Bytes per second of the link; 0 = as fast as it goes."""
    pixels: bool
    """Decode images rather than take a few bytes."""


def few(data: Any) -> torch.Tensor:
    """Hardly any work."""
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8)[:1024].copy())


def image(data: Any) -> torch.Tensor:
    """A JPEG, decoded and resized."""
    from PIL import Image

    with Image.open(io.BytesIO(data)) as opened:
        return torch.from_numpy(np.array(opened.convert("RGB").resize((64, 64), Image.Resampling.BICUBIC)))


def samples(folder: Path, n: int) -> Path:
    """`n` noisy JPEGs in shards."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for i in range(n):
        file = folder / "raw" / f"c{i % 10}" / f"{i:05}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        coarse = rng.integers(0, 255, (80, 80, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((320, 320), Image.Resampling.BICUBIC).save(file, quality=95)
    pack(folder / "raw", folder / "shards", PackSettings(shard_size=2 << 20))
    return folder / "shards"


# --- a job, in a process of its own ---


class Batches(torch.utils.data.Dataset[Any]):
    """What TensorSocket's DataLoader reads: a batch in one read."""

    def __init__(self, url: str, decode: Callable[[Any], torch.Tensor]) -> None:
        self.source, self.decode = salience.Source(url), decode

    def __len__(self) -> int:
        return len(self.source)

    def __getitems__(self, ids: list[int]) -> list[tuple[torch.Tensor, int]]:
        return [(self.decode(data), i) for i, data in zip(ids, self.source.read(ids), strict=True)]


def job(terms: dict[str, Any]) -> None:
    """Get ready, wait for a line, go through the epochs, and say how many samples there were."""
    decode = image if terms["pixels"] else few
    if terms["arm"] == "producer":
        return produce(terms, decode)
    if terms["arm"] == "consumer":
        return consume(terms)
    common = {"batch_size": BATCH, "seed": terms["seed"], "num_workers": terms["workers"], "with_ids": True}
    if terms["arm"] == "shared":
        loader = salience.Loader(
            salience.SharedFeed(terms["url"], name=terms["name"], decode=decode, cache=terms["cache"]), **common
        )
    else:
        loader = salience.Loader(salience.Source(terms["url"], decode=decode, cache=terms["cache"]), **common)
    begin()
    seen: list[int] = []
    third = 0, 0.0
    for _ in range(terms["epochs"]):
        for ids, _ in loader:
            seen += ids.tolist()
            if not third[0] and len(seen) >= terms["samples"] // 3:
                third = len(seen), time.time()
            time.sleep(terms["pause"])
    assert np.array_equal(np.bincount(seen), np.full(len(loader.dataset), terms["epochs"]))
    end(len(seen), third)


def produce(terms: dict[str, Any], decode: Callable[[Any], torch.Tensor]) -> None:
    from tensorsocket import TensorProducer

    data = DataLoader(Batches(terms["url"], decode), batch_size=BATCH, shuffle=True, num_workers=terms["workers"])
    port = terms["port"]
    producer = TensorProducer(data, port, port + 1, (port + 2, port + 3), producer_batch_size=2)
    begin()
    while True:
        with contextlib.suppress(StopIteration):
            for _ in producer:
                pass


def consume(terms: dict[str, Any]) -> None:
    from tensorsocket import TensorConsumer

    port = terms["port"]
    begin()
    consumer = TensorConsumer(port, port + 1, (port + 2, port + 3), batch_size=BATCH)
    count, third = 0, (0, 0.0)
    for batch in consumer:
        count += len(batch[1])
        if not third[0] and count >= terms["samples"] // 3:
            third = count, time.time()
        time.sleep(terms["pause"])
        if count >= terms["samples"] - 2 * BATCH:  # what does not fill a producer batch is not sent
            break
    end(count, third)


def begin() -> None:
    print("ready", flush=True)
    sys.stdin.readline()


def end(count: int, third: tuple[int, float]) -> None:
    print(json.dumps({"samples": count, "third": third, "last": time.time()}), flush=True)
    os._exit(0)


# --- arms ---


@dataclass(frozen=True, slots=True)
class Measured:
    """One arm: all jobs together."""

    rate: float
    """Samples per second of all jobs, from the common start to the last end."""
    steady: float
    """The same, once a third of the samples of every job has arrived."""
    seconds: float
    """From the common start to the end of the last."""
    bytes: int
    ends: tuple[float, ...] = ()
    """From the common start to the end of each."""


class Processes:
    """Jobs that are ready, and then begin together."""

    def __init__(self, terms: list[dict[str, Any]]) -> None:
        self.all = [
            subprocess.Popen(
                [sys.executable, __file__, "--job", json.dumps(one)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for one in terms
        ]
        for process in self.all:
            assert process.stdout is not None
            while (line := process.stdout.readline().strip()) != "ready":  # TensorSocket logs there
                if process.poll() is not None:
                    raise SystemExit(f"A job did not begin: {line}")

    def go(self) -> None:
        for process in self.all:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()

    def ends(self) -> list[dict[str, Any]]:
        found = []
        for process in self.all:
            assert process.stdout is not None
            while not (line := process.stdout.readline()).startswith("{"):
                if process.poll() is not None:
                    raise SystemExit(f"A job did not end well: {line}")
            found.append(json.loads(line))
        return found

    def close(self) -> None:
        for process in self.all:
            process.kill()
            process.wait()


def measure(
    store: Store, load: Load, arm: str, n: int, *, jobs: int = JOBS, epochs: int = 1, plans: bool = False,
    pauses: list[float] | None = None, ratio: float | None = None, **more: Any,
) -> Measured:  # fmt: skip
    """Run an arm. `pauses` are the seconds per batch of each job; `ratio` is that of a feed's groups, if not the usual one."""
    store.reset(rate=load.rate, latency=LATENCY)
    terms = {
        "arm": arm, "url": f"{store.url}/shards", "pixels": load.pixels, "workers": 1, "pause": 0.001, "epochs": epochs,
        "samples": n, "name": f"bench-{time.time_ns()}", "port": next(PORTS), "cache": "512MiB", **more,
    }  # fmt: skip
    producer = None
    if arm == "tensorsocket":
        producer = Processes([{**terms, "arm": "producer"}])
        terms = {**terms, "arm": "consumer"}
    if ratio is not None:
        feed = salience.SharedFeed(terms["url"], name=terms["name"], cache=terms["cache"])
        finding.ask(feed.name, "stop")
        while not finding.ensure(replace(feed.config, pace_ratio=ratio), feed.source.index):
            time.sleep(0.1)
    pauses = pauses or [terms["pause"]] * jobs
    processes = Processes([{**terms, "seed": k if plans else 0, "pause": pauses[k]} for k in range(jobs)])
    before = store.counts()
    begin, start = time.time(), time.perf_counter()
    try:
        if producer is not None:
            producer.go()
        processes.go()
        signal.alarm(240)
        found = processes.ends()
        signal.alarm(0)
        seconds = time.perf_counter() - start
    finally:
        processes.close()
        if producer is not None:
            producer.close()
        finding.ask(terms["name"], "stop")
    count, last = sum(one["samples"] for one in found), max(one["last"] for one in found)
    since = min(one["third"][1] for one in found)
    steady = sum(one["samples"] - one["third"][0] for one in found) / max(1e-9, last - since)
    ends = tuple(one["last"] - begin for one in found)
    return Measured(count / seconds, steady, seconds, store.counts().bytes - before.bytes, ends)


def rows(store: Store, n: int, repeats: int, only: set[str]) -> dict[str, Any]:
    size = sum(file.stat().st_size for file in Path(store_root).glob("shards/*.tar"))
    seconds = 2.5 if repeats == 1 else 4.0
    storage, decoding = Load("storage", size / seconds, False), Load("decode", 0.0, True)
    out: dict[str, Any] = {}

    def best(arms: list[Measured]) -> Measured:
        return sorted(arms, key=lambda one: one.rate)[len(arms) // 2]

    def row(name: str, load: Load, arm: str, **more: Any) -> Measured:
        found = best([measure(store, load, arm, n, **more) for _ in range(repeats)])
        print(
            f"{name:<28} {load.name:<8} {found.rate:7.0f} samples/s, at last {found.steady:7.0f}  {found.seconds:6.2f} s  "
            f"{found.bytes / 1e6:7.1f} MB",
            flush=True,
        )
        return found

    if "storage" in only:
        shared = row("four jobs, one feed", storage, "shared")
        separate = row("four jobs, separate", storage, "separate")
        one = row("one job, own cache", storage, "separate", jobs=1)
        out |= {"bytes_vs_one": shared.bytes / one.bytes, "jobs_vs_separate": shared.rate / separate.rate}
        sockets = []
        for workers in (2,) if repeats == 1 else (2, 4):
            if importlib.util.find_spec("tensorsocket") is not None:
                sockets.append(row(f"TensorSocket, {workers} workers", storage, "tensorsocket", workers=workers))
        if sockets:
            out["jobs_vs_tensorsocket"] = shared.steady / max(one.steady for one in sockets)
    if "decode" in only:
        shared, separate = (
            row("four jobs, one feed", decoding, "shared"),
            row("four jobs, separate", decoding, "separate"),
        )
        out["decode_vs_separate"] = shared.rate / separate.rate
        if importlib.util.find_spec("tensorsocket") is not None:
            socket = row("TensorSocket, 2 workers", decoding, "tensorsocket", workers=2)
            out["decode_vs_tensorsocket"] = shared.steady / socket.steady
    if "plans" in only:
        shared = row("four plans, one feed", storage, "shared", plans=True)
        separate = row("four plans, separate", storage, "separate", plans=True)
        out |= {"plans_bytes": separate.bytes / shared.bytes, "plans_vs_separate": shared.rate / separate.rate}
    if "alone" in only:
        pairs = [
            (
                measure(store, storage, "shared", n, jobs=1, epochs=2).seconds,
                measure(store, storage, "separate", n, jobs=1, epochs=2).seconds,
            )
            for _ in range(repeats)
        ]
        ratios = sorted(feed / own for feed, own in pairs)
        print("one job alone, feed and own cache:", "; ".join(f"{feed:.2f} s and {own:.2f} s" for feed, own in pairs))
        out["alone_ratio"] = statistics.median(ratios)
    if "groups" in only:
        out |= groups(store, n, size, repeats)
    if "packing" in only:
        out |= packing(300)
    if "search" in only:
        out |= searches(1000 if n < 500 else 2000, repeats)
    return out


def groups(store: Store, n: int, size: int, repeats: int) -> dict[str, float]:
    """Two jobs that take 2 ms per batch and two that take 60 ms, with one plan and memory for a tenth of the samples."""
    load = Load("storage", size / 2.0, True)
    pauses, cache = [0.002, 0.002, 0.06, 0.06], int(0.1 * n * 64 * 64 * 3)
    ways: dict[str, dict[str, Any]] = {
        "grouped by pace": {"arm": "shared", "cache": cache},
        "one group": {"arm": "shared", "cache": cache, "ratio": 1e9},
        "separate": {"arm": "separate", "cache": cache},
    }
    found: dict[str, tuple[float, float]] = {}
    for name, way in ways.items():
        runs = [measure(store, load, way["arm"], n, epochs=2, pauses=pauses, **{k: v for k, v in way.items() if k != "arm"})
                for _ in range(repeats)]  # fmt: skip
        fast = statistics.median(max(one.ends[:2]) for one in runs)
        slow = statistics.median(max(one.ends[2:]) for one in runs)
        sent = statistics.median(one.bytes for one in runs)
        print(f"{name:<28} fast jobs {fast:6.2f} s, slow jobs {slow:6.2f} s  {sent / 1e6:7.1f} MB", flush=True)
        found[name] = fast, slow
    fast, slow = found["grouped by pace"]
    return {
        "groups_fast": found["one group"][0] / fast, "groups_slow": found["one group"][1] / slow,
        "groups_alone": found["separate"][0] / fast,
    }  # fmt: skip


def main() -> None:
    global store_root
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help="fewer samples, each row once")
    parser.add_argument("--repeats", type=int, default=0, help="runs of each row (default: 3, with --quick 1)")
    parser.add_argument("--only", default="", help=f"of {', '.join(ARMS)}; with commas")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.job:
        return job(json.loads(args.job))
    n = 240 if args.quick else 960
    usual = "storage,alone" if args.quick else ",".join(ARMS)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SALIENCE_FEEDS"] = str(Path(folder) / "feeds")
        store_root = Path(folder)
        samples(store_root, n)
        with running(store_root, rate=0, latency=LATENCY) as store:
            found = rows(store, n, args.repeats or (1 if args.quick else 3), set((args.only or usual).split(",")))
    print(json.dumps({name: round(value, 3) for name, value in found.items()}))


store_root = Path()

if __name__ == "__main__":
    main()
