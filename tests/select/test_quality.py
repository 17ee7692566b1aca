"""Quality as a plan: low first, high last, by the user's own column; composable with the other rules."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import salience
from salience.errors import ConfigError, StateError
from salience.ledger import Ledger
from salience.select import Clock, View
from salience.select.quality import quality

N = 200


def view(column, window, windows=10):
    return View(
        Ledger(len(column)), Clock(window=window, windows=windows), quality=np.asarray(column, dtype=np.float32)
    )


def kept(column, window, **options):
    return np.flatnonzero(quality(view(column, window), **options).keep).tolist()


def test_everything_comes_first_and_the_best_share_last():
    column = [5, 1, 4, 2, 3, 0]
    assert kept(column, 0) == list(range(6))
    assert kept(column, 4, last=0.5) == list(range(6))
    assert kept(column, 5, last=0.5) == [0, 2, 4]
    assert kept(column, 9, last=1 / 6) == [0]


def test_the_lowest_come_first_and_more_as_time_goes_by():
    column = np.arange(10)
    shares = [len(kept(column, window, first=0.3, switch=1, last=1)) for window in range(10)]
    assert shares[0] == 3
    assert shares == sorted(shares)
    assert kept(column, 0, first=0.3, switch=1) == [0, 1, 2]
    assert shares[-1] >= 9


def test_two_stages_of_weak_and_clean_labels():
    column = np.array([0] * 80 + [1] * 20)
    assert kept(column, 0, first=0.8, last=0.2)[:80] == list(range(80))
    assert kept(column, 5, first=0.8, last=0.2) == list(range(80, 100))


def test_equal_quality_is_treated_alike_and_unknown_quality_stays():
    assert kept([1] * 8, 9, last=0.25) == list(range(8))
    assert kept([np.nan, 0, 1, 2, 3], 9, last=0.25) == [0, 4]


@pytest.mark.parametrize("name", ["switch", "first", "last"])
@pytest.mark.parametrize("value", [0, 1.5, -1])
def test_shares_that_are_none_are_refused(name, value):
    with pytest.raises(ConfigError, match=f"quality: {name} is {value}"):
        quality(view([1, 2], 0), **{name: value})


def passes(loader, epochs):
    visits = []
    for _ in range(epochs):
        ids = []
        for batch, x in loader:
            loader.loss(x[0].float() % 7, torch.randn(len(batch), 4), x[1])
            ids += batch.tolist()
        visits.append(ids)
    return visits


def make(column, select=None, **options):
    data = TensorDataset(torch.arange(N), torch.arange(N) % 4)
    return salience.Loader(data, 10, epochs=10, select=select, quality=column, with_ids=True, **options)


def test_a_loader_has_all_samples_first_and_the_better_half_last():
    column = np.random.default_rng(0).permutation(N)
    visits = passes(make(column), 10)
    assert all(len(set(ids)) == N for ids in visits[:5])
    assert all(set(ids) == set(np.flatnonzero(column >= N // 2)) for ids in visits[5:-1])


@pytest.mark.parametrize("select", ["default", "uniform", "infobatch", "window"])
def test_other_rules_choose_among_those_whose_turn_it_is(select):
    column = np.arange(N)
    visits = passes(make(column, {"preset": select, "filters": [{"name": "quality", "last": 0.3}]}), 10)
    assert all(min(ids) >= 0.7 * N for ids in visits[5:])
    assert min(min(ids) for ids in visits[:5]) < 0.1 * N


def test_short_sequences_come_first():
    lengths = np.random.default_rng(1).integers(1, 60, N)
    short_first = {"preset": "uniform", "keep": 1.0, "filters": [{"name": "quality", "switch": 1.0, "first": 0.2}]}
    visits = passes(make(lengths, short_first), 10)
    longest = [lengths[ids].max() for ids in visits]
    assert longest[0] < 20
    assert longest == sorted(longest)


def test_a_run_with_quality_is_resumed_exactly():
    column = np.arange(N)
    whole, first, seen = passes(make(column, "default"), 10), make(column, "default"), []
    for _ in range(6):
        seen += passes(first, 1)
    second = make(column, "default")
    second.load_state_dict(first.state_dict())
    assert seen + passes(second, 4) == whole
    with pytest.raises(StateError, match="same quality="):
        make(column + 1, "default").load_state_dict(first.state_dict())


@pytest.mark.parametrize(
    ("column", "said"),
    [
        ([1, 2], r"shape \(2,\); pass one finite number per sample"),
        (["a"] * N, "cannot be read as numbers"),
        ([np.inf] * N, "one finite number per sample"),
        ([np.nan] * N, "NaN for every sample"),
        ("grade", "has no such column"),
    ],
)  # fmt: skip
def test_bad_columns_are_one_sentence(column, said):
    with pytest.raises(ConfigError, match=said):
        make(column)


def test_the_filter_without_a_column_says_what_is_missing():
    with pytest.raises(ConfigError, match="pass quality=, an array or a column"):
        make(None, {"filters": ["quality"]})
