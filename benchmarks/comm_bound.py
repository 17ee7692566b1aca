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
- hierarchical_vs_flat: seconds per step of flat all-reduce over mode="hierarchical", two nodes with two ranks each, at the cap.

Embarrassing would be: step_vs_noop over 1.15, time_to_accuracy under 6 (all-reduce), 1.2 (PowerSGD), 1.0 (local steps), a
gap over 0.3, auto_vs_allreduce over 1.02, hierarchical_vs_flat under 1.5.

    python benchmarks/comm_bound.py [--quick] [--full]

`--full` adds four nodes, 1 Gbit/s and more seeds. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
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

PREFIX = "salcomm"
BATCH, RATE, TEST = 32, 0.05, 600
OURS = {"local": {"steps": 16}, "lowrank": {"rank": 2}, "topk": {"rate": 0.01}}


# --- the network ---


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def shape(nodes: int, mbit: int) -> None:
    """Cap what every node sends and receives; 0 = no cap."""
    for node in range(nodes):
        for space, device in ((f"{PREFIX}{node}", "eth0"), (f"{PREFIX}hub", f"to{node}")):
            run = ["ip", "netns", "exec", space, "tc", "qdisc"]
            subprocess.run([*run, "del", "dev", device, "root"], check=False, capture_output=True)
            if mbit:
                cap = ["tbf", "rate", f"{mbit}mbit", "burst", f"{max(32, mbit // 4)}kb", "latency", "400ms"]
                subprocess.run([*run, "add", "dev", device, "root", *cap], check=True, capture_output=True)


@contextlib.contextmanager
def network(nodes: int) -> Generator[None]:
    """Namespaces for the nodes and for the bridge between them; taken down whatever happens."""
    spaces = [f"{PREFIX}hub", *(f"{PREFIX}{node}" for node in range(nodes))]
    try:
        for space in spaces:
            ip("netns", "add", space)
            ip("-n", space, "link", "set", "lo", "up")
        ip("-n", spaces[0], "link", "add", "br0", "type", "bridge")
        ip("-n", spaces[0], "link", "set", "br0", "up")
        for node in range(nodes):
            space = f"{PREFIX}{node}"
            ip("-n", space, "link", "add", "eth0", "type", "veth", "peer", "name", f"to{node}", "netns", spaces[0])
            ip("-n", space, "addr", "add", f"10.77.0.{node + 1}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
            ip("-n", spaces[0], "link", "set", f"to{node}", "master", "br0")
            ip("-n", spaces[0], "link", "set", f"to{node}", "up")
        yield
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)


def launch(jobs: list[dict[str, Any]], nodes: int, per_node: int = 1, limit: float = 900.0) -> list[Any]:
    """Run the jobs on all ranks, one after the other, and return what rank 0 says to each."""
    world = nodes * per_node
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json")
        ranks: list[subprocess.Popen[bytes]] = []
        for rank in range(world):
            said = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29517", "RANK": str(rank), "WORLD_SIZE": str(world)}
            said |= {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
            command = [sys.executable, __file__, "--worker", json.dumps(jobs), "--out", str(out)]
            space = ["ip", "netns", "exec", f"{PREFIX}{rank // per_node}"]
            ranks.append(subprocess.Popen([*space, *command], env={**os.environ, **said}))
        end = time.monotonic() + limit
        try:
            for one in ranks:
                one.wait(timeout=max(1.0, end - time.monotonic()))
        finally:
            for one in ranks:
                one.kill()
                one.wait()
        return json.loads(out.read_text())


# --- one rank ---


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 1536), nn.ReLU(), nn.Linear(1536, 1536), nn.ReLU(), nn.Linear(1536, 10))


class Arm:
    """A model, and one way to keep its copies together."""

    def __init__(self, name: str, options: dict[str, Any], total: int) -> None:
        one_bucket = {"bucket_cap_mb": 100} if name == "powersgd" else {}
        self.ddp = DistributedDataParallel(make_net(), **one_bucket)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=RATE, momentum=0.9)
        self.shape = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1, (step + 1) / (0.1 * total)) * max(0.0, 1 - step / total)
        )
        self.name, self.averager, self.handle = name, None, None
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
        """Of the mean of all ranks' parameters, in per cent; the arm itself is left as it is."""
        net = make_net()
        for mine, theirs in zip(net.parameters(), self.ddp.parameters(), strict=True):
            mine.data.copy_(theirs.data)
            dist.all_reduce(mine.data)
            mine.data.div_(dist.get_world_size())
        with torch.no_grad():
            return 100 * (net(x).argmax(1) == y).double().mean().item()


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


def seconds_per_step(data: Data, job: dict[str, Any]) -> list[float]:
    """Seconds of blocks of steps, the arms by turns, so that a slow moment hits all of them."""
    arms = [Arm(name, options, 10_000) for name, options in job["arms"]]
    times: list[list[float]] = [[] for _ in arms]
    for block in range(job["blocks"] + 1):
        for arm, found in zip(arms, times, strict=True):
            dist.barrier()
            start = time.perf_counter()
            steps = job["steps"] if arm.name not in ("local", "local_fixed", "quorum") else job["local_steps"]
            for step in range(steps):
                arm.step(*data.batch(step, block))
            if block:  # the first warms up: buckets, connections, the first exchange under way
                found.append((time.perf_counter() - start) / steps)
    return [statistics.median(found) for found in times]


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
    spent = {"plain": 0.0, "auto": 0.0}
    for block in range(job["blocks"]):
        for arm in (plain, auto) if block % 2 else (auto, plain):
            dist.barrier()
            start = time.perf_counter()
            for step in range(job["steps"]):
                arm.step(*data.batch(step, block))
            spent[arm.name] += time.perf_counter() - start
    return {
        "ratio": spent["auto"] / spent["plain"],
        "mode": auto.handle.mode,
        "plain_ms": 1000 * spent["plain"] / job["steps"] / job["blocks"],
    }


