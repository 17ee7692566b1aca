"""Does tuning a selection on validation beat its default, and does it know when the validation set is too small?

Short runs of a small network on rendered digits, with a tenth of the labels wrong; `tune_select` searches the sampler of a
preset and confirms its best on fresh seeds and on the other half of the validation set. The same with 300 validation labels
must decide nothing and cost a single run.

tuned_vs_default   what following the tuner gained, in accuracy: 0 where it kept the default
found              what its best setting did against the default on fresh seeds, kept or not, with its interval
small_set          runs that a validation set of 300 cost, and what was said

Embarrassing would be: a setting that is kept and is not better, or a search on 300 labels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

import salience
from criteria_mixture import juror
from planted import Images, _augmented, _scaled, digits, planted
from salience.config import SelectConfig
from salience.decide.tuning import tune_select

BATCH, WRONG = 64, 0.1


class Runs:
    """Makes short runs; counts them."""

    def __init__(self, images: Images, samples: int, epochs: int, seed: int) -> None:
        self.x, self.epochs, self.made = _scaled(images.x[:samples], images.x), epochs, 0
        self.y = torch.from_numpy(planted(images, "symmetric", WRONG, seed)[:samples])
        rest = np.concatenate((images.x[samples:], images.rest_x))
        self.val_x, self.val_y = _scaled(rest, images.x), np.concatenate((images.y[samples:], images.rest_y))

    def __call__(self, select: SelectConfig, seed: int) -> tuple[np.ndarray, float]:
        self.made += 1
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = juror(self.x.shape[1])
        selector = salience.Selector(
            len(self.y), batch_size=BATCH, epochs=self.epochs, labels=self.y, seed=seed, select=select
        )
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
        generator = torch.Generator().manual_seed(seed)
        for _ in range(self.epochs):
            for ids, _ in selector:
                done = selector.progress
                for group in optimizer.param_groups:
                    group["lr"] = 0.2 * min(done / 0.2 + 0.02, max(0.0, (1 - done) / 0.8))
                logits = model(_augmented(self.x[ids], generator))
                loss = selector.loss(F.cross_entropy(logits, self.y[ids], reduction="none"), logits, self.y[ids])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        model.eval()
        with torch.no_grad():
            guess = torch.cat([model(part).argmax(1) for part in self.val_x.split(1000)]).numpy()
        return (guess == self.val_y).astype(np.float64), selector.visits / 1e4


def measure(*, quick: bool, seed: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    samples, epochs, trials = (1500, 8, 4) if quick else (3000, 12, 10)
    images = digits(samples + (2000 if quick else 8000), seed)
    runs = Runs(images, samples, epochs, seed)
    found = tune_select(runs, "epsilon_greedy", trials=trials, min_gain=0.03, seed=seed, start=0.1)
    small = Runs(images, samples, epochs, seed)
    small.val_x, small.val_y = small.val_x[:300], small.val_y[:300]
    refused = tune_select(small, "epsilon_greedy", trials=trials, seed=seed, start=0.1)
    print(f"  {found.reason}\n  {refused.reason}", flush=True)
    for one in found.tried:
        print(f"  {dict(one.settings)}: {one.metric:.3f} for {1e4 * one.seconds:,.0f} visits", flush=True)
    return {
        "tuned_vs_default": round(0.0 if found.kept_default else found.gain, 4),
        "tuned_found": [round(found.gain, 4), *(round(end, 4) for end in found.interval)],
        "tuned_settings": {name: round(value, 3) for name, value in found.settings.items()},
        "tuned_runs": runs.made,
        "tuned_small_set": [small.made, refused.kept_default],
    }
