"""How far can a batch grow before accuracy falls, with plain scaling and with the parts of `salience.large`?

    python benchmarks/large_batch.py --data cifar10.tar.gz --rows rows.jsonl --seeds 3
    python benchmarks/large_batch.py --noise --data cifar10.tar.gz     # two ranks: the noise scale by window
    python benchmarks/large_batch.py --show rows.jsonl
    python benchmarks/large_batch.py --quick

The slim ResNet of resolution.py on 20,000 images, 20 epochs, at 128, 512, 2,048 and 4,096 samples per step. Arms:

    plain    linear scaling of the rate that is good at 128, the same schedule
    kit      a longer warm-up, ghost batch norm of 128, LARC
    growth   batches of 128 that grow up to that size where the rate would halve
    lars, lamb   at the same batch, with their own rates

Nothing was tuned: rates follow the rules of the papers. It would embarrass us if the kit
were no better than plain scaling. `kit_vs_plain`: points of accuracy at each batch; `steps_to`: steps until the
moving mean of training accuracy passes 70%.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import cifar
import resolution
import salience
from salience import large
from salience.shapes import Shape

BASE, RATE, EPOCHS, SAMPLES = 128, 0.2, 20, 20_000
TARGET = 0.7
ARMS = ("plain", "kit", "growth", "lars", "lamb")


def ramp(share: float) -> Shape:
    """Straight up to 1 at `share` of the run, straight down to 0."""
    return lambda p: min(p / share + 0.02, max(0.0, (1 - p) / (1 - share)))


def made(arm: str, net: nn.Module, batch: int) -> tuple[Any, Shape, dict[str, Any]]:
    """Optimizer, shape of its schedule, and options of the Selector."""
    decay, short, longer = 5e-4, ramp(0.2), ramp(0.3)
    sgd = {"momentum": 0.9, "nesterov": True, "weight_decay": decay}
    rate = large.scaled_rate(RATE, batch, BASE, "linear")
    if arm == "kit":
        large.ghost_batch_norm(net, BASE)
        return large.LARC(torch.optim.SGD(net.parameters(), lr=rate, **sgd)), longer, {}
    if arm == "growth":
        grow = large.Growth(most=batch, shape=short) if batch > BASE else None
        return torch.optim.SGD(net.parameters(), lr=RATE, **sgd), short, {"batch_size": BASE, "grow": grow}
    if arm == "lars":
        weights = [p for p in net.parameters() if p.dim() > 1]
        rest = [p for p in net.parameters() if p.dim() <= 1]
        groups = [{"params": weights, "weight_decay": decay}, {"params": rest, "weight_decay": 0.0}]
        lars = large.optimizer("lars", groups, lr=30 * (rate / 2) ** 0.5, momentum=0.9, trust_coefficient=0.001)
        return lars, longer, {}
    if arm == "lamb":
        lamb = large.optimizer(
            "lamb", net.parameters(), lr=large.scaled_rate(0.003, batch, BASE, "sqrt"), weight_decay=0.01
        )
        return lamb, longer, {}
    return torch.optim.SGD(net.parameters(), lr=rate, **sgd), short, {}


def train(data: dict[str, np.ndarray], arm: str, batch: int, seed: int, epochs: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    pick = np.random.default_rng(seed).permutation(len(data["train_y"]))[:SAMPLES]
    x, y = data["train_x"][pick], torch.from_numpy(data["train_y"][pick].astype(np.int64))
    images, n = resolution.scaled(x, x), len(y)
    torch.manual_seed(seed)
    net, draws = resolution.network(x.shape[1]), torch.Generator().manual_seed(seed)
    optimizer, shape, options = made(arm, net, batch)
    loader = salience.Selector(n, **{"batch_size": batch, "epochs": epochs, "seed": seed, "drop_last": True, **options})
    peaks = [group["lr"] for group in optimizer.param_groups]
    steps, reached, smooth, begin = 0, None, 0.0, time.perf_counter()
    for _ in range(epochs):
        for ids, _ in loader:
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * shape(loader.progress) * loader.lr_scale
            flip, shift = (
                torch.rand(len(ids), generator=draws) < 0.5,
                torch.randint(-2, 3, (2,), generator=draws).tolist(),
            )
            inputs = torch.roll(torch.where(flip[:, None, None, None], images[ids].flip(3), images[ids]), shift, (2, 3))
            optimizer.zero_grad()
            logits = net(inputs)
            loader.loss(F.cross_entropy(logits, y[ids], reduction="none"), logits, y[ids]).backward()
            optimizer.step()
            steps += 1
            weight = 0.98 ** (len(ids) / BASE)
            right = float((logits.detach().argmax(1) == y[ids]).float().mean())
            smooth = weight * smooth + (1 - weight) * right
            reached = steps if reached is None and smooth > TARGET else reached
    seconds = time.perf_counter() - begin
    net.eval()
    tests, truth = resolution.scaled(data["test_x"], x), data["test_y"]
    with torch.no_grad():
        guess = torch.cat([(net(t) + net(t.flip(3))).argmax(1) for t in tests.split(1000)]).numpy()
    return {
        "arm": arm, "batch": batch, "seed": seed, "accuracy": round(100 * float((guess == truth).mean()), 2), "steps": steps,
        "steps_to": reached, "seconds": round(seconds, 1),
    }  # fmt: skip


# --- the noise scale on two ranks ---


def _rank(rank: int, address: str, data: dict[str, np.ndarray], epochs: int, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    x, y = data["train_x"][:8000], torch.from_numpy(data["train_y"][:8000].astype(np.int64))
    torch.manual_seed(0)
    ddp = nn.parallel.DistributedDataParallel(resolution.network(x.shape[1]))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    loader = salience.Loader(TensorDataset(resolution.scaled(x, x), y), 64, epochs=epochs, drop_last=True, log=out)
    noise = large.NoiseScale(loader, decay=0.0)
    noise.hook(ddp)
    for _ in range(epochs):
        for inputs, targets in loader:
            logits = ddp(inputs)
            loss = loader.loss(F.cross_entropy(logits, targets, reduction="none"), logits, targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


def noise_scales(data: dict[str, np.ndarray], epochs: int) -> list[float | None]:
    """The noise scale in every window, from the buckets of two ranks."""
    log = Path(tempfile.mkdtemp()) / "run.jsonl"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    mp.spawn(_rank, args=(f"file://{log.parent}/meet", data, epochs, str(log)), nprocs=2)
    found = [event["of_window"] for event in salience.events.read(log) if event["kind"] == "noise"]
    return [None if one is None else round(one) for one in found]


def shown(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The table, and what the kit gains at the largest batch."""
    batches = sorted({row["batch"] for row in rows})
    mean: dict[tuple[str, int], float] = {}
    print(f"{'':8}" + "".join(f"{batch:>24}" for batch in batches))
    for arm in dict.fromkeys(row["arm"] for row in rows):
        cells: list[str] = []
        for batch in batches:
            some = [row for row in rows if (row["arm"], row["batch"]) == (arm, batch)]
            if not some:
                cells.append(f"{'-':>24}")
                continue
            mean[arm, batch] = statistics.mean(row["accuracy"] for row in some)
            spread = statistics.stdev(row["accuracy"] for row in some) if len(some) > 1 else 0.0
            to = [row["steps_to"] for row in some]
            said = "-" if None in to else f"{statistics.mean(to):.0f}"
            cells.append(f"{mean[arm, batch]:>9.2f} +- {spread:.2f} {said:>4}/{some[0]['steps']:<4}")
        print(f"{arm:8}" + "".join(cells))

    def against_plain(arm: str) -> dict[str, float]:
        both = [b for b in batches if (arm, b) in mean and ("plain", b) in mean]
        return {str(b): round(mean[arm, b] - mean["plain", b], 2) for b in both}

    return {
        "kit_vs_plain": against_plain("kit"), "growth_vs_plain": against_plain("growth"),
        "accuracy": {f"{arm} {batch}": round(value, 2) for (arm, batch), value in mean.items()},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="", help="CIFAR-10 as a .tar.gz of a folder of images")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--batches", default="128,512,2048,4096")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--rows", default="")
    parser.add_argument("--show", default="", metavar="ROWS")
    parser.add_argument("--noise", action="store_true")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    if args.quick:
        args.arms, args.batches, args.seeds, args.epochs = "plain,kit,growth", "128,512", 1, 4
    if args.show:
        print(json.dumps(shown([json.loads(line) for line in Path(args.show).read_text().splitlines()])))
        return
    data = resolution.drawn() if args.quick else cifar.load(args.data)
    if args.noise:
        print(json.dumps({"noise_scale_by_window": noise_scales(data, min(args.epochs, 6))}))
        return
    file = Path(args.rows) if args.rows else None
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file and file.exists() else []
    had = {(row["arm"], row["batch"], row["seed"]) for row in rows}
    for seed in range(args.seeds):
        for batch in map(int, args.batches.split(",")):
            for arm in args.arms.split(","):
                if (arm, batch, seed) in had or (batch == BASE and arm == "growth"):
                    continue
                rows.append(train(data, arm, batch, seed, args.epochs))
                print(rows[-1], flush=True)
                if file:
                    with file.open("a") as out:
                        out.write(json.dumps(rows[-1]) + "\n")
    found = shown(rows)
    if args.quick:
        found["noise_scale_by_window"] = noise_scales(data, 2)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
