"""Over a slow link, does training with sync() reach its accuracy sooner than with PyTorch's own means? Does auto do no harm?

Real processes in network namespaces, one per node, joined by a bridge in a namespace of its own; `tc tbf` caps both directions
of every node (Linux, root). A net of about 10 MB on handwritten digits (scikit-learn's own), one thread per
rank.

Baselines: plain DDP; PowerSGD as PyTorch's hook in one bucket (the best of its ranks); local steps with PyTorch's
PeriodicModelAverager (the best of its H); and no exchange at all, which nothing can beat. Ours is the best of three modes with
their defaults but for the number of local steps.

- step_vs_noop: seconds per step of ours over those without any exchange, at 100 Mbit/s.
- time_to_accuracy_vs_*: seconds per step at the cap times steps to the target, theirs over ours. Steps to the target are
  counted in runs without a cap (the link changes when numbers come, not which); the target is what all-reduce reaches after
  70% of its steps.
- accuracy_gap: points that ours ends below all-reduce, in per cent.
- auto_vs_allreduce: seconds of a run with mode="auto", its measuring included, over plain DDP, no cap, blocks by turns.
- changed: what mode="auto" does when the cap of the link changes during a run.
- hierarchical_vs_flat: seconds per step of flat all-reduce over mode="hierarchical", two nodes with several ranks each.
- hybrid_vs_allreduce: seconds per step of all-reduce over mode="hybrid", workers and as many helper ranks, a node for each.
- priority_ceiling: a step of plain DDP over one in which the whole forward pass hides behind the exchange: no order of
  buckets can gain more.

Embarrassing would be: step_vs_noop over 1.15, time_to_accuracy under 6 (all-reduce), 1.2 (PowerSGD), 1.0 (local steps), a
gap over 0.3, auto_vs_allreduce over 1.02, hierarchical_vs_flat under 1.5.

    python benchmarks/comm_bound.py [--quick] [--rows FILE] [--cells time:2x100,curves:2:0,...] [--show]

Cells that `--rows` has already are not run again, so that parts add up; `--show` prints the tables of what is there. The last
line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

import salience
from comm_rig import launch, network, shape
from salience.gradients import serve

BATCH, RATE, TEST = 32, 0.05, 600
STEPS = 120
"""Steps of a whole run."""
SEEDS = range(3)
CONTROLS: list[tuple[str, dict[str, Any]]] = [
    ("plain", {}),
    *(("powersgd", {"matrix_approximation_rank": rank}) for rank in (1, 2, 4)),
    *(("local_fixed", {"steps": steps}) for steps in (8, 16, 32, 64)),
]
OURS: list[tuple[str, dict[str, Any]]] = [
    *(("local", {"steps": steps}) for steps in (16, 32, 64)), ("lowrank", {"rank": 2}), ("topk", {"rate": 0.01}),
]  # fmt: skip
QUICK = [CONTROLS[0], CONTROLS[2], CONTROLS[5], OURS[1]]
LINKS = ("2x100", "2x1000", "2x0", "4x100", "4x1000", "4x0")
"""Nodes and Mbit/s; 0 = no cap."""


# --- one rank ---


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 1536), nn.ReLU(), nn.Linear(1536, 1536), nn.ReLU(), nn.Linear(1536, 10))


class Arm:
    """A model, and one way to keep its copies together."""

    def __init__(self, name: str, options: dict[str, Any], total: int, group: Any = None) -> None:
        one_bucket = {"bucket_cap_mb": 100} if name == "powersgd" else {}
        self.ddp = DistributedDataParallel(make_net(), process_group=group, **one_bucket)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=RATE, momentum=0.9)
        self.shape = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1, (step + 1) / (0.1 * total)) * max(0.0, 1 - step / total)
        )
        self.name, self.options, self.averager, self.handle = name, options, None, None
        self.quiet = name in ("noop", "local_fixed")
        if name == "powersgd":
            state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, **options)
            self.ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif name == "local_fixed":
            self.averager = PeriodicModelAverager(period=options["steps"], warmup_steps=0)
        elif name not in ("plain", "noop"):
            self.handle = salience.sync(self.ddp, self.optimizer, mode=name, **options)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        with self.ddp.no_sync() if self.quiet else contextlib.nullcontext():
            F.cross_entropy(self.ddp(x), y).backward()
        self.optimizer.step()
        if self.averager is not None:
            self.averager.average_parameters(self.ddp.parameters())
        self.shape.step()

    def accuracy(self, x: torch.Tensor, y: torch.Tensor) -> float:
        """Of the mean of all ranks' parameters, in per cent; every rank tests a part, and the arm itself is left as it is."""
        net, rank, world = make_net(), dist.get_rank(), dist.get_world_size()
        for mine, theirs in zip(net.parameters(), self.ddp.parameters(), strict=True):
            mine.data.copy_(theirs.data)
            dist.all_reduce(mine.data)
            mine.data.div_(world)
        with torch.no_grad():
            right = (net(x[rank::world]).argmax(1) == y[rank::world]).double().sum()
        dist.all_reduce(right)
        return 100 * right.item() / len(y)


