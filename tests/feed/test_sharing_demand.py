"""The union of several plans, and what goes first when memory is short."""

from __future__ import annotations

import numpy as np
import pytest

from salience.feed.sharing.demand import UNWANTED, Demand, JobPlan, pace_groups
from salience.feed.sharing.pool import Pool


def plan(demand: Demand, number: int, *batches: list[int], group: str = "", form: int = 1) -> JobPlan:
    job = demand.jobs[number] = JobPlan(demand.n, form)
    job.begin([np.array(batch, dtype=np.int64) for batch in batches], group or str(number), None)
    return job


def done(job: JobPlan, number: int, now: float) -> None:
    job.take(number, now)
    for i in job.batches[number].tolist():
        job.handed(i, number)


def test_a_sample_is_wanted_when_the_first_job_wants_it():
    demand = Demand(4)
    first, second = plan(demand, 1, [0], [1], [2]), plan(demand, 2, [2], [0])
    first.seconds = second.seconds = 2.0
    wanted = demand.wanted_in(np.arange(4), 1)
    np.testing.assert_array_equal(wanted[:3], [0.0, 2.0, 0.0])
    assert wanted[3] >= UNWANTED
    done(second, 0, 1.0)
    np.testing.assert_array_equal(demand.wanted_in(np.array([0, 2]), 1), [0.0, 4.0])


def test_a_sample_that_comes_twice_is_wanted_again():
    demand = Demand(3)
    job = plan(demand, 1, [0, 1], [2], [0])
    done(job, 0, 1.0)
    assert job.wants(0)
    assert not job.wants(1)
    done(job, 1, 2.0)
    done(job, 2, 3.0)
    assert not job.wants(0)


def test_what_no_plan_wants_goes_by_importance():
    demand = Demand(3)
    job = plan(demand, 1, [2])
    job.importance = np.array([0.9, 0.1, 0.5], dtype=np.float32)
    assert demand.soon(2, 1) < demand.soon(0, 1) < demand.soon(1, 1)


def test_jobs_of_one_plan_count_how_far_they_are_apart():
    demand = Demand(4)
    first, second = plan(demand, 1, [0], [1], [2], group="g"), plan(demand, 2, [0], [1], [2], group="g")
    other = plan(demand, 3, [3], group="h")
    done(first, 0, 1.0)
    done(first, 1, 2.0)
    assert demand.lead(first) == 2
    assert demand.slowest(first) is second
    assert demand.lead(other) == demand.lead(second) == 0
    second.demoted = True
    assert demand.lead(first) == 0


def test_a_late_joiner_far_behind_is_not_waited_for():
    demand = Demand(4)
    first = plan(demand, 1, [0], [1], [2], [3], group="g")
    done(first, 2, 1.0)
    late = plan(demand, 2, [0], [1], [2], [3], group="g")
    assert not demand.joined(late, 2)
    assert late.demoted
    near = plan(demand, 3, [0], [1], [2], [3], group="g")
    assert demand.joined(near, 3)


def test_the_job_with_least_ahead_is_served_first():
    demand = Demand(4)
    first, second = plan(demand, 1, [0], [1], [2]), plan(demand, 2, [3], [2], [1])
    first.staged = 2
    assert demand.next_to_stage(lambda job: 10, []) is second
    assert demand.next_to_stage(lambda job: 10, [second]) is first
    second.staged, second.owed = 1, {0: 11}
    assert demand.next_to_stage(lambda job: 10, []) is first


def test_the_sample_that_is_wanted_last_makes_room():
    demand = Demand(4)
    plan(demand, 1, [0], [1], [2], [3])
    pool = Pool(4 * 64, 3 * 64, demand)
    for i in (1, 2, 3):
        assert pool.reserve(1, i, 64) is not None
        pool.filled(1, i)
    assert pool.reserve(1, 0, 64, soon=demand.soon(0, 1)) is not None
    assert [pool.get(1, i) is not None for i in range(4)] == [True, True, True, False]


def test_what_is_wanted_sooner_is_not_put_out_and_what_is_held_never():
    demand = Demand(4)
    plan(demand, 1, [0], [1], [2], [3])
    pool = Pool(2 * 64, 2 * 64, demand)
    for i in (0, 1):
        assert pool.reserve(1, i, 64) is not None
        pool.filled(1, i)
    assert pool.reserve(1, 3, 64, soon=demand.soon(3, 1)) is None
    for i in (0, 1):
        entry = pool.get(1, i)
        assert entry is not None
        entry.pins += 1
    assert pool.reserve(1, 3, 64) is None


def test_decoded_samples_keep_to_their_budget():
    demand = Demand(8)
    pool = Pool(8 * 64, 2 * 64, demand)
    for i in range(3):
        if pool.reserve(1, i, 64) is not None:
            pool.filled(1, i)
    assert pool.decoded_bytes <= 2 * 64
    assert pool.reserve(0, 7, 64) is not None  # bytes have the rest


def paced(demand: Demand, number: int, seconds: float, batches: int = 12) -> JobPlan:
    """A job with the same plan as the others, which has taken all but its last batch at this pace."""
    job = plan(demand, number, *([i] for i in range(batches)), group="g")
    for k in range(batches - 1):
        done(job, k, 1.0 + k * seconds)
    return job


def test_jobs_are_grouped_by_pace_from_the_fastest_on():
    assert pace_groups([1.0, 9.0, 1.5, 2.1, 4.0]) == [0, 2, 0, 1, 1]
    assert pace_groups([3.0, 0.0, 3.0]) == [0, -1, 0]
    assert pace_groups([]) == []


def test_a_job_waits_only_for_those_of_its_own_pace():
    demand = Demand(12)
    fast, alike, slow, slower = (paced(demand, k, seconds) for k, seconds in enumerate((0.1, 0.15, 1.0, 1.5)))
    assert demand.group(fast) == [fast, alike]
    assert demand.group(slow) == [slow, slower]
    slow.taken = slower.taken = 2
    assert demand.lead(fast) == 0
    assert demand.slowest(fast) is None


def test_a_job_whose_pace_is_not_known_yet_is_waited_for():
    demand = Demand(12)
    fast, new = paced(demand, 0, 0.1), paced(demand, 1, 5.0, batches=3)
    assert demand.group(fast) == [fast, new]
    assert demand.slowest(fast) is new


def test_time_for_which_a_job_was_held_up_is_not_its_pace():
    demand = Demand(12)
    job = plan(demand, 1, *([i] for i in range(12)), group="g")
    for k in range(12):
        job.take(k, 10.0 * k)
        job.held = 9.0
    assert job.pace == pytest.approx(1.0)
