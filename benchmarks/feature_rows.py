"""Gathering features bounds training on graphs and click logs: how many rows does each cache read from the slow tier?

    python benchmarks/feature_rows.py
    python benchmarks/feature_rows.py --quick

A generated graph with degrees of a power law, of which a tenth of the nodes are trained on (drawn at random, and, as a second
case, from a community of the graph); two hops of neighbours are sampled for every batch, 10 and 5 per node. And a generated
click log whose ids follow a Zipf law, of which a tenth change places in every window. Caches of a tenth of the rows:

    importance   salience.feed.RowCache, first filled by degree, then by what was asked for
    degree       kept by degree, never changed (PaGraph)
    lru          least recently used

Counts, not seconds: equal on every machine. Rows that fill a cache count, too. It would embarrass us if counting accesses were
worse than LRU, or no better than degree. `importance_vs_degree`: rows that degree reads / rows that importance reads.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from salience.feed.rows import RowCache

Ids = npt.NDArray[np.int64]
FANOUT = (10, 5)


class Graph:
    """Neighbours in rows of a table: node i has edges[begin[i]:begin[i + 1]]."""

    def __init__(self, n: int, mean_degree: int, communities: int, rng: np.random.Generator) -> None:
        weight = rng.pareto(1.2, n) + 0.2
        self.degree = np.maximum(1, np.rint(mean_degree * weight / weight.mean())).astype(np.int64)
        self.begin = np.concatenate(([0], np.cumsum(self.degree)))
        self.community = rng.integers(0, communities, n)
        order = np.argsort(self.community, kind="stable")
        starts = np.searchsorted(self.community[order], np.arange(communities + 1))
        self.edges = rng.choice(n, int(self.begin[-1]), p=weight / weight.sum())  # popular nodes are neighbours of many
        source = np.repeat(np.arange(n), self.degree)
        near = rng.random(len(self.edges)) < 0.8  # most neighbours are of one's own community
        for c in range(communities):
            mine = np.flatnonzero(near & (self.community[source] == c))
            some = order[starts[c] : starts[c + 1]]
            self.edges[mine] = rng.choice(some, len(mine), p=weight[some] / weight[some].sum())

    def sampled(self, seeds: Ids, rng: np.random.Generator) -> Ids:
        """The nodes whose features a batch needs."""
        found, front = [seeds], seeds
        for fan in FANOUT:
            picks = self.begin[front][:, None] + rng.integers(0, self.degree[front][:, None], (len(front), fan))
            front = np.unique(self.edges[picks])
            found.append(front)
        return np.unique(np.concatenate(found))


def of_graph(graph: Graph, seeds: Ids, windows: int, batch: int, seed: int) -> Iterator[list[Ids]]:
    """For each window the rows its batches ask for."""
    rng = np.random.default_rng(seed)
    for _ in range(windows):
        order = rng.permutation(seeds)
        yield [graph.sampled(part, rng) for part in np.array_split(order, max(1, len(order) // batch))]


def of_clicks(n: int, windows: int, batches: int, batch: int, seed: int) -> Iterator[list[Ids]]:
    """The same for a click log: Zipf, and a tenth of the ids swap places with others in every window."""
    rng = np.random.default_rng(seed)
    name, p = rng.permutation(n), 1 / np.arange(1, n + 1) ** 1.05
    p /= p.sum()
    for _ in range(windows):
        yield [np.unique(name[rng.choice(n, batch, p=p)]) for _ in range(batches)]
        moved = rng.choice(n, n // 10, replace=False)
        name[moved] = name[rng.permutation(moved)]


def lru(accesses: list[list[Ids]], capacity: int) -> int:
    kept: OrderedDict[int, None] = OrderedDict()
    missed = 0
    for window in accesses:
        for ids in window:
            for i in ids.tolist():
                if i in kept:
                    kept.move_to_end(i)
                    continue
                missed += 1
                kept[i] = None
                if len(kept) > capacity:
                    kept.popitem(last=False)
    return missed


def by_degree(accesses: list[list[Ids]], capacity: int, degree: npt.NDArray[np.float64]) -> int:
    kept = np.zeros(len(degree), dtype=bool)
    kept[np.argsort(-degree, kind="stable")[:capacity]] = True
    return capacity + sum(int(np.count_nonzero(~kept[ids])) for window in accesses for ids in window)


def by_importance(
    accesses: list[list[Ids]], matrix: npt.NDArray[np.float32], capacity: int, guess: npt.ArrayLike
) -> int:
    rows = RowCache(matrix, capacity, importance=guess)
    for window in accesses:
        for ids in window:
            taken = rows.take(ids)
            assert (taken[:, 0] == ids).all()
        rows.next_window()
    return rows.rows_from_slow_tier


def row(
    name: str, accesses: list[list[Ids]], matrix: npt.NDArray[np.float32], degree: npt.NDArray[np.float64]
) -> dict[str, float]:
    capacity, asked = len(matrix) // 10, sum(len(ids) for window in accesses for ids in window)
    found = {
        "importance": by_importance(accesses, matrix, capacity, degree), "degree": by_degree(accesses, capacity, degree),
        "lru": lru(accesses, capacity),
    }  # fmt: skip
    print(f"{name:22} {asked:>11,} asked; " + ", ".join(f"{k} {v:,} ({v / asked:.1%})" for k, v in found.items()))
    return {key: round(value / asked, 4) for key, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=200_000)
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    n, windows, batch = (20_000, 4, 128) if args.quick else (args.nodes, args.windows, 512)
    rng = np.random.default_rng(0)
    graph = Graph(n, 15, 20, rng)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "features.npy"
        matrix = np.lib.format.open_memmap(file, mode="w+", dtype=np.float32, shape=(n, 16))
        matrix[:, 0] = np.arange(n)
        matrix.flush()
        features = np.load(file, mmap_mode="r")
        anywhere = rng.choice(n, n // 10, replace=False)
        here = np.flatnonzero(graph.community < 2)
        degree = graph.degree.astype(np.float64)
        cases = {
            "graph, any nodes": list(of_graph(graph, anywhere, windows, batch, 1)),
            "graph, a community": list(of_graph(graph, here, windows, batch, 2)),
            "clicks that drift": list(of_clicks(n, windows, 60, 20 * batch, 3)),
        }
        result: dict[str, dict[str, float]] = {}
        for name, accesses in cases.items():
            counts = np.bincount(np.concatenate(accesses[0]), minlength=n) if "clicks" in name else degree
            result[name] = row(name, accesses, features, counts.astype(np.float64))
    print(json.dumps({
        "importance_vs_degree": {name: round(one["degree"] / one["importance"], 2) for name, one in result.items()},
        "importance_vs_lru": {name: round(one["lru"] / one["importance"], 2) for name, one in result.items()},
        "rows_from_slow_tier": result,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
