"""Planning of reuse: bounded, by lot, round-robin, within the slots there are."""

from __future__ import annotations

import numpy as np
import pytest

from salience.plan import FRESH, REUSED, STORED
from salience.treat.levels import ReuseTable, assign_slots, choose_split, draw_factors

N, R = 600, 4


def windows(factor, *, slots, count=24, picked=None, n=N):
    """Levels [count, n] (255 where not planned), and the table after each window."""
    table, rng = ReuseTable.empty(n), np.random.default_rng(0)
    levels, tables = np.full((count, n), 255, dtype=np.uint8), []
    for window in range(count):
        ids = rng.permutation(n) if picked is None else rng.permutation(n)[:picked]
        level, table = assign_slots(ids, factor[ids], table, slots=slots, window=window, r_max=R, rng=rng)
        levels[window, ids] = level
        tables.append(table)
    return levels, tables


def test_factors_have_the_stated_probabilities():
    r = draw_factors(100_000, R, np.random.default_rng(0))
    shares = np.bincount(r, minlength=R + 1) / len(r)
    assert shares == pytest.approx([0, 1 / 12, 1 / 12, 1 / 12, 9 / 12], abs=0.005)
    assert (draw_factors(100, 1, np.random.default_rng(0)) == 1).all()


def test_a_factor_of_one_is_always_fresh_and_one_of_r_max_one_time_in_r_max():
    factor = np.where(np.arange(N) < N // 2, R, 1).astype(np.uint8)
    levels, _ = windows(factor, slots=N)
    assert (levels[:, N // 2 :] == FRESH).all()
    assert (levels[4:, : N // 2] == STORED).mean() == pytest.approx(1 / R, abs=0.02)


def test_no_intermediate_is_used_more_than_r_max_times():
    levels, _ = windows(np.full(N, R, np.uint8), slots=N // 3, picked=N // 2, count=60)
    for levels_of_one in levels.T:
        run = 0
        for level in levels_of_one[levels_of_one < 255]:
            run = run + 1 if level == REUSED else 0
            assert run <= R - 1


def test_about_as_many_are_made_again_in_every_window():
    levels, _ = windows(np.full(N, R, np.uint8), slots=N)
    made = (levels[1:] != REUSED).mean(axis=1)
    assert 0.17 < made.min() <= made.max() < 0.34


def test_two_samples_never_share_a_slot_and_only_slots_there_are_are_used():
    _, tables = windows(np.full(N, R, np.uint8), slots=100, picked=300)
    for table in tables:
        taken = table.slot[table.slot >= 0]
        assert len(np.unique(taken)) == len(taken)
        assert taken.max() < 100


def test_what_is_reused_lies_in_the_slot_it_was_put_into_with_its_window():
    levels, tables = windows(np.full(N, R, np.uint8), slots=150, picked=300, count=40)
    content: dict[int, tuple[int, int]] = {}
    for window, (level, table) in enumerate(zip(levels, tables, strict=True)):
        for i in np.flatnonzero(level == REUSED):
            assert content[table.slot[i]] == (i, table.created[i])
        for i in np.flatnonzero(level == STORED):
            assert table.created[i] == window
            content[table.slot[i]] = (i, window)


def test_where_slots_are_short_samples_that_may_be_used_again_get_them_by_lot():
    factor = np.where(np.arange(N) < N // 2, R, 1).astype(np.uint8)
    levels, _ = windows(factor, slots=100, count=1)
    assert np.count_nonzero(levels[0, : N // 2] == STORED) == 100
    assert 20 < np.count_nonzero(levels[0, : N // 4] == STORED) < 80
    assert (levels[0, N // 2 :] == FRESH).all()


def test_samples_that_are_never_planned_again_give_their_slots_up():
    rng, factor = np.random.default_rng(0), np.full(100, R, np.uint8)
    old, new = np.arange(100), np.arange(100, 200)
    _, table = assign_slots(old, factor, ReuseTable.empty(N), slots=100, window=0, r_max=R, rng=rng)
    level, table = assign_slots(new, factor, table, slots=100, window=1, r_max=R, rng=rng)
    assert (level == FRESH).all()
    level, table = assign_slots(new, factor, table, slots=100, window=4 * R + 1, r_max=R, rng=rng)
    assert (level == STORED).all()


def test_the_table_given_is_not_changed():
    table = ReuseTable.empty(N)
    assign_slots(np.arange(N), np.full(N, R, np.uint8), table, slots=N, window=0, r_max=R, rng=np.random.default_rng(0))
    assert (table.slot == -1).all()
    assert not table.uses.any()


@pytest.mark.parametrize(
    ("memory", "allowed", "split"),
    [
        (10**9, [1, 1, 1], 2),  # room for all: the latest that is allowed
        (10**9, [1, 1, 0], 1),
        (10_000, [1, 1, 1], 1),  # 10 of the large, 100 of the small ones: 6 * 0.1 against 5 * 1
        (10_000, [1, 0, 1], 2),  # 1 * 0.5 against 6 * 0.1
        (10**9, [0, 0, 0], None),
        (99, [0, 1, 1], None),  # not even one fits
    ],
)
def test_the_split_saves_most_under_the_budget(memory, allowed, split):
    seconds, sizes = np.array([1.0, 4.0, 1.0, 9.0]), np.array([200, 100, 1000])
    mask = np.array(allowed, bool)
    assert choose_split(seconds, np.zeros(3), sizes, mask, memory=memory, n=100) == split


@pytest.mark.parametrize(("keeping", "split"), [([0, 0, 1.5], 1), ([2, 6, 7], None)])
def test_what_costs_more_to_keep_than_to_make_is_not_kept(keeping, split):
    seconds, sizes = np.array([1.0, 4.0, 1.0, 9.0]), np.array([200, 100, 1000])
    found = choose_split(seconds, np.array(keeping, float), sizes, np.ones(3, bool), memory=10**9, n=100)
    assert found == split
