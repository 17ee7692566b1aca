"""Every plug-in and preset where no rule was tuned: ties, one class, rare and many classes, classes sorted on disk."""

from __future__ import annotations

import numpy as np
import pytest

from salience.config import SelectConfig, Use
from salience.ledger import Ledger
from salience.registry import catalogue, kinds
from salience.select import PRESETS, Pipeline, preset
from salience.select.reference import reference_of

N, WINDOWS = 2000, 10
EVERY = [(o.kind, o.name) for kind in kinds() for o in catalogue(kind)]
LABELS = {
    "sorted": np.repeat(np.arange(10), N // 10),
    "in turn": np.arange(N) % 10,
    "one class": np.zeros(N, dtype=np.int64),
    "rare class": np.where(np.arange(N) < N - 20, np.arange(N) * 3 // N, 3),
    "a class each": np.arange(N),
    "numbers far apart": np.arange(N) % 10 * 200_000_000,
    "unknown": np.full(N, -1),
}


def history(label: np.ndarray, losses: str) -> Ledger:
    """A ledger of four windows in which every sample was learnt equally well, or whose losses differ."""
    rng, ledger = np.random.default_rng(0), Ledger(N)
    named = np.where(label < 2**24, np.maximum(label, 0), 0)  # what logits name
    for window in range(4):
        p = np.full(N, 0.999) if losses == "equal" else np.clip(rng.beta(4, 1, N), 0.01, 0.999)
        rows = {
            "loss": -np.log(p), "target": named, "margin": np.log(p / (1 - p)), "el2n": 1.2 * (1 - p), "entropy": 1 - p,
            "confidence": p, "guess": named, "other": named + 1, "guess_p": p, "grad_norm": 1 - p,
            "p_0": p, "p_1": 1 - p, "p_2": 0 * p, "p_3": 0 * p,
            **{f"class_{k}": named + k for k in range(4)},
        }  # fmt: skip
        ledger.record(np.arange(N), {name: np.asarray(row, np.float32) for name, row in rows.items()}, window=window)
    ledger.label[:] = label
    return ledger


def plan(config: SelectConfig, ledger: Ledger, window: int):
    pipeline = Pipeline(config, reference=reference_of(np.ones(N), N), strict=True)
    made = pipeline.plan(ledger, window=window, windows=WINDOWS, batch_size=20, seed=window)
    assert len(made) > 0
    assert np.isfinite(made.weights).all()
    return made


@pytest.mark.parametrize("losses", ["equal", "different"])
@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize(("kind", "name"), EVERY)
def test_a_plug_in_plans_where_it_was_not_tuned(kind, name, labels, losses):
    used = Use(name=name)
    config = SelectConfig(
        filters=(used,) if kind == "filters" else (), scores=(used,) if kind == "scores" else (Use(name="ema_loss"),),
        sampler=used if kind == "samplers" else Use(name="ratio"),
        keep=used if kind == "curves" else Use(name="constant"),
    )  # fmt: skip
    made = plan(config, history(LABELS[labels], losses), 5)
    assert len(np.unique(made.ids)) == len(made)


@pytest.mark.parametrize("labels", ["sorted", "in turn"])
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_visits_every_class_alike_under_ties(name, labels):
    """Of ten equal classes each is visited in proportion, to within five standard deviations of a random draw."""
    label = LABELS[labels]
    visits = sum(
        np.bincount(label[plan(preset(name), history(label, "equal"), window).ids], minlength=10)
        for window in range(4, 8)
    )
    share = visits.sum() / (4 * N)
    assert np.abs(visits - visits.mean()).max() <= 5 * np.sqrt(4 * (N / 10) * max(share * (1 - share), 0.01)) + 1
