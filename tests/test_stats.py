"""Student's t against the tables, and the paired test against what it promises."""

from __future__ import annotations

import math

import numpy as np
import pytest

from salience.errors import ConfigError
from salience.stats import paired_interval, t_quantile


@pytest.mark.parametrize(
    ("level", "dof", "known"),
    [
        (0.95, 1, 12.7062047), (0.95, 2, 4.3026527), (0.95, 3, 3.1824463), (0.95, 4, 2.7764451), (0.95, 9, 2.2621572),
        (0.95, 10, 2.2281389), (0.95, 30, 2.0422725), (0.95, 1000, 1.9623391),
        (0.90, 1, 6.3137515), (0.90, 2, 2.9199856), (0.90, 5, 2.0150484),
        (0.99, 4, 4.6040949), (0.99, 29, 2.7563859), (0.5, 7, 0.7111418),
    ],
)  # fmt: skip
def test_students_t_is_that_of_the_tables(level, dof, known):
    assert t_quantile(level, dof) == pytest.approx(known, rel=1e-7)


def test_many_degrees_of_freedom_come_near_the_normal_distribution():
    assert t_quantile(0.95, 100_001) == pytest.approx(1.959964, rel=2e-5)
    assert t_quantile(0, 5) == pytest.approx(0, abs=1e-12)


def test_the_interval_is_the_textbook_paired_t_test():
    found = paired_interval([1.0, 2.0, 3.0])
    assert found is not None
    assert (found.mean, found.low, found.high) == pytest.approx((2, 2 - 2.4841377, 2 + 2.4841377), rel=1e-6)
    assert found.pairs == 3
    assert found.separated(-1)
    assert not found.separated(0)


def test_one_difference_bounds_nothing_and_none_has_no_mean():
    found = paired_interval([1.5])
    assert found is not None
    assert (found.mean, found.low, found.high) == (1.5, None, None)
    assert not found.separated(0)
    assert paired_interval([]) is None


@pytest.mark.parametrize("level", [0.8, 0.95])
def test_the_interval_covers_the_truth_as_often_as_it_says(level):
    rng = np.random.default_rng(0)
    count = 4000
    covered = sum(not paired_interval(row.tolist(), level).separated(0.3) for row in rng.normal(0.3, 2, (count, 5)))
    assert abs(covered / count - level) < 3.5 * math.sqrt(level * (1 - level) / count)


def test_what_is_no_probability_or_degree_of_freedom_is_refused():
    with pytest.raises(ConfigError, match="level is 1"):
        t_quantile(1, 3)
    with pytest.raises(ConfigError, match="0 degrees of freedom"):
        t_quantile(0.9, 0)
