"""Ties: where scores are equal, chance decides and not the order on disk, and it decides the same way for the same seed."""

from __future__ import annotations

import numpy as np
import pytest

from salience.config import Fetching, SelectConfig, Use
from salience.ledger import Ledger
from salience.select import Candidates, Clock, Pipeline, View, preset
from salience.select.contradictions import evidence, surest
from salience.select.drawing import top
from salience.select.fetching import Stock, swap
from salience.select.filters import coarse, tail
from salience.select.reference import reference_of
from salience.select.samplers import hide, ratio, slide

N, CLASSES = 4000, 10
SORTED = np.repeat(np.arange(CLASSES), N // CLASSES)
"""Classes as folders lie on disk."""


def learnt() -> Ledger:
    """Every sample was learnt equally well: all scores are equal."""
    ledger = Ledger(N)
    rows = {
        "loss": 0, "target": SORTED, "margin": 20, "el2n": 0, "entropy": 0, "confidence": 1, "guess": SORTED,
        "other": (SORTED + 1) % CLASSES, "guess_p": 1, "grad_norm": 0,
    }  # fmt: skip
    rows = {name: np.broadcast_to(np.float32(row), N).copy() for name, row in rows.items()}
    for window in range(4):
        ledger.record(np.arange(N), rows, window=window)
    ledger.label[:] = SORTED
    return ledger


def flat(keep: float = 0.5) -> Candidates:
    view = View(learnt(), Clock(window=5, windows=10, keep=keep))
    return Candidates(
        view=view, ids=np.arange(N), importance=np.full(N, 0.5, np.float32), raw_of_all=np.zeros(N, np.float32)
    )


def assert_even(ids, total: int) -> None:
    """Every class has its share of `total`, to within five standard deviations of a draw without replacement."""
    assert len(ids) == total
    share = total / N
    spread = np.sqrt(N / CLASSES * share * (1 - share))
    assert np.abs(np.bincount(SORTED[ids], minlength=CLASSES) - total / CLASSES).max() < 5 * spread + 1


def test_the_largest_are_exact_and_ties_at_the_edge_are_left_to_chance():
    values = np.array([3, 1, 1, 1, 1, 5, 0], dtype=np.float32)
    hits = np.zeros(7)
    for seed in range(400):
        mask = top(values, 4, np.random.default_rng(seed))
        assert mask.sum() == 4
        hits += mask
    assert hits[[0, 5, 6]].tolist() == [400, 400, 0]
    assert np.abs(hits[1:5] - 200).max() < 5 * 10


def test_without_ties_no_random_number_is_used():
    rng = np.random.default_rng(0)
    before = rng.bit_generator.state
    top(np.arange(10, dtype=np.float32), 4, rng)
    assert rng.bit_generator.state == before


@pytest.mark.parametrize("sampler", [ratio, hide, slide])
def test_a_sampler_gives_every_class_its_share_where_scores_are_equal(sampler):
    rng = np.random.default_rng(0)
    have = flat()
    assert_even(sampler(have, 1200, rng).positions, 1200)


@pytest.mark.parametrize(
    "name", ["default", "el2n", "grand", "forgetting", "epsilon_greedy", "ucb", "window", "kakurenbo"]
)
def test_a_preset_visits_every_class_alike_where_all_is_learnt(name):
    pipeline = Pipeline(preset(name), strict=True)
    visits = np.zeros(N)
    for window in range(4, 8):
        plan = pipeline.plan(learnt(), window=window, windows=10, batch_size=100, seed=window)
        visits[plan.ids] += 1
    by_class = visits.reshape(CLASSES, -1).sum(1)
    assert by_class.max() < 1.25 * by_class.min()


def test_the_tail_leaves_out_exactly_its_share_of_equal_losses_at_random():
    verdict = tail(View(learnt(), Clock(window=5, windows=10, keep=0.5)), share=0.1)
    assert_even(np.flatnonzero(~verdict.keep), 400)
    other = tail(View(learnt(), Clock(window=5, windows=10, keep=0.5), seed=1), share=0.1)
    assert (verdict.keep != other.keep).any()


def test_coarse_leaves_out_any_of_equal_ones_and_the_same_ones_in_every_window():
    views = [View(learnt(), Clock(window=w, windows=10), reference_of(np.ones(N), N)) for w in (3, 4)]
    first, second = (coarse(view, drop=0.25).keep for view in views)
    np.testing.assert_array_equal(first, second)
    assert np.bincount(SORTED[~first]).tolist() == [100] * CLASSES
    halves = (~first).reshape(CLASSES, 2, -1).sum(axis=(0, 2))
    assert abs(halves[0] - halves[1]) < 5 * np.sqrt(N * 0.25 * 0.75)


def test_an_exchange_prefers_no_class_among_samples_that_waited_equally_long():
    rng = np.random.default_rng(0)
    picked = rng.permutation(N)[: N // 2]
    stock = Stock(resident=np.zeros(N, bool), shard=np.full(N, -1, np.int32), offset=np.zeros(N, np.int64))
    age = np.where(np.isin(np.arange(N), picked), 1, 20)
    found = swap(
        picked[:400], np.zeros(N, np.float32), stock, label=SORTED, age=age, forced=None, allowed=None,
        how=Fetching(top=0.0), rng=rng,
    )  # fmt: skip
    assert_even(found.taken, 400)


def test_the_surest_of_equal_predictions_are_not_those_of_the_first_classes():
    """One label in five is wrong and every prediction has p = 1: the rate found is one in five, however classes are sorted."""
    rng = np.random.default_rng(0)
    true = np.where(rng.random(N) < 0.2, (SORTED + rng.integers(1, CLASSES, N)) % CLASSES, SORTED)
    vote = np.zeros((N, 4), dtype=np.int32)
    vote[:, 0] = true
    vote_p = np.zeros((N, 4), dtype=np.float16)
    vote_p[:, 0] = 1
    found = evidence(SORTED.astype(np.int32), vote, vote_p)
    assert abs(found.rate - 0.2) < 4 * found.error
    assert surest(true.astype(np.int64), vote_p[:, 0]).sum() == found.sure


def test_one_class_is_enough():
    ledger = learnt()
    ledger.label[:] = 0
    config = SelectConfig(
        filters=(Use(name="class_floor"), Use(name="tail")), scores=(Use(name="el2n"),), sampler=Use(name="ratio"),
        keep=Use(name="constant"),
    )  # fmt: skip
    assert len(Pipeline(config, strict=True).plan(ledger, window=5, windows=10, batch_size=100, seed=0)) == N // 2
