"""What a window says about the losses of its batches."""

from __future__ import annotations

import numpy as np
import torch

from salience.plan import VIEW_SHIFT, Plan
from salience.run.part import Batch
from salience.run.visits import MAX_BATCHES_AHEAD, Visits

BATCH = 4


def visits_of(ids: np.ndarray, **other: np.ndarray) -> Visits:
    ones = np.ones(len(ids), dtype=np.float32)
    given = {"weights": ones, "importance": ones.copy(), "level": np.zeros(len(ids), dtype=np.uint8), **other}
    plan = Plan(window=0, population=1000, batch_size=BATCH, drop_last=False, ids=ids, **given)
    return Visits(plan.shard(), set())


def delivered(visits: Visits, number: int, **more: object) -> Batch:
    batch = Batch(0, number, visits.shard.ids(number), **more)
    visits.deliver(batch)
    return batch


def test_a_batch_is_found_by_its_ids_however_long_ago_it_was_delivered():
    visits = visits_of(np.random.default_rng(0).permutation(1000)[:400])
    for number in range(2 * MAX_BATCHES_AHEAD):
        delivered(visits, number)
    for number in (0, MAX_BATCHES_AHEAD, 2 * MAX_BATCHES_AHEAD - 1):
        assert visits.find(visits.shard.ids(number)) == number


def test_ids_that_were_not_delivered_or_come_in_another_order_are_not_found():
    visits = visits_of(np.arange(40))
    delivered(visits, 0)
    assert visits.find(visits.shard.ids(1)) is None
    assert visits.find(visits.shard.ids(0)[::-1].copy()) is None


def test_of_several_views_of_a_sample_the_first_is_recorded():
    level = np.array([0, 0, 1 << VIEW_SHIFT, 0], dtype=np.uint8)
    visits = visits_of(np.array([5, 6, 5, 7]), level=level)
    assert not visits.no_doubles
    assert visits.first_views(delivered(visits, 0)).tolist() == [0, 1, 3]


def test_a_stand_in_is_not_recorded_and_weighs_nothing():
    visits = visits_of(np.arange(8))
    whole, broken = delivered(visits, 0), delivered(visits, 1, broken={2: "torn"})
    assert visits.first_views(whole) is None
    assert visits.weights(whole, torch.device("cpu")) is None
    assert visits.first_views(broken).tolist() == [0, 1, 3]
    assert visits.weights(broken, torch.device("cpu")).tolist() == [1, 1, 0, 1]


def test_weights_follow_the_rows_that_a_collate_function_kept():
    visits = visits_of(np.arange(4), weights=np.array([1, 2, 3, 4], dtype=np.float32))
    batch = delivered(visits, 0, rows=np.array([3, 1]))
    assert visits.weights(batch, torch.device("cpu")).tolist() == [4, 2]
