"""Planning of views: as many visits, spread, by turns, each sample counted once."""

from __future__ import annotations

import numpy as np
import pytest

from salience.treat.echo import echo, echo_slots, views_needed, views_of

N, BATCH, APART = 4000, 20, 40


def arranged(views, turn=None, seed=0):
    turn = np.full(len(views), -1, np.int32) if turn is None else turn
    return echo(views, turn, apart=APART, rng=np.random.default_rng(seed))


@pytest.mark.parametrize("mean", [1, 2, 3, 4])
def test_views_fill_the_plan_and_are_numbered(mean):
    found = arranged(np.full(N, mean, np.int64))
    assert len(found.position) == N
    samples, times = np.unique(found.position, return_counts=True)
    assert len(samples) == -(-N // mean)
    for sample, time in zip(samples, times, strict=True):
        at = found.position == sample
        assert (np.sort(found.view[at]) == np.arange(time)).all()
        assert (found.count[at] == time).all()
        assert (np.diff(found.view[at].astype(int)) > 0).all(), "views must come in order"


@pytest.mark.parametrize("importance", [None, np.random.default_rng(2).random(N)])
@pytest.mark.parametrize("seed", range(3))
def test_two_views_are_two_batches_apart_at_least(importance, seed):
    found = arranged(views_of(importance, np.zeros(N, np.int64), 3, N), seed=seed)
    for sample in np.unique(found.position):
        batches = np.flatnonzero(found.position == sample) // BATCH
        assert (np.diff(batches) >= 2).all()


def test_samples_take_turns():
    turn, rng, read = np.full(N, -1, np.int32), np.random.default_rng(0), np.zeros(N, int)
    for window in range(6):
        ids = rng.permutation(N)
        found = echo(np.full(N, 2, np.int64), turn[ids], apart=APART, rng=rng)
        chosen = np.unique(ids[found.position])
        turn[chosen] = window
        read[chosen] += 1
    assert (read == 3).all()


def test_important_samples_and_those_whose_copies_were_dropped_have_more_views():
    importance, extra = np.linspace(0, 1, 9), np.array([0] * 8 + [2])
    assert views_of(importance, extra, 2, 9).tolist() == [1, 1, 1, 2, 2, 2, 3, 3, 5]
    assert views_of(importance, extra, 1, 9).tolist() == [1] * 9
    assert views_of(np.full(9, 0.2), np.zeros(9, np.int64), 2, 9).tolist() == [2] * 9


@pytest.mark.parametrize(
    ("saved", "rest", "compute", "views"),
    [
        (1.0, 0.1, 2.0, 1),
        (1.0, 0.0, 0.5, 2),
        (1.0, 0.1, 0.5, 3),
        (1.0, 0.0, 0.01, 4),
        (1.0, 2.0, 0.5, 4),
        (0.0, 2.0, 0.5, 1),
    ],
)
def test_as_many_views_as_input_needs_to_keep_up(saved, rest, compute, views):
    assert views_needed(saved, rest, compute) == views


def test_a_slot_is_not_given_to_another_sample_before_the_last_view():
    found = arranged(np.full(N, 3, np.int64))
    slot = echo_slots(found.position, found.view, 1200)
    owner: dict[int, int] = {}
    for sample, view, place in zip(found.position, found.view, slot, strict=True):
        if view == 0:
            owner[place] = sample
        assert owner[place] == sample


def test_a_short_plan_has_fewer_views_and_a_tiny_one_none():
    assert arranged(np.full(600, 4, np.int64)).count.max() == 1
    assert arranged(np.full(700, 4, np.int64)).count.max() == 2
    assert arranged(np.full(1, 4, np.int64)).position.tolist() == [0]
