"""Cache policies: what each keeps, what it costs in bytes, and that an importance cache reaches its bound."""

from __future__ import annotations

import numpy as np
import pytest

from salience.errors import ConfigError
from salience.feed.policy import Planned, open_policy
from salience.feed.simulate import fetched, rival_bytes

N = 4000
RIVALS = ("lru", "never_evict", "shade", "icache", "impact", "planned")


def percentile_plans(windows: int, power: float = 1.0, *, drift: float = 0.0, seed: int = 0):
    """P(pick) = percentile^power; every window a share `drift` of the samples gets a new importance."""
    rng = np.random.default_rng(seed)
    importance = rng.permutation(N).astype(np.float32) / N
    plans = []
    for _ in range(windows):
        moved = rng.random(N) < drift
        importance = importance.copy()
        importance[moved] = rng.permutation(importance[moved])
        picked = np.flatnonzero(rng.random(N) < importance**power)
        plans.append((rng.permutation(picked), importance))
    return plans


def steady(policy, plans, sizes, share: float = 0.2) -> float:
    """Bytes per window after the first two, over the bytes of all samples."""
    sent = fetched(policy(int(share * sizes.sum()), sizes), plans, sizes)
    return float(np.mean(sent[2:]) / sizes.sum())


@pytest.mark.parametrize("power", [0.33, 1.0])
def test_the_importance_cache_reaches_its_bound_and_the_others_do_not(rivals, power):
    sizes = np.full(N, 1000, dtype=np.int64)
    plans = percentile_plans(8, power)
    got = {name: steady(policy, plans, sizes) for name, policy in rivals.POLICIES.items()}
    assert got["impact"] == pytest.approx(rivals.bound(0.2, power), rel=0.03)
    assert got["none"] == pytest.approx(1 / (1 + power), rel=0.03)
    assert got["impact"] < got["icache"] < got["never_evict"] < got["lru"] < got["none"]
    assert got["impact"] <= got["shade"] < got["never_evict"]
    # Against every sample once a window, which is what those without importance make:
    rng = np.random.default_rng(1)
    uniform = [(rng.permutation(N), np.ones(N, dtype=np.float32)) for _ in range(8)]
    if power == 1.0:
        assert steady(rivals.NeverEvict, uniform, sizes) / got["impact"] > 2.4
        assert steady(rivals.Lru, uniform, sizes) / got["impact"] > 2.9


def test_with_every_sample_once_a_window_the_hit_rate_is_the_caches_share(rivals):
    sizes = np.full(N, 1000, dtype=np.int64)
    rng = np.random.default_rng(0)
    plans = [(rng.permutation(N), np.ones(N, dtype=np.float32)) for _ in range(5)]
    assert steady(rivals.NeverEvict, plans, sizes) == pytest.approx(0.8, abs=0.001)
    assert steady(rivals.Importance, plans, sizes) == pytest.approx(0.8, abs=0.001)
    assert steady(rivals.Lru, plans, sizes) > 0.9


@pytest.mark.parametrize("name", RIVALS)
def test_no_policy_uses_more_bytes_than_it_has_and_evicts_only_what_it_holds(rivals, name):
    sizes = np.random.default_rng(1).integers(100, 3000, N)
    budget = int(0.1 * sizes.sum())
    chosen = rivals.policy(name, budget, sizes)
    resident: set[int] = set()
    for ids, importance in percentile_plans(4, drift=0.3):
        chosen.window(importance, ids)
        for i in ids.tolist():
            assert chosen.hit(i) == (i in resident)
            if i in resident:
                continue
            gone = chosen.offer(i)
            if gone is not None:
                assert resident.issuperset(gone)
                resident.difference_update(gone)
                resident.add(i)
            assert chosen.used == sum(int(sizes[j]) for j in resident) <= budget


def test_after_a_refresh_the_new_order_holds_at_once():
    cache = Planned(2, np.ones(4, dtype=np.int64))
    cache.window(np.array([3, 2, 1, 0], np.float32), np.arange(0))
    assert [cache.offer(i) for i in (0, 1, 2)] == [[], [], None]
    cache.window(np.array([0, 2, 1, 3], np.float32), np.arange(0))
    assert cache.offer(2) == [0]
    assert cache.offer(3) == [2]
    assert [cache.hit(i) for i in range(4)] == [False, True, False, True]


def test_a_large_sample_does_not_put_out_what_is_worth_more():
    sizes = np.array([1, 1, 2], dtype=np.int64)
    cache = Planned(2, sizes)
    cache.window(np.array([0.1, 0.9, 0.5], np.float32), np.arange(0))
    assert cache.offer(0) == []
    assert cache.offer(1) == []
    assert cache.offer(2) is None  # would need both, and one is worth more
    assert cache.hit(0)
    assert cache.used == 2


def test_what_this_window_still_needs_is_not_evicted():
    cache = Planned(2, np.ones(4, dtype=np.int64))
    cache.window(np.array([0.1, 0.2, 0.3, 0.9], np.float32), np.arange(0))
    assert [cache.offer(i) for i in (0, 1)] == [[], []]
    cache.window(np.array([0.1, 0.2, 0.3, 0.9], np.float32), np.array([3, 0]))
    assert not cache.hit(3)
    assert cache.offer(3) == [1]  # less important is 0, which has its turn later
    assert cache.hit(0)


def test_caches_that_do_not_know_the_plan_are_simulated_window_by_window(rivals):
    sizes = np.random.default_rng(1).integers(100, 3000, N)
    plans, budget = percentile_plans(4), int(0.2 * sizes.sum())
    assert rival_bytes((ids for ids, _ in plans), budget, sizes) == {
        f"{name}_bytes": sum(fetched(rivals.policy(name, budget, sizes), plans, sizes))
        for name in ("lru", "never_evict")
    }


def test_wrong_settings_are_said():
    sizes = np.full(3, 100, dtype=np.int64)
    with pytest.raises(ConfigError, match="Did you mean 'planned'"):
        open_policy("planed", 1000, sizes)
    with pytest.raises(ConfigError, match="holds no sample"):
        open_policy("planned", 50, sizes)
    with pytest.raises(ConfigError, match="at least 0"):
        open_policy(Planned, -1, sizes)
