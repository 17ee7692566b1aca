"""A ledger over many nodes: every node chooses among its own rows, and together they take what one node would."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from salience.select.parts import BITS, find_cut, importance_of_part, quota, take
from salience.select.ranks import rank_normalise


def on_nodes(work, parts):
    """What `work(part, rank, add)` returns on every node; `add` is an all-reduce between threads."""
    world = len(parts)
    barrier, posted, results = threading.Barrier(world), [None] * world, [None] * world

    def node(rank):
        def add(array):
            posted[rank] = array
            barrier.wait()
            total = np.sum(posted, axis=0)
            barrier.wait()
            return total

        results[rank] = work(parts[rank], rank, add)

    threads = [threading.Thread(target=node, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def chosen(score, budget, world, *, rounds=3, seed=0):
    """Rows taken, of all samples, and the bytes each node sent; node r has the r-th part of the rows."""
    parts = np.array_split(score, world)
    starts = np.cumsum([0, *map(len, parts)])

    def work(part, rank, add):
        cut = find_cut(part, budget, add, rounds=rounds)
        rows, sent = take(part, cut, rank, add, world, np.random.default_rng((seed, rank)))
        return starts[rank] + rows, cut.sent + sent

    results = on_nodes(work, parts)
    return np.concatenate([rows for rows, _ in results]), results[0][1]


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("budget", [1, 777, 5_000, 9_999])
def test_the_plan_is_that_of_a_single_node(world, budget):
    score = np.random.default_rng(1).lognormal(size=10_000).astype(np.float32) - 1
    rows, sent = chosen(score, budget, world)
    np.testing.assert_array_equal(np.sort(rows), np.sort(np.argsort(-score, kind="stable")[:budget]))
    assert sent <= 70_000, "histograms travel, whatever the number of samples"


@pytest.mark.parametrize("rounds", [1, 2])
def test_with_fewer_rounds_it_is_equal_within_the_resolution_of_the_histogram(rounds):
    score = np.random.default_rng(2).random(20_000).astype(np.float32)
    rows, _ = chosen(score, 6_000, 4, rounds=rounds)
    assert len(rows) == 6_000
    cut = np.sort(score)[-6_000]
    assert score[rows].min() >= cut * (1 - 2.0 ** -(sum(BITS[:rounds]) - 9)), "sign and exponent take nine bits"


@pytest.mark.parametrize(
    "score",
    [
        np.zeros(1_000),
        np.full(1_000, np.nan),
        np.repeat([0.0, 1.0], 500),
        np.where(np.arange(1_000) % 3, np.nan, -1.0),
        np.concatenate([np.zeros(990), np.ones(10)]),
        -np.arange(1_000.0),
        np.array([np.inf, -np.inf, -0.0, 0.0] * 250),
    ],
)  # fmt: skip
def test_ties_and_unknown_scores_fill_the_budget_exactly(score):
    score = score.astype(np.float32)
    rows, _ = chosen(score, 300, 4)
    assert len(np.unique(rows)) == 300
    ordered = np.sort(np.where(np.isnan(score), np.inf, score))[::-1][:300]
    np.testing.assert_array_equal(np.sort(np.where(np.isnan(score[rows]), np.inf, score[rows]))[::-1], ordered)


def test_equal_scores_are_taken_from_every_node_alike():
    rows, _ = chosen(np.zeros(4_000, dtype=np.float32), 1_000, 4)
    np.testing.assert_array_equal(np.bincount(rows // 1_000), [250] * 4)


def test_a_budget_above_everything_takes_everything():
    rows, _ = chosen(np.arange(100, dtype=np.float32), 500, 3)
    np.testing.assert_array_equal(np.sort(rows), np.arange(100))


def test_a_node_without_rows_takes_part_with_nothing():
    parts = [np.arange(50, dtype=np.float32), np.empty(0, dtype=np.float32)]

    def work(part, rank, add):
        cut = find_cut(part, 20, add)
        return cut.taken, quota(add(np.eye(2, dtype=np.int64)[rank] * len(part)), 20)

    (taken, shares), _ = on_nodes(work, parts)
    assert taken == 20
    np.testing.assert_array_equal(shares, [20, 0])


def test_importance_of_a_part_is_its_rank_among_all_nodes():
    score = np.random.default_rng(3).normal(size=8_000).astype(np.float32)
    found = np.concatenate(
        on_nodes(lambda part, rank, add: importance_of_part(part, add, bits=16), np.array_split(score, 4))
    )
    np.testing.assert_allclose(found, rank_normalise(score), atol=0.01)


def test_a_quota_adds_up_and_gives_nobody_more_than_there_is():
    rng = np.random.default_rng(4)
    for _ in range(200):
        counts = rng.integers(0, 9, 5)
        total = int(rng.integers(0, counts.sum() + 1))
        parts = quota(counts, total)
        assert parts.sum() == (total if counts.sum() else 0)
        assert (parts <= counts).all()
        assert (parts >= 0).all()
