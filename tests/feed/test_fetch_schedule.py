"""The schedule alone: plans, a policy and room in memory go in, what to read next comes out; no bytes, no processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import pytest

from salience.errors import StoreError
from salience.feed.index import Index, Names
from salience.feed.policy import Planned
from salience.feed.schedule import FeedWindow, Limits, Schedule, Staged, horizon, in_order

N, SIZE = 24, 100
LIMITS = Limits(least=0, most=10**9, along=0, gap=0, plain_gap=0)
NOBODY = np.full(2, -1, dtype=np.int64)


class Bytes:
    """Room for so many bytes, wherever they lie."""

    def __init__(self, size: int, sizes: np.ndarray) -> None:
        self.size = self.free = size
        self.sizes, self.along_bytes = sizes, 0
        self.here, self.kept, self.along = set[int](), set[int](), set[int]()
        self.pins = dict.fromkeys(range(len(sizes)), 0)

    def has(self, i: int) -> bool:
        return i in self.here

    def take(self, i: int) -> int | None:
        if self.free < self.sizes[i]:
            return None
        self.free -= int(self.sizes[i])
        return 0

    def give(self, i: int, place: int | None = None) -> None:
        self.free += int(self.sizes[i])

    def put(self, i: int) -> None:
        self.here.add(i)
        self._tidy(i)

    def pin(self, i: int) -> None:
        self.pins[i] += 1
        self.leave(i)

    def unpin(self, i: int) -> None:
        self.pins[i] -= 1
        self._tidy(i)

    def keep(self, i: int, on: bool) -> None:
        (self.kept.add if on else self.kept.discard)(i)
        self._tidy(i)

    def forget(self) -> None:
        self.kept.clear()

    def tidy_all(self) -> None:
        for i in [*self.here]:
            self._tidy(i)

    def read_along(self, i: int, place: int) -> None:
        self.along.add(i)
        self.pins[i] += 1
        self.along_bytes += int(self.sizes[i])

    def leave(self, i: int) -> None:
        if i in self.along:
            self.along.discard(i)
            self.pins[i] -= 1
            self.along_bytes -= int(self.sizes[i])

    def leave_all(self) -> None:
        for i in [*self.along]:
            self.leave(i)
            self._tidy(i)

    def squeeze(self, ids: Iterable[int], wanted: int | None = None) -> tuple[int | None, int]:
        gone = 0
        for i in ids:
            if i in self.here and not self.pins[i]:
                self.here.discard(i)
                self.give(i)
                gone += 1
                if wanted is not None and self.take(wanted) is not None:
                    return 0, gone
        return None, gone

    def others(self, spared: set[int]) -> list[int]:
        return sorted(self.here - spared)

    def _tidy(self, i: int) -> None:
        if i in self.here and not self.pins[i] and i not in self.kept:
            self.here.discard(i)
            self.give(i)


def objects(sizes: np.ndarray, shards: bool = False) -> Index:
    """Samples as objects of their own, or all in one shard without gaps."""
    n = len(sizes)
    offset = np.concatenate(([0], np.cumsum(sizes)[:-1])) if shards else np.zeros(n, np.int64)
    return Index(
        names=Names.of([str(i) for i in range(n)]), shards=("0.tar",) if shards else (),
        shard_sizes=np.array([sizes.sum()] if shards else [], np.int64), shard=np.full(n, 0 if shards else -1, np.int32),
        offset=offset, size=sizes, check=np.zeros(n, np.uint64), label=np.full(n, -1, np.int32), classes=(),
    )  # fmt: skip


def window(
    *ranks: list[list[int]], serial: int = 1, skip: set[int] | None = None, importance: float = 1.0
) -> FeedWindow:
    return FeedWindow(
        batches=[[np.array(ids, np.int64) for ids in batches] for batches in ranks],
        skip=[skip or set()] * len(ranks), serial=serial, first=[serial << 32] * len(ranks),
        importance=np.full(N, importance, np.float32),
    )  # fmt: skip


def begin(schedule: Schedule, one: FeedWindow) -> None:
    schedule.leave(one.serial)
    schedule.tell_policy(one)
    schedule.enter(one)


def made(
    memory: int = 10**6, budget: int = 0, *, ranks: int = 1, limits: Limits = LIMITS, shards: bool = False
) -> tuple[Schedule, Bytes]:
    sizes = np.full(N, SIZE, dtype=np.int64)
    room = Bytes(memory, sizes)
    index = objects(sizes, shards)
    return Schedule(index, lambda: Planned(budget, sizes), room, limits, budget=budget, ranks=ranks), room


def nothing_asked(schedule: Schedule, ahead: int = 10**9) -> Staged | None:
    return schedule.next(ahead, NOBODY[: len(schedule._next)])


def bring(schedule: Schedule, room: Bytes, ids: Iterable[int]) -> None:
    for i in ids:
        assert schedule.arrived(i)
        room.put(i)


def play(schedule: Schedule, room: Bytes, one: FeedWindow, order: Callable[[list[int]], list[int]] = list) -> list[int]:
    """A whole window: what was read, in order. Each batch is done with as soon as it is ready."""
    begin(schedule, one)
    read: list[int] = []
    while (staged := nothing_asked(schedule)) is not None:
        read += [*staged.places, *staged.along]
        bring(schedule, room, order([*staged.places, *staged.along]))
        for _, ticket in schedule.ready():
            schedule.release(np.array([ticket + 1]))
    return read


def test_batches_of_the_ranks_take_turns_and_a_sample_is_read_once():
    schedule, room = made(ranks=2)
    begin(schedule, window([[0, 1], [2, 3]], [[4, 1], [5]]))
    assert [ids.tolist() for ids in in_order(window([[0, 1], [2, 3]], [[4, 1]]).batches)] == [[0, 1], [4, 1], [2, 3]]
    read = [[*staged.places] for _ in range(4) if (staged := nothing_asked(schedule)) is not None]
    assert read == [[0, 1], [4], [2, 3], [5]]
    assert schedule.all_staged
    assert nothing_asked(schedule) is None
    bring(schedule, room, [0, 4, 5])
    assert list(schedule.ready()) == []  # both first batches wait for sample 1
    bring(schedule, room, [1])
    assert list(schedule.ready()) == [(0, 1 << 32), (1, 1 << 32), (1, (1 << 32) + 1)]


def test_it_reads_ahead_as_far_as_told_unless_a_rank_waits():
    schedule, _ = made()
    begin(schedule, window([[i] for i in range(6)]))
    assert [nothing_asked(schedule, ahead=2 * SIZE) is None for _ in range(4)] == [False, False, False, True]
    assert schedule.next(2 * SIZE, np.array([(1 << 32) + 3])) is not None
    assert nothing_asked(schedule, ahead=2 * SIZE) is None
    schedule.release(np.array([(1 << 32) + 2]))
    assert nothing_asked(schedule, ahead=2 * SIZE) is not None


def test_without_room_it_waits_until_a_batch_is_done_with():
    schedule, room = made(memory=2 * SIZE)
    begin(schedule, window([[0, 1], [2, 3]]))
    assert nothing_asked(schedule) is not None
    assert nothing_asked(schedule) is None
    bring(schedule, room, [0, 1])
    schedule.release(np.array([(1 << 32) + 1]))
    staged = nothing_asked(schedule)
    assert staged is not None
    assert [*staged.places] == [2, 3]


def test_a_batch_that_can_never_fit_is_an_error():
    schedule, _ = made(memory=2 * SIZE)
    begin(schedule, window([[0, 1, 2]]))
    with pytest.raises(StoreError, match=r"A batch of 3 samples does not fit .*200 bytes.* make the batch smaller"):
        nothing_asked(schedule)


def test_what_the_cache_keeps_is_not_read_again():
    schedule, room = made(budget=4 * SIZE)
    plan = [[0, 1, 2], [3, 4, 5]]
    assert play(schedule, room, window(plan)) == [0, 1, 2, 3, 4, 5]
    assert room.here == room.kept == {0, 1, 2, 3}
    assert play(schedule, room, window(plan, serial=2)) == [4, 5]
    counts = schedule.counts
    assert (counts.samples, counts.bytes, counts.hits, counts.hit_bytes) == (12, 12 * SIZE, 4, 4 * SIZE)
    assert (counts.resident_bytes, counts.bound_bytes) == (4 * SIZE, 8 * SIZE)


def test_batches_delivered_before_an_interruption_are_remembered_and_not_read():
    schedule, room = made(budget=2 * SIZE)
    begin(schedule, window([[0, 1], [2, 3]], skip={0}))
    assert nothing_asked(schedule) == Staged({}, [])
    assert room.kept == {0, 1}
    staged = nothing_asked(schedule)
    assert staged is not None
    assert [*staged.places] == [2, 3]
    bring(schedule, room, [2, 3])
    assert list(schedule.ready()) == [(0, 1 << 32)]  # tickets count what is wanted


def test_a_batch_of_which_no_bytes_are_wanted_is_ready_at_once():
    schedule, _ = made()
    begin(schedule, window([[], [0]]))
    assert nothing_asked(schedule) == Staged({}, [])
    assert list(schedule.ready()) == [(0, 1 << 32)]


def test_neighbours_that_are_wanted_later_come_with_the_same_request():
    schedule, room = made(shards=True, limits=Limits(least=0, most=10**9, along=3 * SIZE, gap=0, plain_gap=0))
    begin(schedule, window([[5], [6, 9], [4, 7]]))
    first = nothing_asked(schedule)
    assert first is not None
    assert ([*first.places], first.along) == ([5], [6, 7, 4])
    bring(schedule, room, [5, 6, 7, 4])
    second, third = nothing_asked(schedule), nothing_asked(schedule)
    assert second is not None
    assert third is not None
    assert ([*second.places], [*third.places]) == ([9], [])


def test_a_loss_fails_the_window_only_if_a_batch_waits_for_it():
    schedule, room = made()
    begin(schedule, window([[0, 1]]))
    nothing_asked(schedule)
    begin(schedule, window([[1, 2]], serial=2))  # the first was broken off; its samples are under way
    nothing_asked(schedule)
    assert not schedule.lost([0])
    assert schedule.lost([1])
    assert not schedule.lost([1])
    assert not schedule.arrived(1)
    bring(schedule, room, [2])
    assert room.free == room.size - SIZE


def test_a_window_that_was_broken_off_leaves_nothing_behind():
    schedule, room = made()
    begin(schedule, window([[0, 1], [2, 3]]))
    nothing_asked(schedule)
    nothing_asked(schedule)
    bring(schedule, room, [0, 1])
    schedule.leave(2)
    bring(schedule, room, [2, 3])
    assert room.free == room.size
    assert not schedule.busy


def test_a_resumed_run_keeps_what_the_first_one_kept():
    schedule, room = made(budget=3 * SIZE)
    schedule.leave(1)
    schedule.restore(np.array([7, 8, 9]))
    assert room.kept == {7, 8, 9}
    assert schedule.counts.resident_bytes == 3 * SIZE
    assert play(schedule, room, window([[7, 8], [1, 2]])) == [7, 8, 1, 2]  # the bytes are not here yet
    assert schedule.counts.hits == 0


def test_what_is_kept_does_not_depend_on_the_order_of_arrival():
    rng = np.random.default_rng(0)
    plans = [np.array_split(rng.permutation(N), 5) for _ in range(4)]
    importance = [rng.random() for _ in plans]
    outcomes = []
    for shuffle in (list, lambda ids: ids[::-1], lambda ids: np.random.default_rng(3).permutation(ids).tolist()):
        schedule, room = made(budget=8 * SIZE)
        read = []
        for k, plan in enumerate(plans):
            batches = [ids.tolist() for ids in plan]
            read.append(play(schedule, room, window(batches, serial=k + 1, importance=importance[k]), shuffle))
        outcomes.append((read, room.kept, schedule.counts))
    assert outcomes[0] == outcomes[1] == outcomes[2]


def test_the_bound_is_what_was_never_seen_and_what_no_cache_could_hold():
    rng = np.random.default_rng(1)
    schedule, room = made(budget=5 * SIZE)
    seen, bound = set[int](), 0
    for serial in range(1, 6):
        ids = rng.integers(0, N, 30)
        play(schedule, room, window([part.tolist() for part in np.array_split(ids, 7)], serial=serial))
        fresh = {*ids.tolist()} - seen
        bound += len(fresh) * SIZE + max(0, len({*ids.tolist()} - fresh) - 5) * SIZE
        seen |= fresh
    assert schedule.counts.bound_bytes == bound


def test_the_horizon_is_what_is_under_way_within_limits():
    limits = Limits(least=1000, most=5000, along=0, gap=0, plain_gap=0)
    assert horizon(0.0, 0.0, limits) == 1000
    assert horizon(1e4, 0.05, limits) == 2000
    assert horizon(1e9, 1.0, limits) == 5000
