"""Can many nodes plan over a billion samples, each with the rows of its own part, and what do they send?

`--nodes` processes stand for nodes: each has a score column of its rows as a memory map in `--folder`, and takes part in
`salience.select.parts` over Gloo: histograms are added up, then every node takes its own rows. Two questions:

sharded_plan_equal  share of the samples that a single node with all rows would have taken too, on `--check` rows (1 = equal)
bytes_per_window    bytes that each node sends to plan one window, whatever the number of rows

It would embarrass us if the first were below 1 or the second grew with the rows. Local processes share one machine's disk and
memory, so that the seconds say what the work costs and nothing about a network.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from salience.select.parts import find_cut, take

PIECE = 1 << 22
SHARE = 0.3


def column(folder: Path, rank: int, rows: int) -> np.ndarray:
    """The scores of a node's rows, like losses: most of them small. Written piece by piece."""
    scores = np.memmap(folder / f"score-{rank}", dtype=np.float32, mode="w+", shape=(rows,))
    for start in range(0, rows, PIECE):
        rng = np.random.default_rng((rank, start))
        scores[start : start + PIECE] = rng.standard_exponential(min(PIECE, rows - start), dtype=np.float32)
    return scores


def node(rank: int, world: int, folder: Path, rows: int, check: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet-{rows}", rank=rank, world_size=world, timeout=timedelta(minutes=30)
    )

    def add(array: np.ndarray) -> np.ndarray:
        total = torch.from_numpy(array.copy())
        dist.all_reduce(total)
        return total.numpy()

    scores = column(folder, rank, rows)
    dist.barrier()
    begin = time.perf_counter()
    cut = find_cut(scores, round(SHARE * rows * world), add)
    found = time.perf_counter()
    mine, sent = take(scores, cut, rank, add, world, np.random.default_rng((0, rank)))
    end = time.perf_counter()
    counts = add(np.array([len(mine), rows], dtype=np.int64))
    peak = torch.tensor([resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20])
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    if check:
        np.save(folder / f"taken-{rank}.npy", mine)
    if rank == 0:
        result: dict[str, Any] = {
            "rows": int(counts[1]), "taken": int(counts[0]), "bytes_per_window": cut.sent + sent,
            "seconds_to_cut": round(found - begin, 2), "seconds_to_take": round(end - found, 2),
            "gib_of_the_largest_process": round(float(peak), 2),
        }  # fmt: skip
        (folder / "result.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def plan(folder: Path, world: int, rows: int, *, check: bool = False) -> dict[str, Any]:
    mp.spawn(node, args=(world, folder, rows, check), nprocs=world)
    return json.loads((folder / "result.json").read_text())


def equal(folder: Path, world: int, rows: int) -> float:
    """Share of the rows taken by the nodes that a single node takes as well."""
    scores = np.concatenate([np.memmap(folder / f"score-{r}", dtype=np.float32, mode="r") for r in range(world)])
    taken = np.concatenate([r * rows + np.load(folder / f"taken-{r}.npy") for r in range(world)])
    alone = np.argpartition(-scores, len(taken) - 1)[: len(taken)]
    return len(np.intersect1d(taken, alone, assume_unique=True)) / len(alone)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="ten million rows, within a minute")
    parser.add_argument("--rows", type=int, default=1_000_000_000)
    parser.add_argument("--check", type=int, default=8_000_000)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--folder", type=Path, help="where the columns go (default: a temporary folder)")
    options = parser.parse_args()
    if options.quick:
        options.rows, options.check = 10_000_000, 1_000_000
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        small = plan(Path(folder), options.nodes, options.check // options.nodes, check=True)
        same = equal(Path(folder), options.nodes, options.check // options.nodes)
        print(f"checked: {small}, equal {same}", flush=True)
        large = plan(Path(folder), options.nodes, options.rows // options.nodes)
    print(json.dumps({"sharded_plan_equal": same, **large, "bytes_per_window_checked": small["bytes_per_window"]}))


if __name__ == "__main__":
    main()
