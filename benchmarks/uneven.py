"""Does a slow rank slow everybody, and do long texts pile up on one rank?

Two real ranks under Gloo train one model by DistributedDataParallel.

speed: rank 1 takes four times as long per sample (in-process waits in place of a forward and a backward pass, as for a device
on which the host waits; cores that ranks share would slow both). `ideal` is the sum of what each rank reaches by itself; the
baseline is equal parts. `throughput_vs_ideal` counts the windows after the first two, in which speeds are measured.

text: lengths are log-normal, parts are padded to their longest text, and a step costs what the padded tokens of its dearer rank
cost; counted from the plans, not timed. Baselines: a random split of the same batches (a DistributedSampler's); the same
batches sorted by length and cut into equal numbers; and batches of similar length, split at random (group_by_length), which
changes what a batch is made of, while ours leaves every batch, and so its gradient, as it is.

It would embarrass us to reach less than 0.92 of the ideal, or to gain less over random than 1.58.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import salience
from salience.plan import Plan
from salience.run.balancing import by_cost

SLOWDOWN = 4.0
BATCH = 64
"""Samples per rank."""
SECONDS_PER_SAMPLE = 0.0005
"""Of the fast rank: a device of its own, on which the host waits. Ranks that shared a core would slow each other."""


def worker(rank: int, world: int, port: int, balance: bool, windows: int) -> None:
    """Train on one rank; prints samples per second over all ranks after the first two windows."""
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    slow = SLOWDOWN if rank == 1 or os.environ.get("ALONE") == "slow" else 1.0
    data = TensorDataset(torch.randn(BATCH * 2 * 12, 32), torch.randint(0, 4, (BATCH * 2 * 12,)))
    loader = salience.Loader(data, BATCH, balance=balance)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
    ddp = DistributedDataParallel(model) if world > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    begin = visited = 0.0
    for window in range(windows):
        if window == 2:
            begin, visited = time.perf_counter(), loader.visits
        for x, y in loader:
            time.sleep(SECONDS_PER_SAMPLE * slow * len(x) / 3)
            losses = F.cross_entropy(ddp(x), y, reduction="none")
            optimizer.zero_grad()
            time.sleep(
                SECONDS_PER_SAMPLE * slow * len(x) * 2 / 3
            )  # before gradients meet: each rank's own backward pass
            loader.loss(losses).backward()
            optimizer.step()
    print(json.dumps({"rate": (loader.visits - visited) / (time.perf_counter() - begin)}))


def rate(world: int, *, balance: bool = False, windows: int, alone: str = "") -> float:
    """Samples per second over all ranks."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    env = {**os.environ, "ALONE": alone, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, "--worker", json.dumps([rank, world, port, balance, windows])],
            env=env, stdout=subprocess.PIPE, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    said = [process.communicate()[0] for process in ranks]
    return min(json.loads(text.splitlines()[-1])["rate"] for text in said)


def text(n: int, world: int, batch: int) -> dict[str, float]:
    """Padded tokens per window on the slowest rank of each step, by how batches are divided; as ratios to ours."""
    rng = np.random.default_rng(0)
    lengths = np.minimum(np.rint(rng.lognormal(4.6, 0.7, n)), 1024).astype(np.float64)
    order, ones = rng.permutation(n), np.ones(n, dtype=np.float32)

    def plan(ids: np.ndarray) -> Plan:
        return Plan(
            window=0, population=n, batch_size=batch, drop_last=True, ids=ids, weights=ones, importance=ones.copy(),
            level=np.zeros(n, dtype=np.uint8),
        )  # fmt: skip

    def cost(ids: np.ndarray, cuts: np.ndarray | None = None) -> float:
        shard = plan(ids).shard(0, world)
        edges = shard.cuts if cuts is None else cuts
        parts = [
            [lengths[ids[a:b]] for a, b in zip(edges[:-1, k], edges[1:, k], strict=True)] for k in range(len(shard))
        ]
        return sum(max(len(part) * part.max() for part in step) for step in parts)

    batches = order[: n // batch * batch].reshape(-1, batch)
    grouped = np.concatenate(
        [part[np.argsort(-lengths[part])] for part in np.array_split(order, max(1, n // (50 * batch)))]
    )
    grouped = rng.permutation(grouped[: n // batch * batch].reshape(-1, batch)).ravel()
    within = np.concatenate([ids[np.argsort(-lengths[ids])] for ids in batches])
    rest = order[n // batch * batch :]
    ours = by_cost(plan(order).shard(0, world), lengths, np.full(world, 1 / world))
    mine = cost(ours.plan.ids, ours.cuts)
    others = {"random": order, "equal_counts_sorted": np.r_[within, rest], "grouped_by_length": np.r_[grouped, rest]}
    return {f"text_vs_{name}": float(cost(ids) / mine) for name, ids in others.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer windows")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(*json.loads(args.worker))
        return
    windows = 5 if args.quick else 12
    ideal = rate(1, windows=3) + rate(1, windows=3, alone="slow")
    figures = {
        "throughput_vs_ideal": rate(2, balance=True, windows=windows) / ideal,
        "equal_parts_vs_ideal": rate(2, windows=3 if args.quick else windows) / ideal,
        **text(20_000, 2, 32),
        "ideal_samples_per_second": ideal,
        "slowdown": SLOWDOWN,
        "slowed_by": "in-process waits",
    }
    for name, value in figures.items():
        print(f"{name:<32} {value if isinstance(value, str) else round(value, 3)}")
    print(json.dumps({name: value if isinstance(value, str) else round(value, 4) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
