"""Ranks: exact, fair to ties, unknown highest, and nearly the same by histogram."""

from __future__ import annotations

import numpy as np

from salience.select import ranks
from salience.select.ranks import rank_normalise


def test_ranks_are_mid_ranks_with_ties_sharing_theirs():
    got = rank_normalise(np.array([3.0, -1.0, 3.0, 0.0], dtype=np.float32))
    np.testing.assert_allclose(got, [0.75, 0.125, 0.75, 0.375])


def test_unknown_ranks_highest_and_negative_zero_equals_zero():
    got = rank_normalise(np.array([np.inf, np.nan, -0.0, 0.0, -np.inf, -np.nan], dtype=np.float32))
    assert got[1] == got[5] > got[0] > got[2] == got[3] > got[4]


def test_the_order_is_that_of_a_sort():
    score = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
    got = rank_normalise(score)
    np.testing.assert_array_equal(np.argsort(got), np.argsort(score))
    assert abs(got.mean() - 0.5) < 1e-6


def test_histogram_ranks_are_near_the_exact_ones_on_skewed_scores():
    rng = np.random.default_rng(0)
    for score in (rng.exponential(size=300_000), rng.standard_normal(300_000) ** 9, np.full(300_000, 2.0)):
        keys = ranks.ordered_keys(score.astype(np.float32))
        exact, rough = ranks._exact(keys), ranks._by_histogram(keys)
        assert np.abs(exact - rough).max() < 1e-3