def work(jobs: list[dict[str, Any]], out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    data = Data()
    todo = {"steps": seconds_per_step, "curve": curve, "auto": auto_cost}
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


def measure(nodes: int, mbit: int, quick: bool, seeds: int) -> dict[str, Any]:
    """All figures of one number of nodes and one cap."""
    total = 80 if quick else 300
    local = [8] if quick else [4, 8, 16]
    ranks = [2] if quick else [1, 2, 4]
    arms: list[tuple[str, dict[str, Any]]] = [("plain", {})]
    arms += [("powersgd", {"matrix_approximation_rank": rank}) for rank in ranks]
    arms += [("local_fixed", {"steps": steps}) for steps in local]
    arms += [(mode, given) for mode, given in OURS.items() if mode == "local" or not quick]
    shape(nodes, 0)
    jobs = [
        {"job": "curve", "arm": arm, "steps": total, "every": 8, "seed": seed} for seed in range(seeds) for arm in arms
    ]
    curves = launch(jobs, nodes)
    shape(nodes, mbit)
    timed = [("noop", {}), *arms]
    job = {
        "job": "steps",
        "arms": timed,
        "steps": 3 if quick else 8,
        "local_steps": 16 if quick else 32,
        "blocks": 2 if quick else 4,
    }
    (seconds,) = launch([job], nodes)
    rows: list[dict[str, Any]] = []
    for i, (name, options) in enumerate(arms):
        mine = [curves[seed * len(arms) + i] for seed in range(seeds)]
        goals = [curves[seed * len(arms)][int(0.7 * len(mine[0])) - 1][1] for seed in range(seeds)]
        reached = statistics.fmean(steps_to(one, goal) for one, goal in zip(mine, goals, strict=True))
        final = statistics.fmean(one[-1][1] for one in mine)
        rows.append(
            {
                "arm": name,
                **options,
                "step_ms": 1000 * seconds[i + 1],
                "steps_to_target": reached,
                "seconds": reached * seconds[i + 1],
                "final": final,
            }
        )
    print(f"{nodes} nodes at {mbit or 'no'} Mbit/s; without exchange {1000 * seconds[0]:.1f} ms per step")
    for row in rows:
        what = " ".join(
            f"{k}={v}" for k, v in row.items() if k not in ("arm", "step_ms", "steps_to_target", "seconds", "final")
        )
        print(
            f"  {row['arm']:12} {what:28} {row['step_ms']:8.1f} ms/step "
            f" {row['steps_to_target']:7.1f} steps  {row['seconds']:7.1f} s to "
            f"target  {row['final']:5.2f}% at the end"
        )

    def best(names: tuple[str, ...]) -> dict[str, Any]:
        return min((row for row in rows if row["arm"] in names), key=lambda row: row["seconds"])

    ours, plain = best(tuple(OURS)), rows[0]
    return {
        "ours": ours["arm"],
        "step_vs_noop": ours["step_ms"] / 1000 / seconds[0],
        "time_to_accuracy_vs_allreduce": plain["seconds"] / ours["seconds"],
        "time_to_accuracy_vs_powersgd": best(("powersgd",))["seconds"] / ours["seconds"],
        "time_to_accuracy_vs_local_fixed": best(("local_fixed",))["seconds"] / ours["seconds"],
        "accuracy_gap": plain["final"] - ours["final"],
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(json.loads(options.worker), options.out)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that the network is taken down
    quick, found = options.quick, {}
    with network(2):
        found |= measure(2, 100, quick, 3 if options.full else 1)
        shape(2, 0)
        job = {"job": "auto", "steps": 10, "blocks": 10 if quick else 40}
        (cost,) = launch([job], 2)
        found |= {"auto_vs_allreduce": cost["ratio"], "auto_unshaped": cost["mode"]}
        shape(2, 100)
        pair: list[Any] = [("plain", {}), ("hierarchical", {"groups": [[0, 1], [2, 3]]})]
        job = {
            "job": "steps",
            "arms": pair,
            "steps": 2 if quick else 5,
            "blocks": 2 if quick else 5,
            "local_steps": 16,
        }
        (flat,) = launch([job], 2, per_node=2)
        found["hierarchical_vs_flat"] = flat[0] / flat[1]
        print(
            f"2 nodes with 2 ranks each at 100 Mbit/s: flat {1000 * flat[0]:.0f} ms, hierarchical {1000 * flat[1]:.0f} ms"
        )
    if options.full:
        for nodes, mbit in ((2, 1000), (4, 100), (4, 1000)):
            with network(nodes):
                found[f"{nodes}_nodes_{mbit}_mbit"] = measure(nodes, mbit, quick, 1)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