class Data:
    """Handwritten digits, 8 x 8 pixels, of which every rank takes its share of each global batch."""

    def __init__(self) -> None:
        x, y = load_digits(return_X_y=True)
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
        x, y = torch.from_numpy(x).float()[order] / 8 - 1, torch.from_numpy(y)[order]
        self.x, self.y, self.test = x[TEST:], y[TEST:], (x[:TEST], y[:TEST])

    def batch(self, step: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        g = torch.Generator().manual_seed(1000 * seed + step)
        ids = torch.randint(len(self.y), (BATCH * dist.get_world_size(),), generator=g)
        mine = ids[dist.get_rank() * BATCH : (dist.get_rank() + 1) * BATCH]
        return self.x[mine], self.y[mine]


def seconds_per_step(data: Data, job: dict[str, Any]) -> dict[str, Any]:
    """Median seconds per step of blocks, the arms by turns, so that a slow moment hits all of them.

    A block of local steps begins with H steps that are not timed, since an exchange must be under way, and ends with an average
    that is not timed either, so that nothing is left for the next arm to pay.
    """
    arms = [Arm(name, options, 10_000) for name, options in job["arms"]]
    times: list[list[float]] = [[] for _ in arms]
    forward: list[float] = []
    for block in range(job["blocks"] + 1):
        for arm, found in zip(arms, times, strict=True):
            ahead = arm.options.get("steps", 1)
            steps = max(job["local_steps"], ahead) if "steps" in arm.options or arm.name == "noop" else job["steps"]
            for step in range(ahead):
                arm.step(*data.batch(step, block))
            dist.barrier()
            start = time.perf_counter()
            for step in range(steps if block else 2):
                arm.step(*data.batch(step, block))
            if block:  # the first warms up: buckets and connections
                found.append((time.perf_counter() - start) / steps)
            if arm.handle is not None:
                arm.handle.average()
        start = time.perf_counter()
        for step in range(10):
            F.cross_entropy(arms[0].ddp.module(data.batch(step, block)[0]), data.batch(step, block)[1])
        forward.append((time.perf_counter() - start) / 10)
    nodes = getattr(arms[-1].handle, "links", None) and arms[-1].handle.links.nodes
    return {
        "seconds": [statistics.median(found) for found in times], "forward": statistics.median(forward), "all": times,
        "groups": nodes and nodes.groups,
    }  # fmt: skip


def curve(data: Data, job: dict[str, Any]) -> list[list[float]]:
    """Accuracy after every `every` steps of a whole run."""
    arm = Arm(*job["arm"], job["steps"])
    found: list[list[float]] = []
    for step in range(job["steps"]):
        arm.step(*data.batch(step, job["seed"]))
        if (step + 1) % job["every"] == 0:
            found.append([step + 1, arm.accuracy(*data.test)])
    return found


def auto_cost(data: Data, job: dict[str, Any]) -> dict[str, Any]:
    """Seconds of auto over plain, whole runs in blocks by turns."""
    plain, auto = Arm("plain", {}, 10_000), Arm("auto", {}, 10_000)
    spent: dict[str, list[float]] = {"plain": [], "auto": []}
    busy = {"plain": 0.0, "auto": 0.0}
    told: list[str] = []
    auto.handle.tell = lambda data: told.append(str(data))
    for block in range(job["blocks"] + 1):
        for arm in (plain, auto) if block % 2 else (auto, plain):
            if not block and arm is auto:
                continue  # connections and pages are warmed up by plain steps alone: all that auto does is timed
            dist.barrier()
            start, before = time.perf_counter(), time.process_time()
            for step in range(job["steps"]):
                arm.step(*data.batch(step, block))
            if block:
                spent[arm.name].append(time.perf_counter() - start)
                busy[arm.name] += time.process_time() - before
    steps = job["steps"] * job["blocks"]
    return {
        "ratio": sum(spent["auto"]) / sum(spent["plain"]), "late": sum(spent["auto"][-5:]) / sum(spent["plain"][-5:]),
        "busy": busy["auto"] / busy["plain"], "mode": auto.handle.mode, "steps": steps,
        "plain_ms": 1000 * sum(spent["plain"]) / steps, "told": told,
    }  # fmt: skip


def changed(data: Data, job: dict[str, Any]) -> list[dict[str, Any]]:
    """The modes that auto was in while the cap changed under it, and what it said."""
    arm = Arm("auto", {}, 10_000)
    told: list[str] = []
    arm.handle.tell = lambda data: told.append(str(data))
    found: list[dict[str, Any]] = []
    for mbit, steps in job["caps"]:
        dist.barrier()
        if dist.get_rank() == 0:
            shape(dist.get_world_size(), mbit)
        dist.barrier()
        modes: list[str] = []
        start = time.perf_counter()
        for step in range(steps):
            arm.step(*data.batch(step, mbit))
            modes.append(arm.handle.mode)
        runs = [[mode, len(list(run))] for mode, run in itertools.groupby(modes)]
        found.append({"mbit": mbit, "seconds": time.perf_counter() - start, "modes": runs, "told": told.copy()})
        told.clear()
    return found


def helped(data: Data, job: dict[str, Any]) -> dict[str, Any]:
    """Median seconds per step of workers with helper ranks, by share; the arms by turns."""
    count, world = job["workers"], dist.get_world_size()
    workers, helpers = dist.new_group(list(range(count))), list(range(count, world))
    shares: list[Any] = ["plain", 0.5, 1.0, "measured"]
    found: dict[str, list[float]] = {str(share): [] for share in shares}
    times: dict[str, float] = {}
    for block, share in itertools.product(range(job["blocks"]), shares):
        if dist.get_rank() >= count:
            if share != "plain":
                serve(helpers)
            continue
        options = {} if share == "plain" else {"helpers": helpers, "share": None if share == "measured" else share}
        arm = Arm("plain" if share == "plain" else "hybrid", options, 10_000, workers)
        arm.step(*data.batch(0, block))
        dist.barrier(workers)
        start = time.perf_counter()
        for step in range(job["steps"]):
            arm.step(*data.batch(step, block))
        found[str(share)].append((time.perf_counter() - start) / job["steps"])
        if share == "measured":
            times = {"share": arm.handle.traffic.exchange.share, **arm.handle.traffic.exchange.times}
        if arm.handle is not None:
            arm.handle.close()
    return {"seconds": {share: statistics.median(one or [0.0]) for share, one in found.items()}, "measured": times}


def work(jobs: list[dict[str, Any]], out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    data = Data()
    todo = {"steps": seconds_per_step, "curve": curve, "auto": auto_cost, "changed": changed, "helped": helped}
    found = [todo[job["job"]](data, job) for job in jobs]
    dist.barrier()
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)


# --- the figures ---


def steps_to(curve: list[list[float]], target: float) -> float:
    """Steps until the accuracy is first reached, between two points in a straight line; infinite if never."""
    before = [0.0, 0.0]
    for point in curve:
        if point[1] >= target:
            return before[0] + (point[0] - before[0]) * (target - before[1]) / max(point[1] - before[1], 1e-9)
        before = point
    return float("inf")


def run_cell(cell: str, quick: bool) -> Any:
    """What one cell measures: its name is kind:nodes x Mbit/s, or curves:nodes:seed."""
    kind, what, *more = cell.split(":")
    arms = QUICK if quick else [*CONTROLS, *OURS]
    if kind == "curves":
        steps = 80 if quick else STEPS
        jobs = [{"job": "curve", "arm": arm, "steps": steps, "every": 4, "seed": int(more[0])} for arm in arms]
        with network(int(what)):
            return launch(__file__, jobs, int(what), limit=7200)
    nodes, mbit = map(int, what.split("x"))
    blocks = 2 if quick or nodes > 2 else 3
    job = {
        "job": "steps",
        "steps": 3 if quick or nodes > 2 else 6,
        "local_steps": 32,
        "blocks": blocks,
        "arms": [("noop", {}), *arms],
    }
    per_node = 1
    if kind == "auto":
        job = {"job": "auto", "steps": 10, "blocks": 12 if mbit else 40}
    elif kind == "changed":
        job = {"job": "changed", "caps": [[mbit, 150], [0, 400], [mbit, 300]]}
    elif kind == "groups":
        per_node = int(more[0])
        groups = [list(range(node * per_node, (node + 1) * per_node)) for node in range(nodes)]
        job |= {
            "arms": [
                ("noop", {}),
                ("plain", {}),
                ("hierarchical", {"groups": groups}),
                ("hierarchical", {"groups": "auto"}),
            ]
        }
    elif kind == "hybrid":  # a node for every worker and every helper
        job = {"job": "helped", "workers": nodes, "steps": 5, "blocks": 3}
        nodes *= 2
    with network(nodes):
        shape(nodes, mbit)
        return launch(__file__, [job], nodes, per_node)[0]


def table(rows: dict[str, Any], link: str, quick: bool) -> dict[str, Any]:
    """The arms of one link: seconds per step from its cell, steps to the target from the runs of all seeds."""
    nodes = link.split("x")[0]
    timed, arms = rows[f"time:{link}"], QUICK if quick else [*CONTROLS, *OURS]
    seeds = [rows[cell] for cell in rows if cell.startswith(f"curves:{nodes}:")]
    goals = [curves[0][int(0.7 * len(curves[0])) - 1][1] for curves in seeds]
    noop, *seconds = timed["seconds"]
    print(
        f"{nodes} nodes at {link.split('x')[1]} Mbit/s; without exchange {1000 * noop:.1f} ms per step, {len(seeds)} seeds"
    )
    found: list[dict[str, Any]] = []
    for i, (name, options) in enumerate(arms):
        reached = statistics.fmean(steps_to(one[i], goal) for one, goal in zip(seeds, goals, strict=True))
        gaps = [one[0][-1][1] - one[i][-1][1] for one in seeds]
        row = {"arm": name, **options, "step_ms": 1000 * seconds[i], "steps_to_target": reached}
        found.append(
            row
            | {"seconds": reached * seconds[i], "final": statistics.fmean(one[i][-1][1] for one in seeds), "gaps": gaps}
        )
        what = " ".join(f"{k}={v}" for k, v in options.items())
        print(
            f"  {name:12} {what:28} {1000 * seconds[i]:8.1f} ms/step  {reached:7.1f} steps "
            f" {found[-1]['seconds']:7.2f} s to target  {found[-1]['final']:5.2f}% at the end"
        )

    def best(name: str) -> dict[str, Any]:
        return min((row for row in found if row["arm"] in name.split()), key=lambda row: row["seconds"])

    ours, plain = best("local lowrank topk"), found[0]
    return {
        "ours": f"{ours['arm']} {ours.get('steps', '')}".strip(),
        "step_vs_noop": ours["step_ms"] / 1000 / noop,
        "time_to_accuracy_vs_allreduce": plain["seconds"] / ours["seconds"],
        "time_to_accuracy_vs_powersgd": best("powersgd")["seconds"] / ours["seconds"],
        "time_to_accuracy_vs_local_fixed": best("local_fixed")["seconds"] / ours["seconds"],
        "accuracy_gap": plain["final"] - ours["final"],
        "priority_ceiling": seconds[0] / (seconds[0] - min(timed["forward"], seconds[0] - noop)),
    }


def figures(rows: dict[str, Any], quick: bool) -> dict[str, Any]:
    """All figures for which the cells are there."""
    found: dict[str, Any] = {}
    for link in LINKS:
        if f"time:{link}" in rows and any(cell.startswith(f"curves:{link[0]}:") for cell in rows):
            found[link] = table(rows, link, quick)
    for cell, one in rows.items():
        if cell.startswith(("auto", "changed")):
            found[cell] = one
        elif cell.startswith("groups"):
            found[f"hierarchical_vs_flat {cell}"] = one["seconds"][1] / one["seconds"][2]
            shown = " / ".join(f"{1000 * seconds:.0f}" for seconds in one["seconds"])
            print(f"{cell}: {shown} ms: no exchange, flat, hierarchical, groups found by probing ({one['groups']})")
        elif cell.startswith("hybrid"):
            plain, *helped = one["seconds"].values()
            found[f"hybrid_vs_allreduce {cell}"] = {"best": plain / min(helped), **one}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rows", type=Path, help="JSON lines to go on from and to add to")
    parser.add_argument("--cells", default="", help="names, with commas; all by default")
    parser.add_argument("--show", action="store_true", help="run nothing")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(json.loads(options.worker), options.out)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that the network is taken down
    if options.quick:
        cells = ["curves:2:0", "time:2x100", "groups:2x100:2"]
    else:
        cells = [f"curves:{nodes}:{seed}" for seed in SEEDS for nodes in (2, 4)] + [f"time:{link}" for link in LINKS]
        cells += [
            "auto:2x0",
            "auto:2x100",
            "changed:2x100",
            "groups:2x100:2",
            "groups:2x100:4",
            "hybrid:2x100",
            "hybrid:4x100",
        ]
    cells = options.cells.split(",") if options.cells else cells
    rows: dict[str, Any] = {}
    if options.rows is not None and options.rows.exists():
        rows = {row["cell"]: row["found"] for row in map(json.loads, options.rows.read_text().splitlines())}
    for cell in [] if options.show else cells:
        if cell not in rows:
            rows[cell] = run_cell(cell, options.quick)
            if options.rows is not None:
                with options.rows.open("a") as out:
                    out.write(json.dumps({"cell": cell, "found": rows[cell]}) + "\n")
    print(json.dumps(figures(rows, options.quick)))


if __name__ == "__main__":
    main()
