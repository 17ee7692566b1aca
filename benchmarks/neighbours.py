"""Is our own search for nearest neighbours good enough to need no library for it?

Task: for each of N vectors of width 128 its 12 nearest others, as the redundancy filter asks for them. Vectors lie in ten
overlapping clusters whose directions differ in spread, 30% are near-copies of others: all are means of 8 visits with unit
scatter, so copies lie at about two thirds of the distance to the 12th neighbour. Peers: faiss (IVF-Flat and HNSW), hnswlib
and usearch, each with its smallest search setting that finds as many copies as ours (or 99%), building the index included;
one that took five times as long as ours is not asked to search harder, and its recall says so.

Each search runs in a process of its own, on as many threads, in turns; ratios are within one turn. `recall`: samples with a
copy for which one was found; `recall_12`: share of the true 12 nearest, on 500 samples; `mib`: memory beside the vectors.

Embarrassing would be: any ratio (peer's seconds over ours) under 0.5, or recall of ours under 0.98 at 200,000.

    pip install faiss-cpu hnswlib usearch    # those that are missing are left out and named
    python benchmarks/neighbours.py [--quick | --full | --sizes N ...]

The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

WIDTH, K, CLUSTERS, COPIES, VISITS = 128, 12, 10, 0.3, 8
ENOUGH = 0.99
"""Of all copies: a peer that finds so many need not search harder, even if ours finds more."""
PATIENCE = 5
"""Times our seconds: a peer that took longer need not search harder, even if it finds less."""

Vectors = npt.NDArray[np.float32]
Positions = npt.NDArray[np.integer[Any]]
Search = Callable[[Vectors, int], Iterator[tuple[str, Positions | None]]]
"""Builds its index and yields once without positions, then searches once for each setting, cheapest first."""


def ours(x: Vectors, threads: int) -> Iterator[tuple[str, Positions | None]]:
    import torch

    from salience.select.neighbours import nearest

    torch.set_num_threads(threads)
    yield "", None
    yield "", nearest(x, K)[1]


def faiss_ivf(x: Vectors, threads: int) -> Iterator[tuple[str, Positions | None]]:
    import faiss

    faiss.omp_set_num_threads(threads)
    index = faiss.index_factory(WIDTH, f"IVF{int(4 * len(x) ** 0.5)},Flat")
    index.train(x)
    index.add(x)
    yield "", None
    for probes in (1, 2, 4, 8, 16, 32, 64):
        index.nprobe = probes
        yield f"nprobe={probes}", index.search(x, K + 1)[1]


def faiss_hnsw(x: Vectors, threads: int) -> Iterator[tuple[str, Positions | None]]:
    import faiss

    faiss.omp_set_num_threads(threads)
    index = faiss.IndexHNSWFlat(WIDTH, 16)
    index.hnsw.efConstruction = 64
    index.add(x)
    yield "", None
    for ef in (16, 32, 64, 128, 256):
        index.hnsw.efSearch = ef
        yield f"ef={ef}", index.search(x, K + 1)[1]


def hnswlib(x: Vectors, threads: int) -> Iterator[tuple[str, Positions | None]]:
    import hnswlib as library

    index = library.Index(space="l2", dim=WIDTH)
    index.init_index(max_elements=len(x), M=16, ef_construction=64, random_seed=0)
    index.add_items(x, num_threads=threads)
    yield "", None
    for ef in (16, 32, 64, 128, 256):
        index.set_ef(ef)
        yield f"ef={ef}", index.knn_query(x, K + 1, num_threads=threads)[0].astype(np.int64)


def usearch(x: Vectors, threads: int) -> Iterator[tuple[str, Positions | None]]:
    from usearch.index import Index

    index = Index(ndim=WIDTH, metric="l2sq", dtype="f32", connectivity=16, expansion_add=64)
    index.add(np.arange(len(x)), x, threads=threads)
    yield "", None
    for ef in (16, 32, 64, 128, 256):
        index.expansion_search = ef
        yield f"ef={ef}", index.search(x, K + 1, threads=threads).keys.astype(np.int64)


SEARCHES: dict[str, Search] = {
    "ours": ours,
    "faiss_ivf": faiss_ivf,
    "faiss_hnsw": faiss_hnsw,
    "hnswlib": hnswlib,
    "usearch": usearch,
}


def make(n: int, seed: int = 0) -> tuple[Vectors, npt.NDArray[np.int64]]:
    """Vectors [n, WIDTH] and the origin of each; copies share one."""
    rng = np.random.default_rng(seed)
    spread = 2.7 / np.sqrt(1 + np.arange(WIDTH) / 4)
    centre = spread * rng.standard_normal((CLUSTERS, WIDTH))
    whole = n - int(COPIES * n)
    x = centre[rng.integers(0, CLUSTERS, whole)] + 0.6 * spread * rng.standard_normal((whole, WIDTH))
    origin = rng.permutation(np.concatenate((np.arange(whole), rng.integers(0, whole, n - whole))))
    return (x[origin] + rng.standard_normal((n, WIDTH)) / VISITS**0.5).astype(np.float32), origin


def truth(x: Vectors, some: npt.NDArray[np.int64]) -> tuple[Vectors, Positions]:
    """Distances and positions [len(some), K] of the nearest others, by comparing with all."""
    apart = (x[some] ** 2).sum(1)[:, None] + (x**2).sum(1) - 2 * x[some] @ x.T
    apart[np.arange(len(some)), some] = np.inf
    at = np.argpartition(apart, K, axis=1)[:, :K]
    near = np.take_along_axis(apart, at, 1)
    order = near.argsort(axis=1)
    return np.sqrt(np.take_along_axis(near, order, 1)), np.take_along_axis(at, order, 1)


def one(name: str, folder: Path, threads: int, target: float, most: float) -> dict[str, Any]:
    """Build and search in this process, harder and harder until `target` of the copies are found or it took over `most`."""
    x, origin = np.load(folder / "x.npy"), np.load(folder / "origin.npy")
    some, right = np.load(folder / "some.npy"), np.load(folder / "right.npy")
    has_copy = np.bincount(origin, minlength=len(x))[origin] > 1
    for _ in zip(SEARCHES[name](x[:1000], threads), range(2), strict=False):  # libraries wake up
        pass
    search, figures = SEARCHES[name](x, threads), {}
    before, begin = new_peak(), time.perf_counter()
    next(search)
    build, built = time.perf_counter() - begin, peak_mib()
    begin = time.perf_counter()
    for setting, where in search:
        assert where is not None
        seconds, searched = time.perf_counter() - begin, peak_mib()
        others = where != np.arange(len(x))[:, None]
        recall = float(((origin[where] == origin[:, None]) & others).any(1)[has_copy].mean())
        hits = [len(set(found) & set(true)) for found, true in zip(where[some].tolist(), right.tolist(), strict=True)]
        figures = {
            "seconds": build + seconds,
            "recall": recall,
            "recall_12": float(np.mean(hits)) / K,
            "mib": max(built, searched) - before,
            "setting": setting,
        }
        if recall >= target or build + seconds > most:
            break
        del where, others
        new_peak()
        begin = time.perf_counter()
    return figures


def peak_mib() -> float:
    """The most memory this process has held since `new_peak` (Linux alone)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def new_peak() -> float:
    """Begin to measure anew; what is held now."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_mib()


def compare(n: int, names: list[str], repeats: int, threads: int) -> dict[str, Any]:
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        x, origin = make(n)
        some = np.random.default_rng(1).choice(n, 500, replace=False)
        near, right = truth(x, some)
        copied = origin[right[:, 0]] == origin[some]
        for name, array in {"x": x, "origin": origin, "some": some, "right": right}.items():
            np.save(Path(folder) / f"{name}.npy", array)
        target, most = ENOUGH, float("inf")
        for turn in range(repeats):
            for name in ["ours", *np.roll(names[1:], turn).tolist()]:
                options = ["--one", name, "--folder", folder, "--threads", str(threads)]
                options += ["--target", str(target), "--most", str(most)]
                done = subprocess.run([sys.executable, __file__, *options], capture_output=True, text=True, check=False)
                if done.returncode:
                    raise RuntimeError(f"{name} failed: {done.stderr[-2000:]}")
                runs[name].append(json.loads(done.stdout.splitlines()[-1]))
                print(f"    turn {turn + 1}, {name}: {runs[name][-1]}", flush=True)
                target, most = min(ENOUGH, runs["ours"][0]["recall"]), PATIENCE * runs["ours"][-1]["seconds"]
    table: dict[str, Any] = {"copies_at": round(float(np.median(near[copied, 0] / near[copied, -1])), 3)}
    for name in names:
        middle = {key: float(np.median([run[key] for run in runs[name]])) for key in runs[name][0] if key != "setting"}
        ratio = np.median([a["seconds"] / b["seconds"] for a, b in zip(runs[name], runs["ours"], strict=True)])
        row = {"ratio": round(float(ratio), 2), "seconds": round(middle["seconds"], 2)}
        row |= {"recall": round(middle["recall"], 4), "recall_12": round(middle["recall_12"], 3)}
        table[name] = row | {"mib": round(middle["mib"]), "setting": runs[name][-1]["setting"]}
        print(f"  {name:<11}" + "  ".join(f"{key} {value}" for key, value in table[name].items()), flush=True)
    return table


def installed(name: str) -> bool:
    module = name.split("_")[0]
    if name != "ours" and importlib.util.find_spec(module) is None:
        print(f"{name} is left out: the module {module} is not installed.")
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="21,000 vectors, one turn")
    parser.add_argument("--full", action="store_true", help="also 1,000,000 vectors (needs about 4 GiB, and hours)")
    parser.add_argument("--sizes", type=int, nargs="+", help="other numbers of vectors")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    for option in ("--one", "--folder", "--target", "--most"):
        parser.add_argument(option, help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    if args.one:
        print(json.dumps(one(args.one, Path(args.folder), args.threads, float(args.target), float(args.most))))
        return
    names = [name for name in SEARCHES if installed(name)]
    figures: dict[str, Any] = {"threads": args.threads}
    sizes = [21_000] if args.quick else [50_000, 200_000, 1_000_000] if args.full else [50_000, 200_000]
    for n in args.sizes or sizes:
        print(f"{n:,} vectors ...", flush=True)
        figures[f"n_{n}"] = compare(n, names, 1 if args.quick else args.repeats, args.threads)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
