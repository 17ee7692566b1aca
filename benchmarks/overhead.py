"""What does salience cost when it saves nothing?

Baseline: the plain DataLoader, same items (0.2 ms of work each), same order, in turns within one process; plain against plain
beside it, to show what the machine's noise alone does to the ratio. Then the parts alone: planning 1.28 M samples with
`default` (100 M with --full) and with three scores and two filters where a fifth of the labels is wrong, recording a batch
of 1024 (flush included), bytes a sample. And gradient norms of an attached model: a training step with them over a plain
one, in turns, for "auto" and "all" layers.

Embarrassing would be: loader_ratio over 1.02, watch_overhead (step timers on over off) over 1.01, plan_ms_1_28m over 150,
plan_full_ms_1_28m over 400, plan_s_100m over 15,
record_us_1024 over 100, record_logits_us_1024 over 400, more than 64 bytes a sample, ghost_ratio over 1.15 for either model.

    python benchmarks/overhead.py [--quick | --full]

The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import salience
from salience.config import SelectConfig, Use
from salience.ledger import Ledger, Recorder, bytes_per_sample
from salience.models import build
from salience.select import Pipeline, preset
from salience.watch import Steps

ITEM_SECONDS = 2e-4
BATCH = 64


class Work(Dataset[tuple[Tensor, int]]):
    """Items that take 0.2 ms of processor time each, as decoding a small image does."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.x = torch.zeros(8)

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        end = time.perf_counter() + ITEM_SECONDS
        while time.perf_counter() < end:
            pass
        return self.x, i % 10


def epoch(loader: Iterable[Any], reduce: Callable[[Tensor], Tensor]) -> float:
    """Seconds for one pass with a loss in every step."""
    begin = time.perf_counter()
    for x, _ in loader:
        reduce(x.sum(1) + 1.0)
    return time.perf_counter() - begin


def loader_ratio(pairs: int, items: int) -> dict[str, Any]:
    data = Work(items)
    plain = DataLoader(data, BATCH, shuffle=True, generator=torch.Generator().manual_seed(0))
    again = DataLoader(data, BATCH, shuffle=True, generator=torch.Generator().manual_seed(0))
    ours = salience.Loader(data, BATCH, seed=0)
    epoch(plain, Tensor.mean), epoch(ours, ours.loss)
    ratios, noise = [], []
    for k in range(pairs):
        arms = [("plain", plain, Tensor.mean), ("again", again, Tensor.mean), ("ours", ours, ours.loss)]
        seconds = {name: epoch(loader, reduce) for name, loader, reduce in arms[k % 3 :] + arms[: k % 3]}
        ratios.append(seconds["ours"] / seconds["plain"])
        noise.append(seconds["again"] / seconds["plain"])
    return {
        "loader_ratio": round(float(np.median(ratios)), 4),
        "loader_ratio_interval": interval(ratios),
        "plain_vs_plain": round(float(np.median(noise)), 4),
        "plain_vs_plain_interval": interval(noise),
        "pairs": pairs,
    }


class Untimed(Steps):
    """Steps nobody looks at."""

    def ask(self) -> None: ...

    def got(self, work: dict[str, float] | None = None, *, held: bool = False) -> None: ...

    def lost(self, device: torch.device) -> None: ...


def watch_overhead(pairs: int, items: int) -> dict[str, Any]:
    """A pass with the step timers over one without them, in turns."""
    timed, untimed = (salience.Loader(Work(items), BATCH, seed=0) for _ in range(2))
    untimed.steps = Untimed()
    epoch(timed, timed.loss), epoch(untimed, untimed.loss)
    ratios = []
    for k in range(pairs):
        seconds = {loader: epoch(loader, loader.loss) for loader in ((timed, untimed) if k % 2 else (untimed, timed))}
        ratios.append(seconds[timed] / seconds[untimed])
    return {"watch_overhead": round(float(np.median(ratios)), 4), "watch_overhead_interval": interval(ratios)}


