"""Smaller images in a part of the run: what do they cost in accuracy, against all data and the shorter run of equal cost?

    python benchmarks/resolution.py --data cifar10.tar.gz --rows rows.jsonl --seeds 3
    python benchmarks/resolution.py --fashion /usr/share/datasets/fashion-mnist
    python benchmarks/resolution.py --show rows.jsonl
    python benchmarks/resolution.py --quick

A slim ResNet, 20 epochs, 20,000 images, two cores. Baselines: all data at full size, and the **shorter run**, which spends the
same number of pixels on full-size images, with its schedule fitted. Cost is counted in passes over the data at full size
(pixels), with the sides that were really used. It would embarrass us if a curve were no better than the shorter run: then
smaller images are worth nothing. `gap`: all data less the curve, in points; `vs_shorter`: the curve less its shorter run;
`wall_clock`: seconds of all data / seconds of the curve, which says little unless the machine had nothing else to do.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import multiprocessing as mp
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cifar
import salience

EPOCHS, BATCH, SAMPLES = 20, 128, 20_000
ARMS: dict[str, dict[str, Any]] = {
    "all": {},
    "rise 16": {"treat": salience.Treat("resolution", sizes="rise", low=0.5, until=0.55)},
    "rise 20": {"treat": salience.Treat("resolution", sizes="rise", low=0.625, until=0.7)},
    "rise 24": {"treat": salience.Treat("resolution", sizes="rise", low=0.75, until=0.94)},
    "valley 20": {"treat": salience.Treat("resolution", sizes="valley", low=0.625, until=0.8)},
    "ramp 16": {"treat": salience.Treat("resolution", sizes="ramp", low=0.5, until=0.95)},
    "default": {"select": "default"},
    "rise 24, default": {"select": "default", "treat": salience.Treat("resolution", sizes="rise", low=0.75, until=0.5)},
}


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(*_conv(width, width), *_conv(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def _conv(a: int, b: int, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU(True)]


def network(channels: int) -> nn.Module:
    net = nn.Sequential(
        *_conv(channels, 16, 2), *_conv(16, 32), nn.MaxPool2d(2), Residual(32), *_conv(32, 64), nn.MaxPool2d(2),
        Residual(64), nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip
    return net.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]


def fashion(folder: str) -> dict[str, np.ndarray]:
    def read(name: str, skip: int) -> np.ndarray:
        return np.frombuffer(gzip.open(Path(folder) / name).read(), np.uint8, offset=skip)

    return {
        f"{split}_{kind}": value
        for split, name in (("train", "train"), ("test", "t10k"))
        for kind, value in (
            ("x", read(f"{name}-images-idx3-ubyte.gz", 16).reshape(-1, 1, 28, 28)),
            ("y", read(f"{name}-labels-idx1-ubyte.gz", 8).astype(np.int64)),
        )
    }


def drawn() -> dict[str, np.ndarray]:
    """Coloured noise with a pattern per class, for --quick."""
    rng = np.random.default_rng(0)
    patterns = rng.integers(0, 256, (10, 3, 32, 32))
    y = rng.integers(0, 10, 1500)
    x = ((patterns[y] + rng.integers(0, 256, (1500, 3, 32, 32))) // 2).astype(np.uint8)
    return {"train_x": x[:1000], "train_y": y[:1000], "test_x": x[1000:], "test_y": y[1000:]}


def scaled(x: np.ndarray, like: np.ndarray) -> Tensor:
    values = (torch.from_numpy(x.copy()).float() - float(like.mean())) / float(like.std())
    return values.contiguous(memory_format=torch.channels_last)


def train(
    data: dict[str, np.ndarray], arm: str, seed: int, passes: float | None = None, epochs: int = EPOCHS
) -> dict[str, Any]:
    """One run; `passes` = the shorter run of that many passes over the data at full size."""
    torch.set_num_threads(1)
    pick = np.random.default_rng(seed).permutation(len(data["train_y"]))[:SAMPLES]
    x, y = data["train_x"][pick], torch.from_numpy(data["train_y"][pick].astype(np.int64))
    images, n, full = scaled(x, x), len(y), x.shape[-1]
    torch.manual_seed(seed)
    net, draws = network(x.shape[1]), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
    wanted = epochs * n if passes is None else round(passes * n)
    windows = epochs if passes is None else math.ceil(passes)
    loader = salience.Selector(
        n,
        batch_size=BATCH,
        epochs=windows,
        seed=seed,
        drop_last=True,
        labels=y,
        **(ARMS[arm] if passes is None else {}),
    )
    loader.attach(net)
    cost, done, begin = 0.0, 0, time.perf_counter()
    while loader.epoch < windows and (passes is None or done < wanted):
        for ids, _ in loader:
            p = loader.progress if passes is None else min(1.0, done / wanted)
            for group in optimizer.param_groups:
                group["lr"] = 0.2 * min(p / 0.2 + 0.02, max(0.0, (1 - p) / 0.8))
            flip, shift = (
                torch.rand(len(ids), generator=draws) < 0.5,
                torch.randint(-2, 3, (2,), generator=draws).tolist(),
            )
            batch = torch.where(flip[:, None, None, None], images[ids].flip(3), images[ids])
            batch = loader.resize(torch.roll(batch, shift, (2, 3)))
            logits = net(batch)
            loss = loader.loss(F.cross_entropy(logits, y[ids], reduction="none"), logits, y[ids])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            done += len(ids)
            cost += len(ids) * (batch.shape[-1] / full) ** 2
            if passes is not None and done >= wanted:
                break
    seconds = time.perf_counter() - begin
    net.eval()
    tests, truth = scaled(data["test_x"], x), data["test_y"]
    with torch.no_grad():
        guess = torch.cat([(net(t) + net(t.flip(3))).argmax(1) for t in tests.split(1000)]).numpy()
    return {
        "arm": arm if passes is None else f"shorter than {arm}", "seed": seed, "cost": round(cost / n, 3),
        "accuracy": round(100 * float((guess == truth).mean()), 2), "seconds": round(seconds, 1),
    }  # fmt: skip


def work(args: argparse.Namespace, todo: Any, done: Any) -> None:
    data = load(args)
    while (job := todo.get()) is not None:
        arm, seed = job
        row = train(data, arm, seed, epochs=args.epochs)
        done.put(row)
        if arm != "all":
            done.put(train(data, arm, seed, row["cost"], epochs=args.epochs))


def load(args: argparse.Namespace) -> dict[str, np.ndarray]:
    return drawn() if args.quick else fashion(args.fashion) if args.fashion else cifar.load(args.data)


def measured(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of every arm and seed; those in --rows already are not made again."""
    file = Path(args.rows) if args.rows else None
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file and file.exists() else []
    had = {(row["arm"], row["seed"]) for row in rows}
    jobs = [
        (arm, seed)
        for seed in range(args.first, args.first + args.seeds)
        for arm in args.arms.split(";")
        if (arm, seed) not in had
    ]
    context = mp.get_context("spawn")
    todo, done = context.Queue(), context.Queue()
    for job in [*jobs, *[None] * args.jobs]:
        todo.put(job)
    if jobs and not args.quick:
        load(args)  # once, and kept
    workers = [context.Process(target=work, args=(args, todo, done), daemon=True) for _ in range(args.jobs)]
    for worker in workers:
        worker.start()
    for _ in range(sum(1 if arm == "all" else 2 for arm, _ in jobs)):
        rows.append(done.get())
        print(rows[-1], flush=True)
        if file:
            with file.open("a") as out:
                out.write(json.dumps(rows[-1]) + "\n")
    return rows


