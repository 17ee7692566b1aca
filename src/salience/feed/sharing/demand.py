"""What jobs need next: the plan of each, how far it is, and when any of them will need a sample again.

    wanted in (sample, form) = min over jobs of that form of (turn of the sample - batches taken) * seconds per batch

The sooner a sample is wanted, the more it is worth keeping (Belady's rule over the union of the plans); the value of a sample
that no plan wants is its importance. Jobs with the same plan and about the same pace form a group: they should use a sample
while it is in memory, so the fastest waits for the slowest, up to a limit. It does not wait for much slower ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
NEVER = np.iinfo(np.int32).max
"""Turn of a sample that the plan does not want, or not any more."""
PACE_RATIO = 2.0
"""Jobs of a group take at most this many times as long per batch as its fastest."""
BATCHES_FOR_PACE = 8
"""Number of batches after which the pace of a job counts."""
UNWANTED = 1e9
"""Seconds that mean never."""


@dataclass(slots=True, eq=False)
class JobPlan:
    """The window in progress of one job."""

    n: int
    form: int
    """The form in which it wants samples; 0 = their bytes."""
    batches: list[Ids] = field(default_factory=list[Ids])
    group: str = ""
    """Jobs with the same plan have the same group."""
    turn: npt.NDArray[np.int32] = field(init=False)
    """Number of the batch in which each sample is wanted next, int32 [n]."""
    importance: npt.NDArray[np.float32] | None = None
    batch_size: float = 1.0
    """Mean number of samples per batch."""
    taken: int = 0
    """Number of batches taken so far: one more than the last one."""
    staged: int = 0
    """Number of batches whose samples were requested."""
    owed: dict[int, int] = field(default_factory=dict[int, int])
    """Staged batch that is not taken yet -> bytes fetched for it."""
    demoted: bool = False
    """True if no job waits for this one any more in this window."""
    seconds: float = 0.0
    """Recent seconds per batch, without those for which it was held up; 0 = not known."""
    held: float = 0.0
    """Seconds since the last batch for which it was held up for others."""
    _paced: int = 0
    """Number of batches that `seconds` is made of."""
    _last: float = 0.0
    _again: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    """Sample that is visited more than once -> its later turns, last first."""

    def __post_init__(self) -> None:
        self.turn = np.full(self.n, NEVER, dtype=np.int32)

    def begin(self, batches: Sequence[Ids], group: str, importance: npt.NDArray[np.float32] | None) -> None:
        """Start a window of these batches."""
        self.batches, self.group, self.importance = list(batches), group, importance
        self.taken = self.staged = 0
        self._last = self.held = 0.0
        self.owed, self._again, self.demoted = {}, {}, False
        self.turn[:] = NEVER
        if not batches:
            return
        ids = np.concatenate(self.batches)
        self.batch_size = len(ids) / len(batches)
        turns = np.repeat(np.arange(len(batches), dtype=np.int32), [len(batch) for batch in batches])
        self.turn[ids[::-1]] = turns[::-1]  # of several turns the first one is written last
        if len(ids) > len(np.unique(ids)):
            order = np.argsort(ids, kind="stable")
            same = np.flatnonzero(ids[order][1:] == ids[order][:-1])
            for k in same[::-1].tolist():
                self._again.setdefault(int(ids[order[k]]), []).append(int(turns[order[k + 1]]))

    def take(self, number: int, now: float) -> None:
        """Note that batch `number` was taken."""
        if number >= self.taken:
            if self._last:
                pace = max(0.0, now - self._last - self.held) / (number + 1 - self.taken)
                self.seconds = pace if not self.seconds else 0.8 * self.seconds + 0.2 * pace
                self._paced += 1
            self._last, self.held = now, 0.0
            self.taken = number + 1
            self.staged = max(self.staged, self.taken)
        self.owed.pop(number, None)

    def handed(self, i: int, number: int) -> None:
        """Note that the job has received sample i of batch `number`."""
        later = [turn for turn in self._again.get(i, ()) if turn > number]
        self.turn[i] = later[-1] if later else NEVER

    def wants(self, i: int) -> bool:
        """True if the job will want sample i, or want it again."""
        return bool(self.turn[i] != NEVER)

    @property
    def pace(self) -> float:
        """Seconds per batch, by which it is grouped; 0 as long as they rest on too few batches."""
        return self.seconds if self._paced >= BATCHES_FOR_PACE else 0.0

    @property
    def over(self) -> bool:
        return self.taken >= len(self.batches)

    def wanted_in(self, ids: Ids) -> Floats:
        """Seconds until each sample is wanted, float64 [B]; UNWANTED if it is not."""
        turn = self.turn[ids]
        return np.where(turn == NEVER, UNWANTED, np.maximum(0, turn - self.taken) * max(self.seconds, 1e-3))


def pace_groups(paces: Sequence[float], ratio: float = PACE_RATIO) -> list[int]:
    """The group of each job by its seconds per batch, the fastest first; -1 for a pace that is not known, which fits all.

    From the fastest on, a job joins the group as long as it takes at most `ratio` times as long as the fastest of the group.
    """
    groups, group, first = [-1] * len(paces), -1, 0.0
    for k in sorted((k for k, pace in enumerate(paces) if pace > 0), key=lambda k: paces[k]):
        if group < 0 or paces[k] > ratio * first:
            group, first = group + 1, paces[k]
        groups[k] = group
    return groups


class Demand:
    """The plans of all running jobs."""

    def __init__(self, n: int, pace_ratio: float = PACE_RATIO) -> None:
        self.n, self._pace_ratio = n, pace_ratio
        self.jobs: dict[int, JobPlan] = {}

    def wanted_in(self, ids: Ids, form: int | None) -> Floats:
        """Seconds until a job of this form (None = of any) wants each sample, float64 [B].

        Samples that no plan wants come after all others, the least important last: UNWANTED * (2 - importance).
        """
        soonest = np.full(len(ids), 2 * UNWANTED)
        worth = np.zeros(len(ids))
        for job in self.jobs.values():
            if form is not None and job.form != form:
                continue
            if not job.demoted:
                soonest = np.minimum(soonest, job.wanted_in(ids))
            if job.importance is not None:
                worth = np.maximum(worth, job.importance[ids])
        return np.where(soonest >= UNWANTED, UNWANTED * (2 - worth), soonest)

    def soon(self, i: int, form: int | None) -> float:
        """The same for one sample."""
        return float(self.wanted_in(np.array([i], dtype=np.int64), form)[0])

    def forms(self) -> set[int]:
        """Forms in which jobs want samples."""
        return {job.form for job in self.jobs.values()}

    def group(self, job: JobPlan) -> list[JobPlan]:
        """The jobs with the same plan and pace that others wait for, including this one."""
        same = [one for one in self.jobs.values() if one.group == job.group and not one.demoted and not one.over]
        if len(same) < 2 or not job.pace:
            return same
        groups = pace_groups([one.pace for one in same], self._pace_ratio)
        mine = next((group for one, group in zip(same, groups, strict=True) if one is job), -1)
        return [one for one, group in zip(same, groups, strict=True) if group in (mine, -1)]

    def lead(self, job: JobPlan) -> int:
        """Batches that a job is ahead of the slowest of its group."""
        return job.taken - min((one.taken for one in self.group(job)), default=job.taken)

    def slowest(self, job: JobPlan) -> JobPlan | None:
        """The job of its group that is furthest behind; None if that is this job."""
        last = min(self.group(job), key=lambda one: one.taken, default=None)
        return None if last is None or last.taken >= job.taken else last

    def joined(self, job: JobPlan, most: float) -> bool:
        """True if a new job is close enough to its group; if it is not, no job waits for it."""
        job.demoted = any(one.taken - job.taken > most for one in self.group(job) if one is not job)
        return not job.demoted

    def next_to_stage(self, ahead: Callable[[JobPlan], int], held: Iterable[JobPlan]) -> JobPlan | None:
        """The job with the least read ahead among those that may have more; None if there is none."""
        waiting = set(map(id, held))
        open_jobs = [
            job
            for job in self.jobs.values()
            if job.staged < len(job.batches) and id(job) not in waiting and sum(job.owed.values()) <= ahead(job)
        ]
        return min(open_jobs, key=lambda job: (job.staged - job.taken) * max(job.seconds, 1e-3), default=None)
