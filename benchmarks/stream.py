"""Is a stream that is selected from better than a shorter stream, at equal visits?

Images of glyphs (a tenth hard, copies, and `--wrong` of the labels wrong) come as a stream: no length, keys instead of
positions, a buffer of `--window` samples, another order in every pass. Three runs per seed, one small network:

full      every pass is a whole one
selected  `select="default"`: first pass whole, then what the curve keeps
shorter   as many visits as `selected` made, all of them uniform, with the schedule fitted to that number

`stream_vs_shorter` is the mean difference of test accuracy, selected - shorter, in points. It would embarrass us if it were
below 0, or if a stopped stream did not go on bit for bit (tests/run/test_streaming.py).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import IterableDataset

import salience
from planted import slim
from salience.app.glyphs import Glyphs, render


class Images(IterableDataset[Any]):
    """The images as a stream, in another order in every pass."""

    def __init__(self, glyphs: Glyphs, seed: int) -> None:
        self.x = torch.from_numpy(glyphs.images).unsqueeze(1).float() / 127.5 - 1
        self.y, self.seed, self.epoch = torch.from_numpy(glyphs.labels), seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for i in np.random.default_rng((self.seed, self.epoch)).permutation(len(self.y)).tolist():
            yield {"url": f"glyph/{i}", "x": self.x[i], "y": self.y[i]}


def train(
    stream: Images, *, passes: int, window: int, seed: int, select: str | None, visits: int
) -> tuple[nn.Module, int]:
    """A model after that many `visits` (0 = all of `passes`); returns it with the visits made."""
    loader = salience.Loader(stream, 64, keys="url", window=window, epochs=passes, select=select, seed=seed)
    torch.manual_seed(seed)
    model = slim(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    generator = torch.Generator().manual_seed(seed)
    total = visits or passes * len(stream.y)
    while loader.epoch < passes and (not visits or loader.visits < visits):
        for batch in loader:
            done = loader.visits / total if visits or loader.progress == 0 else loader.progress
            for group in optimizer.param_groups:
                group["lr"] = 0.1 * min(done / 0.15 + 0.02, max(0.0, (1 - done) / 0.85))
            logits = model(shifted(batch["x"], generator))
            losses = F.cross_entropy(logits, batch["y"], reduction="none")
            optimizer.zero_grad()
            loader.loss(losses, logits, batch["y"]).backward()
            optimizer.step()
            if visits and loader.visits >= visits:
                break
    return model, loader.visits


def shifted(x: Tensor, generator: torch.Generator) -> Tensor:
    """The batch, moved by up to two pixels."""
    dx, dy = torch.randint(-2, 3, (2,), generator=generator).tolist()
    return x.roll((dx, dy), (2, 3))


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    model.eval()
    right = sum(int((model(a).argmax(1) == b).sum()) for a, b in zip(x.split(500), y.split(500), strict=True))
    return 100 * right / len(y)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed of a small stream, within a minute")
    parser.add_argument("--n", type=int, default=4_000)
    parser.add_argument("--passes", type=int, default=14)
    parser.add_argument("--window", type=int, default=1_000)
    parser.add_argument("--wrong", type=float, default=0.2)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    if options.quick:
        options.n, options.passes, options.window, options.seeds = 1_200, 10, 400, 1
    torch.set_num_threads(1)
    test = render(2_000, size=24, copies=0, wrong=0, seed=99, split="test")
    test_x, test_y = torch.from_numpy(test.images).unsqueeze(1).float() / 127.5 - 1, torch.from_numpy(test.labels)
    rows, begin = [], time.perf_counter()
    for seed in range(options.seeds):
        glyphs = render(options.n, size=24, wrong=options.wrong, seed=seed)
        row: dict[str, float] = {}
        visits = 0
        for arm in ("full", "selected", "shorter"):
            model, made = train(
                Images(glyphs, seed), passes=options.passes, window=options.window, seed=seed,
                select="default" if arm == "selected" else None, visits=visits if arm == "shorter" else 0,
            )  # fmt: skip
            visits = made if arm == "selected" else visits
            row[arm], row[f"{arm}_visits"] = accuracy(model, test_x, test_y), made
        rows.append(row)
        print(f"seed {seed}: " + ", ".join(f"{name} {value:.2f}" for name, value in row.items()), flush=True)
    differences = [row["selected"] - row["shorter"] for row in rows]
    print(
        json.dumps({
            "stream_vs_shorter": round(statistics.mean(differences), 3),
            "differences": [round(value, 3) for value in differences],
            "sd": round(statistics.stdev(differences), 3) if len(differences) > 1 else None,
            **{arm: round(statistics.mean(row[arm] for row in rows), 3) for arm in ("full", "selected", "shorter")},
            "visits_selected": statistics.mean(row["selected_visits"] for row in rows),
            "visits_shorter": statistics.mean(row["shorter_visits"] for row in rows),
            "visits_full": statistics.mean(row["full_visits"] for row in rows),
            "n": options.n, "passes": options.passes, "window": options.window, "wrong": options.wrong,
            "seconds": round(time.perf_counter() - begin, 1),
        })
    )  # fmt: skip


if __name__ == "__main__":
    main()
