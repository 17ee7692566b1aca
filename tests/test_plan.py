"""A plan is a value: frozen, cut into shards without loss, written and read back."""

from __future__ import annotations

import numpy as np
import pytest

from salience.errors import ConfigError, StateError
from salience.plan import Plan, Trace


def make(n: int, batch_size: int = 10, drop_last: bool = False, window: int = 0) -> Plan:
    rng = np.random.default_rng(0)
    return Plan(
        window=window,
        population=2 * n,
        batch_size=batch_size,
        drop_last=drop_last,
        ids=rng.permutation(2 * n)[:n],
        weights=rng.random(n, dtype=np.float32),
        importance=rng.random(n, dtype=np.float32),
        level=np.zeros(n, dtype=np.uint8),
    )


def test_a_plan_cannot_be_changed():
    plan = make(20)
    with pytest.raises(ValueError, match="read-only"):
        plan.ids[0] = 1
    with pytest.raises(AttributeError):
        plan.window = 3


@pytest.mark.parametrize("n", [7, 40, 41, 43, 99])
@pytest.mark.parametrize("shares", [None, (1.0, 3.0, 0.5)])
def test_shards_together_cover_the_plan_exactly_once_with_work_for_every_rank(n, shares):
    plan = make(n)
    shards = [plan.shard(rank, 3, shares) for rank in range(3)]
    assert len({len(shard) for shard in shards}) == 1
    for number in range(len(shards[0])):
        parts = [shard.ids(number) for shard in shards]
        assert all(len(part) for part in parts)
        assert sum(len(part) for part in parts) == shards[0].global_sizes[number]
    everything = np.concatenate([s.ids(k) for k in range(len(shards[0])) for s in shards])
    np.testing.assert_array_equal(everything, plan.ids)


def test_shares_set_how_much_a_rank_gets():
    shards = [make(400, batch_size=40).shard(rank, 2, (3, 1)) for rank in range(2)]
    assert [len(s.ids(0)) for s in shards] == [30, 10]


def test_drop_last_leaves_only_whole_batches():
    shard = make(25, drop_last=True).shard()
    assert [len(shard.ids(k)) for k in range(len(shard))] == [10, 10]


def test_wrong_ranks_and_shares_are_refused():
    with pytest.raises(ConfigError, match="from 0 to 1"):
        make(20).shard(2, 2)
    with pytest.raises(ConfigError, match="positive"):
        make(20).shard(0, 2, (1, 0))
    with pytest.raises(ConfigError, match="every rank needs"):
        make(2).shard(0, 4)


def test_a_trace_gives_back_the_plans_written_to_it(tmp_path):
    trace = Trace(tmp_path / "trace")
    plans = [make(30, window=w) for w in range(3)]
    for plan in plans:
        trace.write(plan)
    assert len(trace) == 3
    for plan in plans:
        again = trace.read(plan.window)
        for name in ("ids", "weights", "importance", "level"):
            np.testing.assert_array_equal(getattr(again, name), getattr(plan, name))
        assert (again.batch_size, again.population) == (plan.batch_size, plan.population)
    with pytest.raises(StateError, match="60 samples"):
        trace.check(61)
    with pytest.raises(StateError, match="no plans"):
        Trace(tmp_path / "none").check(60)
