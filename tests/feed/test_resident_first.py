"""What is in the cache comes first in every window that selects, and nothing else about its plan changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import salience

N, B, EPOCHS = 300, 10, 5
RULES: dict[str, dict[str, Any]] = {
    "default": {"select": "default"},
    "unbiased weights": {"select": {"preset": "uniform", "sampler": "probability", "scores": ["ema_loss"]}},
    "a budget of its own": {"select": "infobatch"},
    "everything in turns": {"select": "fine_pruning"},
    "static": {"select": {"preset": "epsilon_greedy", "mode": "static", "after": 1}},
    "epochs of equal length": {"select": "epsilon_greedy", "even": True},
    "pieces of an epoch": {"select": "uniform", "window": 150},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "set"
    for i in range(N):
        file = folder / f"c{i % 3}" / f"{i:04}.bin"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(i.to_bytes(2, "little") + bytes(500))
    return folder


def windows_of(folder: Path, cached: bool, **rule: Any) -> tuple[list[list[tuple[int, float]]], list[tuple[int, int]]]:
    """Ids and weights of every window in order; how many of its first tenth were resident when it was planned, and how many
    could have been."""
    source = salience.Source(folder, decode=lambda data: int.from_bytes(data[:2], "little"))
    cache = int(0.3 * source.sizes.sum()) if cached else None
    loader = salience.Loader(source, batch_size=B, epochs=EPOCHS, seed=2, with_ids=True, cache=cache, **rule)
    plans: list[list[tuple[int, float]]] = []
    first: list[tuple[int, int]] = []
    while loader.progress < 1:
        stock = loader._run.feeding.stock()
        for number, (ids, (_, labels)) in enumerate(loader):
            if not number:
                plan = loader.plan
                plans.append(list(zip(plan.ids.tolist(), plan.weights.tolist(), strict=True)))
                if stock is not None:
                    tenth, resident = len(plan) // 10, stock.resident[plan.ids]
                    first.append((int(resident[:tenth].sum()), min(tenth, int(resident[:-B].sum()))))
            logits = torch.nn.functional.one_hot(labels, 3) * (ids * 7919 % 101).float()[:, None] / 25
            loader.loss(torch.nn.functional.cross_entropy(logits, labels, reduction="none"), logits, labels)
    return plans, first


@pytest.mark.parametrize("name", RULES)
def test_a_cache_changes_the_order_of_a_plan_and_nothing_else(folder, name):
    with_it, first = windows_of(folder, True, **RULES[name])
    without, _ = windows_of(folder, False, **RULES[name])
    assert [sorted(plan) for plan in with_it] == [sorted(plan) for plan in without]
    assert with_it != without
    assert first[0] == (0, 0), "the cache is empty"
    assert all(came == could > 0 for came, could in first[1:])


def test_observing_keeps_the_order_of_a_plain_shuffle_whatever_is_resident(folder):
    assert windows_of(folder, True)[0] == windows_of(folder, False)[0]
