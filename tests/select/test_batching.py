"""Whole batches: no selecting window has a short one, on any number of ranks, resumed or not; every sample has its turn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import salience
from salience.ledger import Ledger
from salience.select import PRESETS, Pipeline, preset
from salience.select.batching import Batching, filled, trimmed

OWN_REFERENCE = {"rho", "proxy", "coarse_to_fine"}


def trained(
    select: object, n: int, batch: int, epochs: int = 10, **options: object
) -> tuple[list[list[int]], np.ndarray]:
    """Batch sizes of every window and the visits of every sample, of a model that learns nothing."""
    selector = salience.Selector(n, batch_size=batch, epochs=epochs, select=select, **options)
    y = torch.arange(n) % 3
    g = torch.Generator().manual_seed(0)
    sizes: list[list[int]] = []
    visits = np.zeros(n, dtype=int)
    for _ in range(epochs):
        sizes.append([])
        for ids, _ in selector:
            logits = torch.randn(len(ids), 3, generator=g) + 2 * F.one_hot(y[ids], 3)
            selector.loss(F.cross_entropy(logits, y[ids], reduction="none"), logits, y[ids])
            sizes[-1].append(len(ids))
            np.add.at(visits, ids.numpy(), 1)
    return sizes, visits


@pytest.mark.parametrize("name", sorted(set(PRESETS) - OWN_REFERENCE - {"grand", "selective_backprop"}))
def test_no_selecting_window_has_a_short_batch(name):
    sizes, visits = trained(name, 333, 32, 20)
    assert {size for window in sizes for size in window} == {32}
    assert (visits > 0).all()


@pytest.mark.parametrize(("n", "batch"), [(3000, 128), (150, 128), (129, 128), (128, 128), (256, 128), (7, 2)])
def test_the_last_window_visits_every_sample_and_none_waits_longer_than_one_full_window(n, batch):
    select = salience.SelectConfig(keep=salience.Use(name="constant", options={"share": 1.0}))
    selector = salience.Selector(n, batch_size=batch, epochs=4, select=select)
    before: set[int] = set(range(n))
    for epoch in range(4):
        seen: set[int] = set()
        for ids, _ in selector:
            assert len(ids) == batch
            assert len(set(ids.tolist())) == batch, "nothing twice in a batch"
            selector.loss(torch.zeros(len(ids)))
            seen |= set(ids.tolist())
        if n >= 2 * batch:
            assert set(range(n)) - before <= seen, "what was left comes first"
        before = seen
        assert epoch < 3 or seen == set(range(n))


def test_fewer_samples_than_a_batch_are_one_batch_of_all():
    sizes, visits = trained("default", 20, 32, 5)
    assert sizes == [[20]] * 5
    assert (visits == 5).all()


def test_with_drop_last_the_last_window_is_rounded_down():
    sizes, _ = trained("default", 150, 64, drop_last=True)
    assert sizes[-1] == [64, 64]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_rank_has_equal_parts_of_equal_batches(world):
    ledger = Ledger(1000)
    for window in range(10):
        plan = Pipeline(preset("default")).plan(
            ledger, window=window, windows=10, batch_size=24 * world, world=world, seed=0
        )
        for rank in range(world):
            shard = plan.shard(rank, world)
            assert set((shard.stop - shard.start).tolist()) == {24}


def test_constant_steps_shrink_the_batch_and_keep_it_equal():
    batching = Batching(size=100, constant=True)
    for granted in (137, 250, 410, 999):
        batch = batching.batch(granted, 1000)
        assert batching.visits(granted, 1000, last=False) == batch * batching.steps(granted, 1000, last=False)
        assert abs(batching.steps(granted, 1000, last=False) - 10) <= 1
    sizes, _ = trained({"preset": "uniform", "steps": "constant"}, 1000, 100, 4)
    assert all(len(set(window)) == 1 for window in sizes)


def test_a_resumed_window_has_the_same_whole_batches():
    def run(stop: int | None) -> list[list[int]]:
        selector = salience.Selector(333, batch_size=32, epochs=4, select="default", seed=3)
        batches: list[list[int]] = []
        while selector.epoch < 4:
            for ids, _ in selector:
                selector.loss(ids.float() / 333)
                batches.append(ids.tolist())
                if len(batches) == stop:
                    state = selector.state_dict()
                    selector = salience.Selector(333, batch_size=32, epochs=4, select="default", seed=3)
                    selector.load_state_dict(state)
                    break
        return batches

    whole = run(None)
    assert run(14) == whole
    assert run(len(whole) - 1) == whole


def test_the_number_of_steps_is_known_and_true():
    for name in ("uniform", "el2n", "epsilon_greedy"):
        selector = salience.Selector(333, batch_size=32, epochs=6, select=name)
        wanted, steps, lengths = selector.total_steps, 0, 0
        for _ in range(6):
            lengths += len(selector)
            for ids, _ in selector:
                y = torch.zeros(len(ids), dtype=torch.int64)
                selector.loss(torch.rand(len(ids)), torch.randn(len(ids), 2), y)
                steps += 1
        assert (steps, lengths) == (wanted, wanted)


def test_trimming_spares_what_is_forced_and_what_waited():
    keep, waited = np.arange(103) < 40, (np.arange(103) >= 40) & (np.arange(103) < 100)
    stay = trimmed(10, keep, waited, np.random.default_rng(0))
    assert np.flatnonzero(~stay).tolist() == [100, 101, 102]
    assert trimmed(10, np.ones(7, dtype=bool), np.ones(7, dtype=bool), np.random.default_rng(0)).all()


def test_filling_repeats_samples_of_other_batches():
    ids, weights = filled(np.arange(23), np.arange(23, dtype=np.float32), 10, np.random.default_rng(0))
    assert len(ids) == 30
    np.testing.assert_array_equal(ids, weights.astype(int))
    assert set(ids[23:].tolist()) <= set(range(20))
    assert len(set(ids[20:].tolist())) == 10
