"""Plans that are cheap to fetch: only the unimportant give way, class counts stay, nobody waits for ever."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import salience
from salience.config import Fetching, SelectConfig, Use
from salience.errors import ConfigError
from salience.ledger import Ledger
from salience.plan import Plan
from salience.select import Pipeline
from salience.select.fetching import Stock, refresh_set, resident_first, swap
from salience.select.view import Clock, View

N, CLASSES = 2000, 5


@pytest.fixture
def world():
    """Importance, labels, ages, and a cache that holds a tenth, among them unimportant samples."""
    rng = np.random.default_rng(0)
    importance = (rng.permutation(N) / (N - 1)).astype(np.float32)
    resident = np.zeros(N, dtype=bool)
    resident[rng.permutation(N)[:200]] = True
    stock = Stock(resident=resident, shard=(np.arange(N) // 500).astype(np.int32), offset=np.arange(N) % 500 * 1000)
    return importance, rng.integers(0, CLASSES, N), rng.integers(1, 6, N), stock, rng


def exchanged(world, ids, how, *, forced=None, allowed=None, stock=None, age=None):
    importance, label, ages, its, _ = world
    return swap(
        ids, importance, stock or its, label=label, age=ages if age is None else age, forced=forced, allowed=allowed, how=how,
        rng=np.random.default_rng(0),
    )  # fmt: skip


def test_only_unimportant_samples_give_way_and_only_to_unimportant_ones(world):
    importance, label, _, stock, rng = world
    ids = rng.permutation(N)[:800]
    how = Fetching(top=0.7, tolerance=0.0)
    found = exchanged(world, ids, how)
    assert len(found.taken) == len(found.out) > 50
    assert importance[found.out].max() <= 0.3
    assert importance[found.taken].max() <= 0.3
    assert set(found.out) <= set(ids)
    assert not set(found.taken) & set(ids)
    assert len(set(found.taken)) == len(found.taken)
    assert not stock.resident[found.out].any()
    assert found.resident == np.count_nonzero(stock.resident[found.taken]) > 20
    counts = [np.bincount(label[part], minlength=CLASSES) for part in (found.out, found.taken)]
    np.testing.assert_array_equal(*counts)


def test_class_counts_change_by_no_more_than_the_tolerance(world):
    _, label, _, _, rng = world
    for tolerance in (0.05, 0.3):
        found = exchanged(world, rng.permutation(N)[:800], Fetching(top=0.5, tolerance=tolerance))
        counts = [np.bincount(label[part], minlength=CLASSES) for part in (found.out, found.taken)]
        assert np.abs(counts[0] - counts[1]).max() <= tolerance * len(found.out) + 1


def test_forced_and_filtered_samples_are_left_alone(world):
    *_, rng = world
    ids = rng.permutation(N)[:800]
    forced, allowed = rng.random(N) < 0.5, rng.random(N) < 0.5
    found = exchanged(world, ids, Fetching(), forced=forced, allowed=allowed)
    assert len(found.out) > 10
    assert not forced[found.out].any()
    assert allowed[found.taken].all()


def test_who_waited_too_long_comes_first(world):
    *_, ages, _, rng = world
    ids = rng.permutation(N)[:800]
    age = ages.copy()
    picked = np.isin(np.arange(N), ids)
    late = np.flatnonzero(~picked & (world[0] <= 0.3))[:20]
    age[late] = 40
    found = exchanged(world, ids, Fetching(max_age=12), age=age)
    assert found.overdue == 20
    assert set(late) <= set(found.taken)


def test_samples_beside_each_other_make_longer_runs(world):
    importance, _, _, stock, rng = world
    ids = rng.permutation(N)[:800]
    nothing = dataclasses.replace(stock, resident=np.zeros(N, dtype=bool))

    def requests(chosen):
        low = np.zeros(N + 1, dtype=bool)
        low[chosen[importance[chosen] <= 0.5]] = True
        return np.count_nonzero(low[1:] & ~low[:-1]) / np.count_nonzero(low)

    found = exchanged(world, ids, Fetching(top=0.5, tolerance=0.2), stock=nothing)
    assert found.resident == 0
    assert found.packaged > 50
    after = np.setdiff1d(np.concatenate((ids, found.taken)), found.out)
    assert requests(after) < 0.8 * requests(ids)


def test_a_store_without_shards_or_classes_is_no_trouble(world):
    importance, _, _, stock, rng = world
    objects = dataclasses.replace(stock, shard=np.full(N, -1, np.int32))
    ids = rng.permutation(N)[:800]
    found = swap(
        ids,
        importance,
        objects,
        label=np.full(N, -1),
        age=np.ones(N, int),
        forced=None,
        allowed=None,
        how=Fetching(),
        rng=rng,
    )
    assert found.packaged == 0
    assert found.resident > 20


def test_the_least_certain_ranks_are_refreshed_first():
    ledger = Ledger(100)
    ledger.last_seen[:] = 5
    ledger.last_seen[:10] = 1
    ledger.var_loss[:] = np.arange(100, dtype=np.float32)
    view = View(ledger, Clock(window=6, windows=20))
    picked = np.zeros(100, dtype=bool)
    picked[90:] = True
    ids = refresh_set(view, picked, None, 0.25, np.random.default_rng(0))
    assert len(ids) == round(0.25 * 90)
    assert set(range(10)) <= set(ids)  # not seen for long
    assert set(ids) - set(range(10)) == set(range(90 - (len(ids) - 10), 90))  # then those that vary
    assert not set(refresh_set(view, picked, np.arange(100) > 50, 1.0, np.random.default_rng(0))) & set(range(51))
    assert len(refresh_set(view, picked, None, 0.0, np.random.default_rng(0))) == 0


def test_a_window_starts_with_what_is_resident():
    ids = np.random.default_rng(0).permutation(1000)
    weights = 1 + ids.astype(np.float32) / 1000
    plan = Plan(
        window=0, population=1000, batch_size=10, ids=ids, weights=weights, importance=weights / 2,
        level=np.zeros(1000, dtype=np.uint8),
    )  # fmt: skip
    resident = ids < 0
    resident[ids[7::20]] = True
    first = resident_first(plan, resident)
    assert sorted(first.ids) == list(range(1000))
    assert resident[first.ids[:49]].all()
    np.testing.assert_array_equal(first.weights, 1 + first.ids.astype(np.float32) / 1000)
    np.testing.assert_array_equal(first.ids[-10:], ids[-10:])  # one of which is resident
    np.testing.assert_array_equal(resident_first(plan, np.ones(1000, dtype=bool)).ids, ids)


def test_plans_are_the_same_for_the_same_stock_and_say_what_was_exchanged(world):
    *_, stock, _ = world
    ledger = Ledger(N)
    rng = np.random.default_rng(1)
    ledger.set_labels(rng.integers(0, CLASSES, N))
    ledger.mean_loss[:] = rng.random(N)
    ledger.seen[:] = 3
    ledger.last_seen[:] = 2
    config = salience.select.preset("io").merged(
        {"filters": [], "scores": ["ema_loss"], "fetch": {"refresh": 0.1, "top": 0.2}}
    )
    plans = [Pipeline(config).plan(ledger, window=5, windows=20, batch_size=32, seed=0, stock=stock) for _ in range(2)]
    np.testing.assert_array_equal(plans[0].ids, plans[1].ids)
    assert len(set(plans[0].ids)) == len(plans[0])
    assert len(plans[0]) == (992 + round(0.1 * (N - 992))) // 32 * 32
    assert "exchanged for" in plans[0].notes[-1].reason
    without = Pipeline(dataclasses.replace(config, fetch=None)).plan(
        ledger, window=5, windows=20, batch_size=32, seed=0
    )
    hits = [np.count_nonzero(stock.resident[plan.ids]) / len(plan) for plan in (plans[0], without)]
    assert hits[0] > hits[1]


@pytest.mark.parametrize("table", [{"top": 2}, {"max_age": 0}, {"topp": 0.5}, {"top": "much"}, 7])
def test_a_wrong_fetch_table_is_named(table):
    with pytest.raises(ConfigError, match=r"select\.fetch"):
        salience.select.preset("io").merged({"fetch": table})


def test_an_exchange_withdraws_the_promise_of_unbiased_weights_once_aloud_and_in_every_plan(world):
    """Expected window loss by Monte Carlo: that of all samples without fetch, another one with it, and then it is said."""
    *_, stock, _ = world
    ledger = Ledger(N)
    rng = np.random.default_rng(1)
    loss = rng.exponential(size=N).astype(np.float32)
    ledger.record(np.arange(N), {"loss": loss}, window=0)
    ledger.var_loss[:] = loss  # what varies most is looked at again first
    config = SelectConfig(scores=(Use(name="loss"),), sampler=Use(name="probability"), keep=Use(name="constant"))

    def expected(fetch, warn):
        pipeline = Pipeline(dataclasses.replace(config, fetch=fetch), strict=True, warn=warn)
        plans = [
            pipeline.plan(ledger, window=5, windows=20, batch_size=50, seed=seed, stock=stock) for seed in range(200)
        ]
        means = np.array([(plan.weights * loss[plan.ids]).mean() for plan in plans])
        return means.mean(), means.std() / np.sqrt(len(means)), plans

    said: list[str] = []
    mean, error, _ = expected(None, said.append)
    assert abs(mean - loss.mean()) < 4 * error
    assert not said
    mean, error, plans = expected(Fetching(), said.append)
    assert abs(mean - loss.mean()) > 10 * error
    assert len(said) == 1
    assert "'probability'" in said[0]
    assert "no longer estimate those of all samples" in said[0]
    assert all("the weights are not unbiased" in plan.notes[-1].reason for plan in plans)
    tempered = salience.select.preset("io").merged({"scores": ["loss"], "filters": []})
    plan = Pipeline(dataclasses.replace(tempered, sampler=Use(name="ratio")), warn=said.append).plan(
        ledger, window=5, windows=20, batch_size=50, seed=0, stock=stock
    )
    assert len(said) == 1  # a rule that never promised it
    assert "not unbiased" not in plan.notes[-1].reason
