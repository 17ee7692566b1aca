"""Does a mixture of experts find wrong labels better than the best single expert, and do several networks better than one?

A fifth of the labels is planted wrong: symmetric, pair (class c becomes c + 1), instance (what a weak model confuses). One
plain run of a slim ResNet in observe mode with a jury of two small nets (`attach(model, jury=...)`). Every expert of the model
and of both voices of the jury ranks the labels; the mixture is that of the filter `panel`, whose gate knows no truth. Rendered
digits; other data, which the gate was not made on:

    python benchmarks/criteria_mixture.py --data fashion-mnist [--quick] [--seed 1]    # a folder of idx files
    python benchmarks/criteria_mixture.py --data cifar10.tar.gz

moe_auroc            AUROC of the mixture over networks, by kind of noise; with all criteria: moe_all_auroc
best_single          the best expert of any network, chosen knowing the truth: hard to beat, and not to be had in a run
moe_vs_best_single   the mixture over that, the smallest of the kinds; best_vs_aum: the best single over AUM alone
jury_seconds         share of the run's seconds that the jury took, training of the jury included
learnt               share of the right labels that the model gave at its last visits: how much there is to judge by

Embarrassing would be: a mixture under the best expert of the model alone, or a run so short that it has learnt nothing.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import salience
from planted import BATCH, CLASSES, Images, _augmented, _scaled, digits, images_of, planted, slim
from salience.ledger import Ledger
from salience.select.agreement import auroc
from salience.select.experts import EXPERTS, mixture_of

SHARE = 0.2
KINDS = ("symmetric", "pair", "instance")


def juror(channels: int, width: int = 8) -> nn.Module:
    """A plain network of three convolutions."""

    def layer(a: int, b: int, stride: int = 1) -> list[nn.Module]:
        return [nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU()]

    return nn.Sequential(
        *layer(channels, width, 2), *layer(width, 2 * width), nn.MaxPool2d(2), *layer(2 * width, 4 * width), nn.MaxPool2d(2),
        nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(4 * width, CLASSES),
    )  # fmt: skip


def run(images: Images, given: np.ndarray, *, epochs: int, batch: int, seed: int) -> tuple[dict[str, Ledger], float]:
    """The ledgers of the model and of the jury, and the share of the seconds that the jury took."""
    x, y = _scaled(images.x, images.x), torch.from_numpy(given)
    selector = salience.Selector(len(y), batch_size=batch, epochs=epochs, labels=y, seed=seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model, nets = slim(x.shape[1]), [juror(x.shape[1]) for _ in range(2)]
    pairs = [
        (net, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)) for net in nets
    ]
    selector.attach(model, jury=pairs)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
    generator, begin = torch.Generator().manual_seed(seed), time.perf_counter()
    for _ in range(epochs):
        for ids, _ in selector:
            done = selector.progress
            for one in (optimizer, *(other for _, other in pairs)):
                for group in one.param_groups:
                    group["lr"] = 0.2 * min(done / 0.2 + 0.02, max(0.0, (1 - done) / 0.8))
            logits = model(_augmented(x[ids], generator))
            loss = selector.loss(F.cross_entropy(logits, y[ids], reduction="none"), logits, y[ids])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    seconds = time.perf_counter() - begin
    ledger = selector.ledger
    said = selector._run.sensing.jury_ledgers  # pyright: ignore[reportPrivateUsage]
    assert said is not None
    trained, held_out = said
    share = selector.watch.seconds["jury"] / seconds
    return {"model": ledger, "jury": trained, "jury, held out": held_out}, share


def measure(*, quick: bool, seed: int, data: str = "") -> dict[str, Any]:
    torch.set_num_threads(1)
    samples, epochs = (4000, 10) if quick else (8000, 16)
    images = images_of(data, samples, seed) if data else digits(samples, seed)
    names = ("moe_auroc", "moe_all_auroc", "best_single", "model_best", "aum", "learnt")
    out: dict[str, Any] = {name: {} for name in names}
    shares: list[float] = []
    for kind in KINDS:
        labels = planted(images, kind, SHARE, seed)
        wrong = labels != images.y
        ledgers, share = run(images, labels, epochs=epochs, batch=BATCH, seed=seed)
        shares.append(share)
        single = {
            f"{name} of {family}": auroc(np.asarray(expert(of), dtype=np.float32), wrong)
            for family, of in ledgers.items()
            for name, expert in EXPERTS.items()
        }
        mixed, every = mixture_of(ledgers), mixture_of(ledgers, experts=tuple(EXPERTS))
        best = max(single, key=lambda name: single[name])
        out["moe_auroc"][kind] = round(auroc(mixed.logit, wrong), 4)
        out["moe_all_auroc"][kind] = round(auroc(every.logit, wrong), 4)
        out["best_single"][kind] = [best, round(single[best], 4)]
        out["model_best"][kind] = round(max(v for name, v in single.items() if name.endswith("of model")), 4)
        out["aum"][kind] = round(single["aum of model"], 4)
        out["learnt"][kind] = round(float((ledgers["model"].guess == images.y).mean()), 3)
        print(f"  {kind}: {mixed.text}\n  {' ' * len(kind)}  {every.text}", flush=True)
    ratios = {kind: out["moe_auroc"][kind] / out["best_single"][kind][1] for kind in KINDS}
    return {
        "moe_vs_best_single": round(min(ratios.values()), 4),
        "moe_vs_best_by_kind": {kind: round(ratio, 4) for kind, ratio in ratios.items()},
        **out,
        "jury_seconds": round(float(np.mean(shares)), 3),
    }  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="", help="CIFAR-10 as an archive or a folder, or a folder of idx files")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(json.dumps(measure(quick=args.quick, seed=args.seed, data=args.data)))
