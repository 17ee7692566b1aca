"""Does tuning a selection on validation beat its default, and does it know when the validation set is too small?

Short runs of a small perceptron that learns another one (16 numbers, 10 classes, some of the labels wrong); `tune_select`
searches the sampler of a preset and confirms its best on fresh seeds and on the other half of the validation set, whose labels
are right. What a run costs is its visits, since the machine is shared. With 300 validation labels it must decide nothing after
a single run. Cases: a preset whose constants are good already (`epsilon_greedy`, a tenth of the labels wrong), and one whose
constants are bad for the data (`window` ends with what is hardest; here that is what is labelled wrong).

tuned_vs_default   what following the tuner gained, in accuracy: 0 where it kept the default, by case
tuned_found        what its best setting did against the default on fresh seeds, kept or not, with its interval
tuned_vs_random    the setting it chose, against as many samples drawn at random, on the same seeds: a bad rule that was tuned
                   may still be a bad rule
tuned_small_set    runs that a validation set of 300 cost, and whether the default was kept

Embarrassing would be: a setting that is taken and is not better, a search on 300 labels, or no case in which tuning gains.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import salience
from salience.config import SelectConfig, Use
from salience.decide.tuning import CONFIRMATIONS, halves, tune_select
from salience.select import preset

BATCH, INPUTS, CLASSES = 64, 16, 10
CASES = (("epsilon_greedy", 0.1), ("window", 0.4), ("epsilon_greedy", 0.4), ("default", 0.1))
"""Preset, and share of wrong labels; the first two are those of --quick."""


def perceptron(width: int, seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(INPUTS, width), nn.ReLU(), nn.Linear(width, CLASSES))


class Runs:
    """Makes short runs; counts them."""

    def __init__(self, samples: int, validation: int, epochs: int, seed: int, noise: float) -> None:
        g, teacher = torch.Generator().manual_seed(seed), perceptron(24, seed + 1000)
        self.x, self.val_x = (torch.randn(n, INPUTS, generator=g) for n in (samples, validation))
        with torch.no_grad():
            self.y, self.val_y = (teacher(4 * x).argmax(1) for x in (self.x, self.val_x))
        wrong = torch.rand(samples, generator=g) < noise
        self.y = torch.where(wrong, torch.randint(0, CLASSES, (samples,), generator=g), self.y)
        self.epochs, self.made = epochs, 0

    def __call__(self, select: SelectConfig, seed: int) -> tuple[Tensor, float]:
        self.made += 1
        model = perceptron(128, seed)
        selector = salience.Selector(
            len(self.y), batch_size=BATCH, epochs=self.epochs, labels=self.y, seed=seed, select=select
        )
        optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9, nesterov=True)
        for _ in range(self.epochs):
            for ids, _ in selector:
                for group in optimizer.param_groups:
                    group["lr"] = 0.2 * (1 - selector.progress)
                logits = model(self.x[ids])
                loss = selector.loss(F.cross_entropy(logits, self.y[ids], reduction="none"), logits, self.y[ids])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        with torch.no_grad():
            return (model(self.val_x).argmax(1) == self.val_y).double(), selector.visits / 1e5


def against_random(runs: Runs, config: SelectConfig, seed: int) -> list[float]:
    """Mean accuracy of `config` minus that of as many samples at random, on the seeds that confirm, and its standard error."""
    _, judge = halves(len(runs.val_y), seed)
    control = replace(config, sampler=Use(name="uniform"))
    gains = [
        float((runs(config, s)[0] - runs(control, s)[0])[judge].mean())
        for s in range(seed + 1, seed + 1 + CONFIRMATIONS)
    ]
    return [round(float(np.mean(gains)), 4), round(float(np.std(gains, ddof=1) / np.sqrt(len(gains))), 4)]


def measure(*, quick: bool, seed: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    samples, epochs, trials, cases = (1500, 10, 4, CASES[:2]) if quick else (4000, 20, 12, CASES)
    gained: dict[str, float] = {}
    found: dict[str, Any] = {}
    random: dict[str, list[float]] = {}
    for name, noise in cases:
        case, runs = f"{name}, {noise:.0%} wrong", Runs(samples, 20_000, epochs, seed, noise)
        said = tune_select(runs, name, trials=trials, seed=seed, start=1 / CLASSES)
        gained[case] = round(0.0 if said.kept_default else said.gain, 4)
        found[case] = [round(said.gain, 4), *(round(end, 4) for end in said.interval)]
        random[case] = against_random(runs, said.config, seed)
        print(f"  {case}: {said.reason}; against random {random[case]}", flush=True)
        for one in said.tried:
            settings = {key: round(value, 3) for key, value in one.settings.items()}
            print(f"    {settings}: {one.metric:.4f} for {1e5 * one.seconds:,.0f} visits", flush=True)
    small = Runs(samples, 300, epochs, seed, cases[0][1])
    refused = tune_select(small, preset(cases[0][0]), trials=trials, seed=seed, start=1 / CLASSES)
    print(f"  {refused.reason}", flush=True)
    return {
        "tuned_vs_default": gained,
        "tuned_found": found,
        "tuned_vs_random": random,
        "tuned_small_set": [small.made, refused.kept_default],
    }