def interval(values: list[float]) -> list[float]:
    """95% interval of the median, by resampling."""
    rng = np.random.default_rng(0)
    medians = np.median(rng.choice(values, (2000, len(values))), axis=1)
    return [round(float(q), 4) for q in np.quantile(medians, (0.025, 0.975))]


def history(n: int) -> Ledger:
    """A ledger as a few epochs leave it."""
    ledger, rng = Ledger(n), np.random.default_rng(0)
    for start in range(0, n, 10_000_000):
        part = slice(start, min(n, start + 10_000_000))
        count = part.stop - start
        ledger.mean_loss[part] = rng.standard_exponential(count, dtype=np.float32)
        ledger.last_seen[part] = rng.integers(3, 9, count, dtype=np.int32)
        ledger.label[part] = rng.integers(0, 1000, count, dtype=np.int32)
        ledger.margin[part] = 5 - 2 * ledger.mean_loss[part]
        ledger.guess[part] = np.where(ledger.margin[part] > 0, ledger.label[part], (ledger.label[part] + 1) % 1000)
    ledger.last_loss[:] = ledger.mean_loss
    ledger.seen[:] = 5
    return ledger


def noisy_history(n: int) -> Ledger:
    """A ledger as a few epochs leave it where every fifth label is wrong and the model mostly knows better."""
    ledger, rng = history(n), np.random.default_rng(1)
    wrong = rng.random(n) < 0.2
    ledger.margin[:] = np.where(wrong, -5, 5) + rng.standard_normal(n, dtype=np.float32)
    differs = ledger.margin < 0
    ledger.other[:] = (ledger.label + rng.integers(1, 1000, n)) % 1000
    ledger.guess[:] = np.where(differs, ledger.other, ledger.label)
    ledger.guess_p[:] = 1 / (1 + np.exp(-np.abs(ledger.margin)))
    ledger.el2n[:] = np.sqrt(2) / (1 + np.exp(ledger.margin))
    ledger.right[:] = np.where(differs, 0, 4)
    ledger.forgotten[:] = np.minimum(ledger.mean_loss, 3)
    return ledger


FULL = SelectConfig(
    filters=(Use(name="noise"), Use(name="class_floor")),
    scores=(Use(name="difficulty"), Use(name="forgetting", weight=0.5), Use(name="staleness", weight=0.2)),
    sampler=Use(name="probability"),
    keep=Use(name="constant", options={"share": 0.4}),
)


def plan_full_seconds(n: int, repeats: int) -> float:
    """Three scores and two filters in the middle of a run: `noise` knows its rate and leaves labels out."""
    ledger, pipeline, took = noisy_history(n), Pipeline(FULL, strict=True), []
    for _ in range(repeats):
        begin = time.perf_counter()
        plan = pipeline.plan(ledger, window=10, windows=20, batch_size=1024, seed=0, noise=0.2)
        took.append(time.perf_counter() - begin)
        assert 0.15 * n < plan.notes[0].dropped < 0.25 * n
    return float(np.median(took))


def plan_seconds(n: int, repeats: int) -> float:
    ledger, pipeline, took = history(n), Pipeline(preset("default"), strict=True), []
    for _ in range(repeats):
        begin = time.perf_counter()
        plan = pipeline.plan(ledger, window=10, windows=30, batch_size=1024, seed=0)
        took.append(time.perf_counter() - begin)
        assert len(plan) == pipeline.budget(10, 30, n) or not pipeline.exact
    return float(np.median(took))


def record_us(logits: bool, repeats: int) -> float:
    """Microseconds a batch of 1024 over a data set of 1.28 M, flush included."""
    n, size, batches = 1_280_000, 1024, 64
    rng = np.random.default_rng(0)
    order = rng.permutation(n)
    losses, z, y = torch.rand(size), torch.randn(size, 10), torch.randint(0, 10, (size,))
    ledger = Ledger(n)
    ledger.label[:] = -1
    recorder, took = Recorder(ledger), []
    for repeat in range(repeats + 1):
        begin = time.perf_counter()
        for k in range(batches):
            ids = order[k * size : (k + 1) * size]
            recorder.record(ids, losses, z if logits else None, y if logits else None, window=repeat, number=k)
        recorder.flush()
        took.append((time.perf_counter() - begin) / batches * 1e6)
    return float(np.median(took[1:]))


