"""Augmentation that changes with the run: is it as accurate as the same augmentation all along, and does the gap steer it well?

Rendered digits, a slim residual network, one stage that moves an image by up to three pixels and covers a square of it. All
arms make as many visits: no augmentation; all of it all along; `curve="fade"` (full, then down to nothing over the last 30%);
`curve="rise"`; `Treat(adapt=True)`, which follows the gap between training and validation accuracy (on 300 labels that no arm
is tested on). Accuracy on other images, paired by seed.

augment_gain   each arm minus the same augmentation all along, in accuracy: mean and standard error over seeds

Embarrassing would be: fading or the steered strength behind both constant arms by more than the errors.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import salience
from planted import digits, slim

BATCH, VALIDATION, REACH, SIDE = 50, 300, 3, 10


def moved_and_covered(x: torch.Tensor, *, strength: float) -> torch.Tensor:
    """Moved by up to REACH pixels, with a square of up to SIDE pixels covered."""
    reach, side = round(REACH * strength), round(SIDE * strength)
    dx, dy, left, top = (int(v) for v in torch.randint(0, 1 << 16, (4,)))
    x = torch.roll(x, (dy % (2 * reach + 1) - reach, dx % (2 * reach + 1) - reach), (1, 2))
    if side:
        left, top = left % (x.shape[2] - side), top % (x.shape[1] - side)
        x[:, top : top + side, left : left + side] = 0
    return x


def always(progress: float) -> float:
    return 1.0


ARMS: dict[str, dict[str, Any]] = {
    "none": {},
    "all along": {"augment": [salience.Stage(moved_and_covered, curve=always)]},
    "fade": {"augment": [salience.Stage(moved_and_covered, curve="fade")]},
    "rise": {"augment": [salience.Stage(moved_and_covered, curve="rise")]},
    "adapt": {
        "augment": [salience.Stage(moved_and_covered, curve=always)], "treat": salience.Treat(adapt=True),
    },
}  # fmt: skip


def accuracy(arm: dict[str, Any], *, n: int, epochs: int, seed: int) -> tuple[float, float]:
    """Test accuracy of one run, and the strength of the augmentation at its end."""
    images = digits(n, seed)
    x, rest = ((torch.from_numpy(a).float() - float(images.x.mean())) / 255 for a in (images.x, images.rest_x))
    y, rest_y = torch.from_numpy(images.y), torch.from_numpy(images.rest_y)
    loader = salience.Loader(TensorDataset(x, y), BATCH, epochs=epochs, seed=seed, **arm)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = slim(1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
    schedule = salience.ProgressLR(optimizer, loader, "one_cycle")
    right = torch.zeros(len(rest))
    for _ in range(epochs):
        model.train()
        for inputs, targets in loader:
            logits = model(inputs)
            loss = loader.loss(F.cross_entropy(logits, targets, reduction="none"), logits, targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        model.eval()
        with torch.no_grad():
            right = (model(rest).argmax(1) == rest_y).float()
        loader.evaluated(float(right[:VALIDATION].mean()))
    staging = loader._run.staging  # pyright: ignore[reportPrivateUsage]
    adapting = None if staging is None else staging.treating.adapting
    return float(right[VALIDATION:].mean()), 1.0 if adapting is None else adapting.amount


def measure(*, quick: bool, seed: int = 0) -> dict[str, Any]:
    torch.set_num_threads(1)
    n, epochs, seeds = (1000, 16, 2) if quick else (2000, 40, 5)
    found: dict[str, list[float]] = {name: [] for name in ARMS}
    for k in range(seeds):
        ends = ""
        for name, arm in ARMS.items():
            value, amount = accuracy(arm, n=n, epochs=epochs, seed=seed + k)
            found[name].append(value)
            ends += f" {name} {value:.4f}" + (f" (strength {amount:g} at the end)" if name == "adapt" else "")
        print(f"  seed {seed + k}:{ends}", flush=True)
    usual = np.array(found["all along"])
    gains = {name: np.array(values) - usual for name, values in found.items() if name != "all along"}
    return {
        "augment_accuracy": {name: round(float(np.mean(values)), 4) for name, values in found.items()},
        "augment_gain": {
            name: [round(float(gain.mean()), 4), round(float(gain.std(ddof=1) / np.sqrt(seeds)), 4)]
            for name, gain in gains.items()
        },
    }
