"""Where does a step that is observed spend the host time that a plain step does not: in `next` or in `loss`?

Steps of the model "mlp" on one core, plain and observed by turns, as in `overhead.py`, which says what they cost as a whole.
Here the two calls are timed by themselves, in the thread's own time: `next` of the iterator (what is done between windows
included) and the reduction of the losses, less what `next` of a plain DataLoader (or of a plain order of ids) and
`losses.mean()` take.

Embarrassing would be: more than 100 microseconds per step for both together.

    python benchmarks/overhead_where.py [--quick]

The last line of stdout is one JSON object, in microseconds per step.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import salience
from overhead import OBSERVED, images, mean, mlp_step

STEPS = 64
Batches = Callable[[], Iterable[tuple[Tensor, Tensor]]]


def arm(batches: Batches, loss: Callable[..., Tensor]) -> tuple[Iterator[None], list[float]]:
    """One step after the other, and the seconds spent so far in `next` and in `loss`."""
    spent, clock = [0.0, 0.0], time.thread_time

    def timed(*given: Tensor) -> Tensor:
        begin = clock()
        value = loss(*given)
        spent[1] += clock() - begin
        return value

    step = mlp_step(timed)

    def steps() -> Iterator[None]:
        while True:
            begin = clock()
            arriving = iter(batches())
            spent[0] += clock() - begin
            while True:
                begin = clock()
                batch = next(arriving, None)
                spent[0] += clock() - begin
                if batch is None:
                    break
                step(*batch)
                yield

    return steps(), spent


def doors(name: str) -> tuple[Batches, Batches, Callable[..., Tensor]]:
    """Plain batches, observed ones, and the loss of these."""
    x, y = images(OBSERVED * STEPS)
    if name == "selector":
        selector = salience.Selector(len(x), batch_size=OBSERVED, labels=y.numpy())
        plain = lambda: ((x[i], y[i]) for i in torch.randperm(len(x)).split(OBSERVED))  # noqa: E731
        return plain, lambda: ((x[i], y[i]) for i, _ in selector), selector.loss
    options: dict[str, Any] = {"num_workers": 2, "persistent_workers": True} if name == "loader_2" else {}
    data = TensorDataset(x, y)
    usual, loader = DataLoader(data, OBSERVED, shuffle=True, **options), salience.Loader(data, OBSERVED, **options)
    return lambda: usual, lambda: loader, loader.loss


def added(name: str, windows: int) -> dict[str, float]:
    """What observing adds to `next` and to `loss`: medians over windows, after two to warm up."""
    plain, ours, loss = doors(name)
    arms = [arm(plain, mean), arm(ours, loss)]
    rows: list[Any] = []
    for window in range(windows + 2):
        before = [list(spent) for _, spent in arms]
        for step in range(STEPS):
            for k in (0, 1) if (step + window) % 2 else (1, 0):
                next(arms[k][0])
        rows.append([np.subtract(spent, then) / STEPS * 1e6 for (_, spent), then in zip(arms, before, strict=True)])
    taken = np.median(np.array(rows[2:]), axis=0)
    more = taken[1] - taken[0]
    return {f"next_us_{name}": round(float(more[0]), 1), f"loss_us_{name}": round(float(more[1]), 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer windows")
    windows = 8 if parser.parse_args().quick else 40
    torch.set_num_threads(1)
    figures: dict[str, float] = {}
    for name in ("selector", "loader_0", "loader_2"):
        figures |= added(name, windows)
        print(figures, flush=True)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