def shown(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The table, and the figures of each arm."""
    at = {(row["arm"], row["seed"]): row for row in rows}
    figures: dict[str, Any] = {}
    arms = list(dict.fromkeys(row["arm"] for row in rows if not row["arm"].startswith("shorter")))
    for arm in arms:
        seeds = [s for s in sorted({row["seed"] for row in rows}) if (arm, s) in at and ("all", s) in at]
        if not seeds:
            continue
        mean = {key: statistics.mean(at[arm, s][key] for s in seeds) for key in ("accuracy", "cost", "seconds")}
        line = f"{arm:18} {mean['accuracy']:6.2f} at {mean['cost']:5.2f} passes"
        if arm != "all":
            every = {key: statistics.mean(at["all", s][key] for s in seeds) for key in ("accuracy", "cost", "seconds")}
            pairs = [at[arm, s]["accuracy"] - at[f"shorter than {arm}", s]["accuracy"] for s in seeds]
            figures[arm] = {
                "gap": round(every["accuracy"] - mean["accuracy"], 2), "vs_shorter": round(statistics.mean(pairs), 2),
                "by_seed": [round(one, 2) for one in pairs], "less_compute": round(every["cost"] / mean["cost"], 2),
                "wall_clock": round(every["seconds"] / mean["seconds"], 2),
            }  # fmt: skip
            line += f", {figures[arm]['less_compute']:.2f}x less; all data {-figures[arm]['gap']:+.2f}"
            line += f", shorter run {figures[arm]['vs_shorter']:+.2f} ({', '.join(f'{one:+.2f}' for one in pairs)})"
        print(line)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="", help="CIFAR-10 as a .tar.gz of a folder of images")
    parser.add_argument("--fashion", default="", help="folder of Fashion-MNIST")
    parser.add_argument("--arms", default=";".join(ARMS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--rows", default="")
    parser.add_argument("--show", default="", metavar="ROWS")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    if args.quick:
        args.arms, args.seeds, args.epochs = "all;rise 16;rise 24", 1, 6
    kept = Path(args.show).read_text().splitlines() if args.show else []
    print(json.dumps(shown([json.loads(line) for line in kept] or measured(args))))


if __name__ == "__main__":
    main()
