"""Does a slow rank slow everybody, and do long texts pile up on one rank?

Two real ranks under Gloo train one model by DistributedDataParallel.

speed: rank 1 has a quarter of a core (a CPU quota with a period of 5 ms, where this system lets us make a control group;
otherwise, or with --waits, in-process waits in place of a forward and a backward pass, as for a device on which the host
waits). With --core 0.4 rank 0 has 0.4 of a core and rank 1 a quarter of that, in periods of 10 ms, which a busy machine can
still give. Steps take about 100 ms (256 samples per rank), and 30 ms, six periods of the quota, in what is called short.
`ideal` is the sum of what both ranks reach by themselves at the same time, with a DataLoader, without DDP and without
salience; the baseline is equal parts. The same two processes take the arms by turns, a window of each per round, after warm-up
windows in which speeds are measured; figures are medians over the rounds. `throughput_vs_waits_alone` takes the waits for the
ideal, as if everything else took no time.

text: lengths are log-normal, parts are padded to their longest text, and a step costs what the padded tokens of its dearer rank
cost; counted from the plans, not timed. Baselines: Transformers' BatchRebalanceSampler (batch_rebalance), over the same batches
as near as it draws them; a random split of the same batches (a DistributedSampler's); the same
batches sorted by length and cut into equal numbers; and batches of similar length, split at random (group_by_length), which
changes what a batch is made of, while ours leaves every batch, and so its gradient, as it is.

It would embarrass us to reach less than 0.92 of the ideal, or to gain less over random than batch_rebalance does.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import salience
from salience.plan import Plan
from salience.run.balancing import by_cost

SLOWDOWN = 4.0
BATCH, SHORT = 256, 64
"""Samples per rank, in steps of many periods of the quota and of few."""
BATCHES = 24
"""Batches of a window."""
WARM_UP = 6
"""Windows before the first round, in which speeds are measured."""
SECONDS_PER_SAMPLE = 0.0005
"""Of the fast rank: a device of its own, on which the host waits. Ranks that shared a core would slow each other."""
QUOTA_PERIOD = 5_000
"""Microseconds after which a rank with a quota gets processor time again, at least;"""
LEAST_QUOTA = 1_000
"""and what the system grants it at least in a period."""


class Repeated(nn.Module):
    """One layer, many times over: much to compute and little to send."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(32, 256), nn.Linear(256, 256), nn.Linear(256, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(48):
            x = F.relu(self.layer(x))
        return self.last(x)


@contextmanager
def quota(share: float) -> Generator[Callable[[int], None] | None]:
    """Limits a process to `share` of a core; None where this system does not let us, or where there is nothing to limit."""
    if share >= 1:
        yield lambda _: None
        return
    period = round(max(QUOTA_PERIOD, LEAST_QUOTA / share))
    first, name = Path("/sys/fs/cgroup/cpu"), f"salience-uneven-{os.getpid()}-{share:g}"
    folder = (first if first.is_dir() else first.parent) / name
    try:
        folder.mkdir()
        if first.is_dir():
            (folder / "cpu.cfs_period_us").write_text(str(period))
            (folder / "cpu.cfs_quota_us").write_text(str(round(share * period)))
        else:
            (folder / "cpu.max").write_text(f"{round(share * period)} {period}")
    except OSError:
        if folder.is_dir():
            folder.rmdir()
        yield None
        return
    try:
        yield lambda process: (folder / "cgroup.procs").write_text(str(process)) and None
    finally:
        folder.rmdir()


