"""What are the exact levers of the step worth, does `salience.tune` find the best, and what does a budget of memory buy?

    python benchmarks/levers.py                         # ResNet-9, ResNet-18, a small transformer
    python benchmarks/levers.py --models resnet9
    python benchmarks/levers.py --memory resnet18       # the largest batch under a limit, with checkpointing and without
    python benchmarks/levers.py --quick

Baseline: the plain loop, float32, eager, with the optimizer as torch makes it. Every combination of the levers that are exact
or the same up to rounding is measured by hand on the same batches, in turns (medians of rounds); `tune` then trains
and chooses by itself. It would embarrass us if its choice were slower than the plain loop, or much slower than the best
combination, or if what it spends on trials were more than a short run can earn back: that is printed too.

`auto_exact_speedup`: plain / what tune chose, geometric mean over the models. `auto_exact_vs_best`: best / what tune chose; the
lowest of the models. `largest_batch`: with and without `memory=`, by the peak of the process's memory.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import salience
from salience.app.models import build
from salience.speed.levers import SPEED_LEVERS, Facts
from salience.speed.way import Way

STEPS, ROUNDS = 4, 3
"""Timed steps of a combination in each round, and rounds."""


class Transformer(nn.Module):
    """A small encoder over 64 tokens that tells ten classes."""

    def __init__(self, width: int = 128, depth: int = 4) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(256, width), nn.Parameter(torch.zeros(64, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks, self.head = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False), nn.Linear(width, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(tokens) + self.place).mean(1))


def problem(
    name: str, batch: int, batches: int, device: torch.device
) -> tuple[nn.Module, torch.optim.Optimizer, Any, Any]:
    """Model, optimizer, inputs [n, ...] and targets [n]."""
    g = torch.Generator().manual_seed(0)
    n = batch * batches
    torch.manual_seed(0)
    if name == "transformer":
        model: nn.Module = Transformer().to(device)
        tokens, targets = torch.randint(0, 256, (n, 64), generator=g), torch.randint(0, 10, (n,), generator=g)
        return model, torch.optim.AdamW(model.parameters(), 1e-3), tokens, targets
    model = build(name, 10).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, nesterov=True, weight_decay=5e-4)
    return model, optimizer, torch.randn(n, 3, 32, 32, generator=g), torch.randint(0, 10, (n,), generator=g)


def timed(way: Way, x: Any, y: Any, steps: int) -> float:
    """Median seconds per step."""
    found: list[float] = []
    for _ in range(steps):
        begin = time.perf_counter()
        loss = F.cross_entropy(way(x), y)
        way.optimizer.zero_grad()
        loss.backward()
        way.optimizer.step()
        if x.device.type == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - begin)
    return statistics.median(found)


def by_hand(name: str, batch: int, device: torch.device) -> dict[tuple[str, ...], float]:
    """Seconds per step of every combination of levers that are not lossy."""
    model, optimizer, x, y = problem(name, batch, 1, device)
    facts = Facts(model=model, optimizer=optimizer, device=device)
    levers = [one.name for one in SPEED_LEVERS if one.numerics != "lossy" and not one.refused(facts)]
    pairs = ({"fused", "foreach"}, {"compile", "cuda_graphs"})
    combinations = [
        c for k in range(len(levers) + 1) for c in itertools.combinations(levers, k)
        if not any(pair <= set(c) for pair in pairs)
    ]  # fmt: skip
    ways: dict[tuple[str, ...], Way] = {}
    for combination in combinations:
        model, optimizer, x, y = problem(name, batch, 1, device)
        x, y = x.to(device), y.to(device)
        way = ways[combination] = Way(model, optimizer, device)
        way.shape = (x.shape,)
        for lever in combination:
            way.switch(lever, True)
        timed(way, x, y, 3)
    seconds: dict[tuple[str, ...], list[float]] = {c: [] for c in combinations}
    for _ in range(ROUNDS):
        for combination, way in ways.items():
            seconds[combination].append(timed(way, x, y, STEPS))
    return {c: statistics.median(found) for c, found in seconds.items()}


def by_itself(name: str, batch: int, device: torch.device) -> tuple[tuple[str, ...], float, str]:
    """What tune keeps in a run, how many seconds its trials took, and its report."""
    model, optimizer, x, y = problem(name, batch, 100, device)
    epochs = 1000  # a run that is worth tuning; it is left once the choice is made
    loader = salience.Loader(TensorDataset(x, y), batch, epochs=epochs, device=device)
    fast = salience.tune(model, optimizer, loader)
    begin = time.perf_counter()
    for _ in range(epochs):
        for inputs, targets in loader:
            logits = fast(inputs)
            loss = loader.loss(F.cross_entropy(logits, targets, reduction="none"), logits, targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if fast.done:
                return fast.kept, time.perf_counter() - begin, fast.report()
    return fast.kept, time.perf_counter() - begin, fast.report()


def row(name: str, batch: int, device: torch.device) -> dict[str, Any]:
    """One model: by hand, and by itself."""
    table = by_hand(name, batch, device)
    kept, spent, said = by_itself(name, batch, device)
    plain, best = table[()], min(table, key=lambda c: table[c])
    chosen = next(seconds for c, seconds in table.items() if set(c) == set(kept))
    print(f"\n{name}, batch {batch}: plain {1000 * plain:.1f} ms per step")
    for combination, seconds in sorted(table.items(), key=lambda item: item[1]):
        mark = "   <- tune" if set(combination) == set(kept) else ""
        print(f"  {plain / seconds:5.2f}x  {' + '.join(combination) or 'plain'}{mark}")
    print(f"  tune decided within {spent:.0f} s ({spent / plain:.0f} plain steps):")
    print("    " + said.replace("\n", "\n    "))
    return {
        "model": name, "batch": batch, "plain_ms": round(1000 * plain, 2), "speedup": round(plain / chosen, 3),
        "vs_best": round(table[best] / chosen, 3), "kept": list(kept), "best": list(best),
        "tuning_seconds": round(spent, 1),
        "all": {" + ".join(c) or "plain": round(plain / seconds, 3) for c, seconds in table.items()},
    }  # fmt: skip


# --- memory ---


def peak(name: str, batch: int, memory: int) -> float:
    """Bytes that the first steps of a batch add to the peak memory of a process that has done steps on two samples."""
    model, optimizer, x, y = problem(name, batch, 1, torch.device("cpu"))
    step = Way(model, optimizer, torch.device("cpu"))
    timed(step, x[:2], y[:2], 2)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    loader = salience.Loader(TensorDataset(x, y), batch, epochs=2)
    fast = salience.tune(model, optimizer, loader, levers=(), memory=memory or None)
    for _ in range(2):
        for inputs, targets in loader:
            loss = loader.loss(F.cross_entropy(fast(inputs), targets, reduction="none"))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def largest_batch(name: str, limit: int, memory: int) -> int:
    """The largest batch (in steps of an eighth) whose steps add at most `limit` bytes, each tried in a process of its own."""

    def fits(batch: int) -> bool:
        command = [sys.executable, __file__, "--peak", name, str(batch), str(memory)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return float(said.split()[-1]) <= limit

    low = 4
    while fits(2 * low):
        low *= 2
    step = max(1, low // 8)
    while fits(low + step):
        low += step
    return low


def memory_row(name: str, limit: int) -> dict[str, Any]:
    without, budget = largest_batch(name, limit, 0), largest_batch(name, limit, int(0.7 * limit))
    print(
        f"\n{name}: within {limit / 2**20:.0f} MiB above the model a batch of {without} fits, with memory= one of {budget}"
    )
    return {"model": name, "limit_mib": limit >> 20, "without": without, "with_budget": budget}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="resnet9,resnet18,transformer")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--memory", default="", metavar="MODEL", help="instead: the largest batch of this model")
    parser.add_argument("--limit", type=int, default=256, help="MiB")
    parser.add_argument("--peak", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    if args.peak:
        print(peak(args.peak[0], int(args.peak[1]), int(args.peak[2])))
        return
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result: dict[str, Any] = {}
    if args.quick:
        args.models, args.memory, args.batch = "cnn", "cnn", 64
    rows = [] if args.memory and not args.quick else [row(name, args.batch, device) for name in args.models.split(",")]
    if rows:
        mean = math.exp(statistics.mean(math.log(one["speedup"]) for one in rows))
        result = {"auto_exact_speedup": round(mean, 3), "auto_exact_vs_best": min(one["vs_best"] for one in rows)}
    if args.memory:
        result["largest_batch"] = memory_row(args.memory, (32 if args.quick else args.limit) << 20)
    print(json.dumps({**result, "device": device.type, "models": rows}))


if __name__ == "__main__":
    main()
