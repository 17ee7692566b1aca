"""How much does the feed take off a slow store, and is the link ever idle?

A real HTTP server in a process of its own (store_server.py) sends at most 80 MB/s over all connections together and waits 20 ms
before each answer; it counts the bytes and requests of every row. Samples of about 115 kB in tar shards of `salience pack`,
a cache of 20% of their bytes for everybody, a consumer that sleeps instead of training. Each row runs in a fresh process, and
what it delivered is checked, sample by sample.

- rows: our Loader with every cache policy on percentile plans (P(pick) = importance) and with LRU and never-evict on
  everything once a window; LitData and WebDataset (peers.py), which cannot skip, at the best of three settings.
  Steady state, after two windows. I/O:compute = r:1 means: sending a sample takes r times as long as computing on it.
- whole: 30 windows from cold, two of everything, then picks and a quarter of the unpicked (the refresh set), and
  everything in the last fifth; against never-evict with everything in each window. Says which part the bytes went to.
- replay: plans recorded while training (rows/io-*.jsonl), replayed through the store: time and bytes against accuracy.

Embarrassing would be: link_utilisation under 0.9, bytes_vs_lru under 2.9, bytes_vs_never_evict under 2.4, bytes_vs_bound over
1.05, hit_rate_uniform more than 0.01 from the cache's share, whole_run_vs_never_evict under 1.4,
time_vs_uniform_subsample under 1.2, hit_us over 5, index_open_s over 1; a peer that delivers everything faster than we do.

    python benchmarks/io_bound.py [--quick] [--part rows|link|whole|replay]       # needs: pip install 'salience[feed,bench]'

The last line of stdout is one JSON object. Exit status 1: a row is missing (`--without NAME` says that it cannot be installed).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import peers
import salience
from caches import Plans, hit_us, uniform
from io_replay import replay
from io_rig import (
    DEFAULT,
    LATENCY,
    RATE,
    RATIOS,
    SHARE,
    Bench,
    Row,
    Scale,
    Window,
    apart,
    make,
    pick,
    shard_size,
    spread,
)
from rivals import POLICIES, bound, policy
from salience.feed.cache import Handle
from salience.feed.index import FILE, Index, Names
from salience.feed.shared import WHOLE, Shared
from salience.feed.simulate import fetched
from store_server import pull, running

MISSING = "install it with `pip install 'salience[bench]'`, or say --without NAME if that cannot be."

# ---------------------------------------------------------------- rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """A row in steady state: windows by I/O:compute."""

    row: Row
    windows: dict[int, list[Window]]

    def rate(self, ratio: int) -> float:
        """Samples a second."""
        return sum(len(w.numbers) for w in self.windows[ratio]) / sum(w.seconds for w in self.windows[ratio])

    def seconds(self, ratio: int) -> float:
        return float(np.median([w.seconds for w in self.windows[ratio]]))

    @property
    def all(self) -> list[Window]:
        return [w for windows in self.windows.values() for w in windows]

    @property
    def bytes(self) -> float:
        """Of a window."""
        return float(np.mean([w.bytes for w in self.all]))

    @property
    def utilisation(self) -> float:
        """Of the link where compute is next to nothing, the edges of the windows included."""
        busy = self.windows[RATIOS[0]]
        return sum(w.bytes for w in busy) / sum(w.seconds for w in busy) / RATE

    def line(self, total: int) -> str:
        rates = "".join(f"{self.rate(ratio):>9.0f}" for ratio in reversed(RATIOS))
        requests = np.mean([w.requests for w in self.all])
        return (
            f"  {self.row.name:<12}{self.row.plan:<12}{self.bytes / total:>7.3f}{requests:>10.0f}{rates}"
            f"{self.seconds(RATIOS[0]):>10.2f}   {_words(self.row.options)}"
        )


def percentile(sizes: np.ndarray, windows: int) -> Plans:
    """P(pick) = importance, the workload of the importance-cache papers."""
    rng, importance = np.random.default_rng(2), spread(sizes)
    return [(rng.permutation(np.flatnonzero(pick(importance, rng))), importance) for _ in range(windows)]


def rows(bench: Bench) -> dict[str, Any]:
    scale, n, total = bench.scale, len(bench.index), bench.index.nbytes
    ratios = [RATIOS[0]] * 2 + [ratio for ratio in RATIOS for _ in range(scale.measured)]
    pauses = [bench.pause(ratio) for ratio in ratios]
    plans = {"percentile": percentile(bench.index.size, len(ratios)), "everything": uniform(n, len(ratios))}
    options = {name: bench.write(name, made) for name, made in plans.items()}
    print(f"\n{'':<26}{'bytes':>7}{'requests':>10}{'samples/s at I/O:compute':>27}{'s/window':>10}\n"
          f"  {'':<12}{'plan':<12}{'of all':>7}{'a window':>10}{'1:1':>9}{'3:1':>9}{'10:1':>9}{'at 10:1':>10}")  # fmt: skip

    def measured(row: Row) -> Result:
        windows = bench.run(row, pauses, plans.get(row.plan))
        by: dict[int, list[Window]] = {ratio: [] for ratio in RATIOS}
        for ratio, window in list(zip(ratios, windows, strict=True))[2:]:
            by[ratio].append(window)
        result = Result(row=row, windows=by)
        print(result.line(total), flush=True)
        return result

    found: dict[tuple[str, str], Result] = {}
    for plan, names in (("percentile", list(POLICIES)), ("everything", ["lru", "never_evict", DEFAULT])):
        for name in names:
            found[name, plan] = measured(Row(name=name, plan=plan, options=options[plan]))
    tried = {name: _tried(name, measured, scale.settings) for name in peers.SETTINGS if name not in scale.without}
    ours, once = found[DEFAULT, "percentile"], found[DEFAULT, "everything"]
    sizes = bench.index.size
    top = int(SHARE * total) >= np.cumsum(sizes[np.argsort(-plans["percentile"][0][1])])
    kept = np.argsort(-plans["percentile"][0][1])[top]
    least = np.mean([sizes[np.setdiff1d(ids, kept)].sum() for ids, _ in plans["percentile"][2:]])
    simulated = np.mean(fetched(policy(DEFAULT, int(SHARE * total), sizes), plans["percentile"], sizes)[2:])
    rates = {f"{name} {plan}": result.rate for (name, plan), result in found.items()}
    rates |= {name: lambda ratio, best=best: max(result.rate(ratio) for result in best) for name, best in tried.items()}
    return {
        "link_utilisation": round(ours.utilisation, 3),
        "link_utilisation_everything": round(once.utilisation, 3),
        "bytes_vs_lru": round(found["lru", "everything"].bytes / ours.bytes, 3),
        "bytes_vs_never_evict": round(found["never_evict", "everything"].bytes / ours.bytes, 3),
        "bytes_vs_lru_same_plan": round(found["lru", "percentile"].bytes / ours.bytes, 3),
        "bytes_vs_never_evict_same_plan": round(found["never_evict", "percentile"].bytes / ours.bytes, 3),
        "bytes_vs_bound": round(ours.bytes / (bound(SHARE, 1.0) * total), 4),
        "bytes_vs_bound_of_these_plans": round(ours.bytes / float(least), 4),
        "bytes_vs_simulated": round(ours.bytes / float(simulated), 4),
        "hit_rate_uniform": round(1 - once.bytes / total, 4),
        "everything_vs_best_peer": {
            f"{ratio}:1": round(once.rate(ratio) / max(rates[name](ratio) for name in tried), 3)
            for ratio in RATIOS
            if tried
        },
        "samples_per_s": {
            name: {f"{ratio}:1": round(rate(ratio)) for ratio in reversed(RATIOS)} for name, rate in rates.items()
        },
    }  # fmt: skip


def link(samples: int = 6000) -> dict[str, Any]:
    """The link's utilisation again where windows last for seconds, so that their edges weigh less."""
    with tempfile.TemporaryDirectory(prefix="salience-io-", ignore_cleanup_errors=True) as made:
        folder = Path(made)
        index = make(folder, samples)
        with running(folder, rate=RATE, latency=LATENCY) as store:
            bench = Bench(url=store.url, folder=folder, index=index, scale=Scale(samples=samples))
            plans = percentile(index.size, 4)
            row = Row(name=DEFAULT, plan="percentile", options=bench.write("long", plans))
            windows = bench.run(row, [bench.pause(RATIOS[0])] * 4, plans)[2:]
    seconds = sum(w.seconds for w in windows)
    return {
        "link_utilisation_long_windows": round(sum(w.bytes for w in windows) / seconds / RATE, 3),
        "long_window_s": round(seconds / len(windows), 2),
    }