def training(model: str, batch: int, grad_norm: str | None, attach: bool) -> Iterator[float]:
    """Seconds of one training step after the other; without `attach` salience has no part in it."""
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(16 * batch, 3, 32, 32, generator=g), torch.randint(0, 10, (16 * batch,), generator=g)
    net = build(model, 10)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
    loader = salience.Selector(len(x), batch_size=batch)
    if attach:
        loader.attach(net, grad_norm=grad_norm)
    while True:
        batches = (
            iter(loader) if attach else iter([(i, None) for i in torch.randperm(len(x), generator=g).split(batch)])
        )
        begin = time.perf_counter()
        for ids, _ in batches:
            logits = net(x[ids])
            losses = F.cross_entropy(logits, y[ids], reduction="none")
            loss = loader.loss(losses) if attach else losses.mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield time.perf_counter() - begin
            begin = time.perf_counter()


def ghost_ratio(model: str, batch: int, turns: int) -> dict[str, Any]:
    """A step with gradient norms over a plain one. Each turn takes one step of each, first in another order each time."""
    arms = {
        "plain": training(model, batch, None, attach=False),
        "again": training(model, batch, None, attach=False),
        "auto": training(model, batch, "auto", attach=True),
        "all": training(model, batch, "all", attach=True),
    }
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(turns + 2):
        names = list(arms)
        for name in names[turn % 4 :] + names[: turn % 4]:
            took = next(arms[name])
            if turn >= 2:
                seconds[name].append(took)
    ratios = {name: list(np.array(seconds[name]) / np.array(seconds["plain"])) for name in arms}
    return {
        f"ghost_ratio_{model}": round(float(np.median(ratios["auto"])), 4),
        f"ghost_ratio_{model}_interval": interval(ratios["auto"]),
        f"ghost_all_ratio_{model}": round(float(np.median(ratios["all"])), 4),
        f"ghost_plain_vs_plain_{model}": round(float(np.median(ratios["again"])), 4),
        f"ghost_step_ms_{model}": round(1e3 * float(np.median(seconds["plain"])), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller and within a minute")
    parser.add_argument("--full", action="store_true", help="also plan 100 M samples (needs about 12 GiB)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    print("loader against plain DataLoader, in turns ...", flush=True)
    figures |= loader_ratio(pairs=15 if args.quick else 41, items=2048)
    figures |= watch_overhead(pairs=11 if args.quick else 41, items=2048)
    print("training steps with gradient norms against plain ones, in turns ...", flush=True)
    figures |= ghost_ratio("mlp", 64, turns=200 if args.quick else 600)
    figures |= ghost_ratio("resnet9", 8, turns=12 if args.quick else 40)
    figures["ghost_ratio"] = max(figures["ghost_ratio_mlp"], figures["ghost_ratio_resnet9"])
    print("planning 1.28 M samples ...", flush=True)
    figures["plan_ms_1_28m"] = round(1e3 * plan_seconds(1_280_000, 5 if args.quick else 15), 1)
    figures["plan_full_ms_1_28m"] = round(1e3 * plan_full_seconds(1_280_000, 5 if args.quick else 15), 1)
    figures["ledger_bytes_per_sample"] = bytes_per_sample()
    print("recording batches of 1024 ...", flush=True)
    figures["record_us_1024"] = round(record_us(False, 15), 1)
    figures["record_logits_us_1024"] = round(record_us(True, 15), 1)
    if args.full:
        print("planning 100 M samples ...", flush=True)
        figures["plan_s_100m"] = round(plan_seconds(100_000_000, 1), 2)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
