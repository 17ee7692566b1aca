"""Under which loss is a sample's gradient near zero, and does one curve serve several models?

Two models learn one data set in observe mode; at accuracy marks a probe of 256 training samples counts gradient entries under
0.0001 (`attach(model, probe=...)`). Compared are the models' curves of that share over the loss at about the same accuracy: at
equal loss, and at equal loss relative to the mean loss of the probe.

curve_gap           mean difference between the two models' shares at equal loss, over the losses both have; 0 = one curve
curve_gap_relative  the same at equal loss / mean loss
easiest, hardest    share near zero in the quarters of lowest and highest loss: least and most of all models and marks >= 85%
learnt              the calibrated loss of every model and mark, and the same relative to the mean

Embarrassing would be: hardly any difference between the easiest and the hardest quarter, since then a loss says nothing about a
gradient.

    python benchmarks/nearzero.py --quick                     # rendered digits, under a minute
    python benchmarks/nearzero.py --data cifar10.tar.gz

The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import salience
from planted import BATCH, CLASSES, Images, _augmented, _scaled, digits, images_of, slim
from salience.events import GradientsProbed

TEST = 1000


def plain(channels: int, side: int) -> nn.Module:
    """Two convolutions and a hidden layer, without normalisation and without residual connections."""
    convolutions = (
        nn.Conv2d(channels, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 1, 1), nn.ReLU(), nn.MaxPool2d(2),
    )  # fmt: skip
    return nn.Sequential(
        *convolutions, nn.Flatten(), nn.Linear(32 * (side // 4) ** 2, 64), nn.ReLU(), nn.Linear(64, CLASSES)
    )


def observed(images: Images, model: nn.Module, *, epochs: int, seed: int, lr: float) -> list[GradientsProbed]:
    """The probes of one run."""
    x, y = _scaled(images.x, images.x), torch.from_numpy(images.y)
    test_x, test_y = _scaled(images.rest_x[:TEST], images.x), torch.from_numpy(images.rest_y[:TEST])
    selector = salience.Selector(len(y), batch_size=BATCH, epochs=epochs, labels=y, seed=seed)
    selector.attach(model, probe=(x[:256], y[:256]))
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9, weight_decay=5e-4, nesterov=True)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for ids, _ in selector:
            for group in optimizer.param_groups:
                done = selector.progress
                group["lr"] = lr * min(done / 0.2 + 0.02, max(0.0, (1 - done) / 0.8))
            logits = model(_augmented(x[ids], generator))
            loss = selector.loss(F.cross_entropy(logits, y[ids], reduction="none"), logits, y[ids])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            selector.evaluated(float((model(test_x).argmax(1) == test_y).float().mean()))
        model.train()
    return [event.data for event in selector.events.recent if isinstance(event.data, GradientsProbed)]


def gap(a: GradientsProbed, b: GradientsProbed, *, relative: bool) -> float | None:
    """Mean difference of two curves over the losses both have; None where they have none in common."""
    (xa, ya), (xb, yb) = (
        (np.array(one.losses) / (one.mean_loss if relative else 1.0), np.array(one.shares)) for one in (a, b)
    )
    low, high = max(xa[0], xb[0]), min(xa[-1], xb[-1])
    if low >= high:
        return None
    at = np.geomspace(max(low, 1e-9), high, 50)
    return float(np.abs(np.interp(at, xa, ya) - np.interp(at, xb, yb)).mean())


def nearest(probes: list[GradientsProbed], accuracy: float) -> GradientsProbed | None:
    """The probe closest to an accuracy, if one is within five points."""
    found = min(probes, key=lambda one: abs(one.accuracy - accuracy), default=None)
    return found if found is not None and abs(found.accuracy - accuracy) <= 0.05 else None


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--data", help="CIFAR-10 as an archive or folder of images, or a folder of idx files")
    args.add_argument("--quick", action="store_true", help="rendered digits")
    args.add_argument("--samples", type=int, default=12_000)
    args.add_argument("--epochs", type=int, default=12)
    args.add_argument("--seed", type=int, default=0)
    given = args.parse_args()
    if not given.quick and not given.data:
        args.error("give --quick or --data")
    torch.set_num_threads(1)
    images = digits(4000, given.seed) if given.quick else images_of(given.data, given.samples, given.seed)
    epochs = 14 if given.quick else given.epochs
    channels, side = images.x.shape[1:3]
    torch.manual_seed(given.seed)
    models = {"slim ResNet": (slim(channels), 0.2), "plain CNN": (plain(channels, side), 0.03)}
    runs = {
        name: observed(images, model, epochs=epochs, seed=given.seed, lr=lr) for name, (model, lr) in models.items()
    }
    for name, probes in runs.items():
        print(f"\n{name}")
        for one in probes:
            cells = " ".join(f"{loss:.3g}:{share:.0%}" for loss, share in zip(one.losses, one.shares, strict=True))
            print(f"  {one.accuracy:.0%}, mean loss {one.mean_loss:.3g}, learnt under {one.learnt_loss}: {cells}")
    print(json.dumps(figures(runs)))


def figures(runs: dict[str, list[GradientsProbed]]) -> dict[str, Any]:
    pairs = [
        (one, other)
        for a, b in itertools.combinations(runs.values(), 2)
        for one in a
        if (other := nearest(b, one.accuracy)) is not None
    ]
    out: dict[str, Any] = {"pairs": len(pairs)}
    for name, relative in (("curve_gap", False), ("curve_gap_relative", True)):
        gaps = [found for one, other in pairs if (found := gap(one, other, relative=relative)) is not None]
        out[name] = round(float(np.mean(gaps)), 3) if gaps else None
    late = [one for probes in runs.values() for one in probes if one.accuracy >= 0.85]
    out["easiest"] = [round(f(float(np.mean(one.shares[:2])) for one in late), 3) for f in (min, max)] if late else None
    out["hardest"] = (
        [round(f(float(np.mean(one.shares[-2:])) for one in late), 3) for f in (min, max)] if late else None
    )
    out["learnt"] = {
        name: [
            [round(one.accuracy, 2), round(one.learnt_loss, 5), round(one.learnt_loss / one.mean_loss, 3)]
            for one in probes
            if one.learnt_loss is not None
        ]
        for name, probes in runs.items()
    }
    return out


if __name__ == "__main__":
    main()