def _tried(name: str, measured: Callable[[Row], Result], settings: int) -> list[Result]:
    """A peer at its settings; one that fails is said, and one has to be left."""
    found: list[Result] = []
    for options in peers.SETTINGS[name][-settings:]:
        try:
            found.append(measured(Row(name=name, plan="all", options=dict(options))))
        except RuntimeError as error:
            print(f"  {name:<12}did not finish with {_words(dict(options))}: {error}", flush=True)
    if not found:
        raise SystemExit(f"There is no row of {name}, see above; {MISSING}")
    return found


def _words(options: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in options.items() if name not in ("trace", "windows"))


# ---------------------------------------------------------------- whole runs


def whole_plans(sizes: np.ndarray, windows: int) -> tuple[Plans, list[np.ndarray]]:
    """Warm-up, picks with a refresh set, full end; and of each window which samples are only there to be refreshed."""
    rng, importance, n = np.random.default_rng(3), spread(sizes), len(sizes)
    plans: Plans = []
    refreshed: list[np.ndarray] = []
    for window in range(windows):
        everything = window < 2 or window >= windows - windows // 5
        picked = np.ones(n, dtype=bool) if everything else pick(importance, rng)
        unpicked = np.flatnonzero(~picked)
        again = rng.permutation(unpicked)[: len(unpicked) // 4]
        known = (
            importance if window else np.full(n, 0.5, np.float32)
        )  # nothing is known of anybody before the first window
        plans.append((rng.permutation(np.concatenate((np.flatnonzero(picked), again))), known))
        refreshed.append(again)
    return plans, refreshed


def of_samples(ranges: Iterable[tuple[str, int, int]], index: Index) -> tuple[np.ndarray, int]:
    """Bytes sent of each sample, int64 [n], and of what lies between samples."""
    sent, between = np.zeros(len(index), np.int64), 0
    number = {path: k for k, path in enumerate(index.shards)}
    inside = [np.flatnonzero(index.shard == k) for k in range(len(index.shards))]
    for path, start, size in ranges:
        ids = inside[number[path]] if path in number else np.empty(0, np.int64)
        first, last = index.offset[ids], index.offset[ids] + index.size[ids]
        part = np.clip(np.minimum(last, start + size) - np.maximum(first, start), 0, None)
        sent[ids] += part
        between += size - int(part.sum())
    return sent, between


def whole(bench: Bench) -> dict[str, Any]:
    n, total, count = len(bench.index), bench.index.nbytes, bench.scale.windows
    plans, refreshed = whole_plans(bench.index.size, count)
    everything = uniform(n, count)
    pauses = [bench.pause(RATIOS[0])] * count
    ours = bench.run(Row(name=DEFAULT, plan="whole", options=bench.write("whole", plans)), pauses, plans, ranges=True)
    other = bench.run(
        Row(name="never_evict", plan="everything", options=bench.write("whole-all", everything)), pauses, everything
    )
    parts = dict.fromkeys(("cold start", "warm-up", "picked", "refresh set", "full end", "between samples"), 0)
    for number, window in enumerate(ours):
        sent, between = of_samples(((p.removeprefix("shards/"), a, b) for p, a, b in window.ranges), bench.index)
        parts["between samples"] += between
        late = number >= count - count // 5
        name = "cold start" if number == 0 else "warm-up" if number == 1 else "full end" if late else "picked"
        again = int(sent[refreshed[number]].sum())
        parts["refresh set"] += again
        parts[name] += int(sent.sum()) - again
    ratio = sum(w.bytes for w in other) / sum(w.bytes for w in ours)
    print(f"\nA whole run of {count} windows: bytes, in passes over the data (and of all that was sent)")
    for name, sent in parts.items():
        print(f"  {name:<18}{sent / total:>8.2f}{sent / sum(parts.values()):>8.1%}")
    seconds = [sum(w.seconds for w in windows) for windows in (ours, other)]
    print(f"  {DEFAULT:<18}{sum(w.bytes for w in ours) / total:>8.2f} in {seconds[0]:.0f} s\n"
          f"  {'never_evict, all':<18}{sum(w.bytes for w in other) / total:>8.2f} in {seconds[1]:.0f} s")  # fmt: skip
    return {
        "whole_run_vs_never_evict": round(ratio, 3),
        "whole_run_time_vs_never_evict": round(seconds[1] / seconds[0], 3),
        "whole_run_parts": {name: round(sent / total, 3) for name, sent in parts.items()},
    }


# ---------------------------------------------------------------- small things


def lookup_us(n: int = 1_000_000, batch: int = 256) -> float:
    """Microseconds for the view of a resident sample among n, and for the policy's answer whether it is."""
    shared = Shared(n, 1, 64 * n)
    shared.state[:], shared.offset[:], shared.staged[:] = WHOLE, 64 * np.arange(n), 1
    handle, best = Handle(shared, 0, np.full(n, 64), views=True), np.inf
    ids = np.random.default_rng(0).integers(0, n, (400, batch)).tolist()
    for _ in range(5):
        begin = time.perf_counter()
        for part in ids:
            handle.read(0, part)
        best = min(best, time.perf_counter() - begin)
    return best / len(ids) / batch * 1e6 + hit_us(n)


def index_open_s(folder: Path, n: int = 1_000_000, shards: int = 1000) -> float:
    """Seconds to open a source of n samples, checks included: median of three."""
    folder.mkdir()
    each, zeros = n // shards, np.zeros(n, np.int64)
    names = tuple(f"shard-{k:06}.tar" for k in range(shards))
    for name in names:
        with (folder / name).open("wb") as file:
            file.truncate(each * 115_000)
    Index(
        names=Names.of(f"class/{i:08}.jpg" for i in range(n)), shards=names, shard_sizes=np.full(shards, each * 115_000),
        shard=np.repeat(np.arange(shards, dtype=np.int32), each), offset=np.tile(np.arange(each) * 115_000, shards),
        size=zeros + 115_000, check=np.arange(n, dtype=np.uint64), label=zeros.astype(np.int32), classes=("class",),
    ).save(folder / FILE)  # fmt: skip
    took: list[float] = []
    for _ in range(3):
        begin = time.perf_counter()
        assert len(salience.Source(folder)) == n
        took.append(time.perf_counter() - begin)
    return float(np.median(took))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="fewer samples and windows, one setting of each peer, no replay"
    )
    parser.add_argument("--part", choices=("rows", "link", "whole", "replay"), help="only this one")
    parser.add_argument(
        "--without", action="append", default=[], choices=tuple(peers.SETTINGS), help="cannot be installed"
    )
    args = parser.parse_args()
    without = tuple(args.without)
    scale = (
        Scale(samples=500, measured=1, settings=1, windows=15, without=without)
        if args.quick
        else Scale(without=without)
    )
    figures: dict[str, Any] = {"without": without} if without else {}
    if args.part == "link" or (args.part is None and not args.quick):
        figures |= link()
    if args.part == "link":
        print(json.dumps(figures))
        return
    with tempfile.TemporaryDirectory(prefix="salience-io-", ignore_cleanup_errors=True) as made:
        folder = Path(made)
        index = make(folder, scale.samples)
        if args.part in (None, "rows") and "litdata" not in without:
            try:
                apart(
                    300,
                    peers.write_chunks,
                    sorted((folder / "raw").iterdir()),
                    folder / "lit",
                    shard_size(index.nbytes),
                )
            except RuntimeError as error:
                raise SystemExit(f"There is no row of litdata, {error}; {MISSING}") from None
        with running(folder, rate=0, latency=0) as store:
            alone = pull(store, f"shards/{index.shards[0]}", int(index.shard_sizes[0]), 1.0)
            print(f"{len(index):,} samples, {index.nbytes / 1e6:.0f} MB; the link has {RATE / 1e6:.0f} MB/s and"
                  f" {LATENCY * 1e3:.0f} ms, the server alone sends {alone / 1e6:.0f} MB/s")  # fmt: skip
            store.reset(rate=RATE, latency=LATENCY)
            bench = Bench(url=store.url, folder=folder, index=index, scale=scale)
            for name, part in (("rows", rows), ("whole", whole), ("replay", replay)):
                if args.part == name or (args.part is None and not (args.quick and name == "replay")):
                    figures |= part(bench)
        if args.part in (None, "rows"):
            figures |= {"hit_us": round(lookup_us(), 3), "index_open_s": round(index_open_s(folder / "million"), 3)}
    print(json.dumps(figures))


if __name__ == "__main__":
    sys.exit(main())