def worker(rank: int, port: int, rounds: int, waits: bool, batch: int) -> None:
    """One rank; rank 0 prints the samples per second of each arm over both ranks, per round."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    seconds = SECONDS_PER_SAMPLE * (SLOWDOWN if rank == 1 else 1.0) if waits else 0.0
    n = batch * 2 * BATCHES
    data = TensorDataset(torch.randn(n, 32), torch.randint(0, 4, (n,)))
    model: nn.Module = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4)) if waits else Repeated()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loaders = {"balanced": salience.Loader(data, batch, balance=True), "equal": salience.Loader(data, batch)}

    def train(batches: Iterable[Any], net: nn.Module, loss: Callable[[Tensor], Tensor]) -> float:
        """Seconds for these batches; the waits are this rank's own forward and backward pass, before gradients meet."""
        dist.barrier()
        begin = time.perf_counter()
        for x, y in batches:
            time.sleep(seconds * len(x) / 3)
            losses = F.cross_entropy(net(x), y, reduction="none")
            optimizer.zero_grad()
            time.sleep(seconds * len(x) * 2 / 3)
            loss(losses).backward()
            optimizer.step()
        return time.perf_counter() - begin

    def alone() -> float:
        """Both ranks by themselves at the same time, without DDP, for about as long as a balanced window."""
        count = round(2 * BATCHES * (SLOWDOWN if rank == 0 else 1.0) / (SLOWDOWN + 1))
        taken = train(itertools.islice(DataLoader(data, batch, shuffle=True), count), model, torch.mean)
        return total(count * batch / taken, dist.ReduceOp.SUM)

    def together(arm: str) -> float:
        return n / total(train(loaders[arm], ddp, loaders[arm].loss), dist.ReduceOp.MAX)

    for _ in range(WARM_UP):
        together("balanced")
    together("equal")
    found = [{"ideal": alone(), **{arm: together(arm) for arm in loaders}} for _ in range(rounds)]
    if rank == 0:
        print(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def total(value: float, how: Any) -> float:
    """The sum or maximum over the ranks."""
    moved = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(moved, how)
    return moved.item()


def speed(rounds: int, batch: int, *, waits: bool, core: float) -> dict[str, Any]:
    """Medians over the rounds of each arm's samples per second over those of the ideal in the same round."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    with quota(core) as limit_fast, quota(core / SLOWDOWN) as limit:
        waits = waits or limit is None
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--worker", json.dumps([rank, port, rounds, waits, batch])],
                env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True,
            )
            for rank in range(2)
        ]  # fmt: skip
        if limit is not None and limit_fast is not None and not waits:
            limit_fast(ranks[0].pid)
            limit(ranks[1].pid)
        said = [process.communicate()[0] for process in ranks]
    rows = json.loads(said[0].splitlines()[-1])
    ratios = {arm: np.array([row[arm] / row["ideal"] for row in rows]) for arm in ("balanced", "equal")}
    figures = {
        "throughput_vs_ideal": float(np.median(ratios["balanced"])),
        "equal_vs_ideal": float(np.median(ratios["equal"])),
        "throughput_vs_ideal_lowest": float(ratios["balanced"].min()),
        "throughput_vs_ideal_highest": float(ratios["balanced"].max()),
        "ideal_samples_per_second": float(np.median([row["ideal"] for row in rows])),
        "slowed_by": "in-process waits" if waits else f"CPU quota, {core:g} and {core / SLOWDOWN:g} of a core",
    }
    if waits:
        stated = (1 + 1 / SLOWDOWN) / SECONDS_PER_SAMPLE
        figures["throughput_vs_waits_alone"] = float(np.median([row["balanced"] for row in rows]) / stated)
    return figures


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
    peer = rebalanced(lengths, world, batch)
    others = {"random": order, "equal_counts_sorted": np.r_[within, rest], "grouped_by_length": np.r_[grouped, rest]}
    figures = {f"text_vs_{name}": float(cost(ids) / mine) for name, ids in others.items()}
    theirs = sum(max(len(part) * lengths[part].max() for part in step) for step in zip(*peer, strict=True))
    random = cost(order)
    return {
        **figures,
        "batch_rebalance_vs_random": float(random / theirs),
        "text_vs_batch_rebalance": float(theirs / mine),
    }


def rebalanced(lengths: np.ndarray, world: int, batch: int) -> list[list[list[int]]]:
    """The batches of each rank as Transformers' sampler makes them."""
    from transformers.trainer_pt_utils import BatchRebalanceSampler

    given = {"effective_batch_size": batch, "dp_size": world, "grad_accum": 1}
    return [list(BatchRebalanceSampler([int(n) for n in lengths], rank=rank, **given)) for rank in range(world)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--rounds", type=int, default=16, help="of long steps; twice as many of short ones")
    parser.add_argument("--waits", action="store_true", help="in-process waits even where there are CPU quotas")
    parser.add_argument(
        "--core", type=float, default=1.0, help="what rank 0 has of a core; rank 1 has a quarter of that"
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(*json.loads(args.worker))
        return
    rounds = 4 if args.quick else args.rounds
    found = speed(rounds, BATCH, waits=args.waits, core=args.core)
    short = speed(2 * rounds, SHORT, waits=args.waits, core=args.core)
    main_names = ("throughput_vs_ideal", "equal_vs_ideal")
    first = {name: found.pop(name) for name in main_names} | {f"short_{name}": short[name] for name in main_names}
    figures = {**first, **text(20_000, 2, 32), **found, "slowdown": SLOWDOWN}
    for name, value in figures.items():
        print(f"{name:<32} {value if isinstance(value, str) else round(value, 3)}")
    print(json.dumps({name: value if isinstance(value, str) else round(value, 4) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
