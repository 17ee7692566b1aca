"""The training process's side of Treat: chooses the split, sets levels when a window begins, counts and reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from salience.errors import ConfigError, DataError, StateError
from salience.feed.sizes import memory_bytes
from salience.ledger.copies import Copies
from salience.memory import node_memory
from salience.plan import FRESH, LEVEL_MASK, REUSED, STORED, VIEW_SHIFT, Plan, Shard
from salience.ranks import Ranks
from salience.seeds import AUGMENT, generator
from salience.treat.config import MOST_VIEWS, Treat
from salience.treat.curves import Adapting
from salience.treat.dataset import BatchReport, StagedDataset, StageTimes, Treatment
from salience.treat.echo import echo, echo_slots, views_needed, views_of
from salience.treat.levels import ReuseTable, SplitPoint, assign_slots, choose_split, draw_factors
from salience.treat.rehearsal import Rehearsal, rehearsed
from salience.treat.slots import Slots
from salience.treat.stages import Stage, takes


class Treating:
    """The treatment of one run."""

    def __init__(
        self,
        dataset: Any,
        stages: Sequence[Stage],
        config: Treat,
        *,
        seed: int,
        workers: int,
        ranks: Ranks | None,
        windows: int | None = None,
    ) -> None:
        """`windows` is the number in the whole run, if stages or the number of views change with progress."""
        self.config, self.stages = config, tuple(stages)
        self.n, self._seed, self._workers, self.ranks = len(dataset), seed, workers, ranks
        self._windows = windows
        self.changes = any(stage.changes for stage in stages)
        """True if a stage changes with the run's progress."""
        if windows is None and (self.changes or callable(config.views)):
            raise ConfigError(
                "A stage or the number of views changes with the run's progress: pass epochs= to the Loader."
            )
        if config.adapt and not any(stage.curve is not None for stage in stages):
            raise ConfigError('treat: adapt needs a stage that may change: salience.Stage(call, curve="fade").')
        self.adapting = Adapting() if config.adapt else None
        if not stages:
            raise ConfigError("augment= is empty; pass a list of at least one stage, or leave it out.")
        memory = memory_bytes()
        if config.kind != "fresh" and memory is not None and config.bytes > memory:
            raise ConfigError(f"treat: memory is {config.bytes:,} bytes and this machine has {memory:,}; ask for less.")
        slots = None if config.kind == "fresh" else Slots(node_memory(ranks, config.bytes))
        self.staged = StagedDataset(dataset, stages, seed=seed, strength=config.strength, slots=slots)
        self.split: SplitPoint | None = None
        self.kind = "fresh"
        """Treatment of the window in progress: "fresh", "reuse" or "echo"."""
        self.views = 1
        """Mean number of views per sample in the window in progress."""
        self._table = ReuseTable.empty(self.n)
        self._turn = np.full(self.n, -1, dtype=np.int32)
        """Window in which each sample was last read under echo."""
        self._found: Rehearsal | None = None
        self._times = StageTimes(len(stages))
        self.compute = [0.0, 0]
        """Seconds that the loop took for its batches, and the number of batches."""
        self._batch = 1
        """Number of samples in the most recent batch."""
        self.counts = dict.fromkeys(COUNTS, 0)
        self._visits, self._fresh = np.zeros((2, self.n), dtype=np.int32)
        """Visits of each sample, and those at which every stage was fresh."""

    def begin(self, options: dict[str, Any]) -> tuple[list[str], dict[str, int]]:
        """Rehearse and choose the split, once per run; returns warnings, and counts of requests to a Source."""
        if self._found is not None:
            return [], {}
        count = len(self.stages)
        found = Rehearsal(
            np.zeros(count + 1), np.zeros(count, np.int64), np.zeros(count), np.zeros(count + 1, bool), {}
        )
        trouble: Exception | None = None
        if self.ranks is None or self.ranks.rank == 0:
            try:
                found = rehearsed(self.staged, self._workers, options)
            except Exception as error:
                if self.ranks is None:
                    raise
                trouble = error
        if self.ranks is not None:  # all ranks use the rehearsal of rank 0
            self.ranks.agree(trouble, DataError("The stages failed in the rehearsal on rank 0; its message says how."))
            numbers = np.array(self.ranks.broadcast([*found.seconds, *found.sizes, *found.keeping, *found.random]))
            seconds, sizes, keeping, random = np.split(numbers, [count + 1, 2 * count + 1, 3 * count + 1])
            found = Rehearsal(seconds, sizes.astype(np.int64), keeping, random.astype(bool), found.counts)
        return self._understand(found), found.counts

    def _understand(self, found: Rehearsal) -> list[str]:
        self._found = found
        said = [
            f"Stage {stage.label!r} is declared random=False and is not: it drew random numbers or gave two results for one "
            "sample; its results are not kept."
            for stage, random in zip(self.stages, found.random[1:], strict=True)
            if stage.random is False and random
        ]
        if self.config.kind == "fresh":
            return said
        allowed, why = allowed_splits(self.stages, found.random, self.config.strength)
        wanted = self.config.split
        if wanted is not None:
            if not 0 <= wanted < len(self.stages):
                raise ConfigError(
                    f"treat: split is {wanted}; with these stages it must be from 0 to {len(self.stages) - 1}."
                )
            if not allowed[wanted]:
                raise ConfigError(f"treat: split is {wanted}, and {why}.")
            allowed = np.arange(len(self.stages)) == wanted
        # Echo keeps few at a time, whatever the number of samples.
        n = 1 if self.config.kind == "echo" else self.n
        keeping = found.keeping if wanted is None else np.zeros(len(self.stages))
        sizes = found.sizes + np.maximum(MIN_SLOT_SLACK_BYTES, found.sizes // 16)
        sizes += -sizes % 64
        k = choose_split(found.seconds, keeping, sizes, allowed, memory=self.config.bytes, n=n)
        if k is None:
            little = "no intermediate fits into its memory, or keeping one costs more than it saves"
            reason = why if not allowed.any() else f"{little}, and {why}" if why else little
            return [*said, f"treat={self.config.kind!r} does nothing: {reason}."]
        size = int(sizes[k])
        self.split = SplitPoint(stages=k, size=size, slots=min(self.config.bytes // size, self.n))
        return said

    def plan(self, plan: Plan, importance: npt.NDArray[Any] | None, copies: Copies | None) -> Plan:
        """The plan with treatment levels; with echo, the same number of visits to fewer samples.

        `importance` is that of every sample, [n]; None = not known, or not needed.
        """
        if importance is not None and importance.min() == importance.max():
            importance = None
        if self.config.strength and plan.importance_of_all is None and importance is not None:
            plan = replace(plan, importance=importance[plan.ids].astype(np.float32))
        self.kind, self.views = self._choice(self._progress(plan, 0))
        rng = generator(self._seed, AUGMENT, plan.window)
        if self.split is None or self.kind == "fresh":
            return replace(plan, level=np.zeros(len(plan), dtype=np.uint8))
        if self.kind == "reuse":
            r_max = self.config.r_max
            factor = draw_factors(len(plan), r_max, rng)
            level, self._table = assign_slots(
                plan.ids, factor, self._table, slots=self.split.slots, window=plan.window, r_max=r_max, rng=rng
            )
            return replace(plan, level=level)
        views = views_of(
            None if importance is None else importance[plan.ids], _copies_left_out(plan, copies), self.views, len(plan)
        )
        apart = self.config.distance * plan.batch_size
        found = echo(views, self._turn[plan.ids], apart=apart, rng=rng)
        ids = plan.ids[found.position]
        self._turn[ids] = plan.window
        # Each sample counts once, however many views it has: w / views, and all of them scaled to a mean of 1.
        samples = int(np.count_nonzero(found.view == 0))
        weights = plan.weights[found.position] * (len(ids) / samples / found.count).astype(np.float32)
        level = np.where(found.count == 1, FRESH, np.where(found.view == 0, STORED, REUSED)).astype(np.uint8)
        return replace(
            plan, ids=ids, weights=weights, importance=plan.importance[found.position].copy(),
            level=level | (found.view << VIEW_SHIFT),
        )  # fmt: skip

    def _progress(self, plan: Plan, place: int) -> float:
        """Progress of the run, from 0 to 1, at the batch with this position of the plan: the same on every rank."""
        begun = place // plan.batch_size * plan.batch_size / max(1, len(plan))
        return min(1.0, (plan.window + begun) / (self._windows or 1))

    def _choice(self, progress: float) -> tuple[str, int]:
        """The treatment of the next window and its number of views, from the times measured so far."""
        kind, views = self.config.kind, self.config.views
        if self.split is None or kind in ("fresh", "reuse"):
            return kind, 1
        assert self._found is not None
        known = self._times.calls[:-1] > 0
        each = np.where(known, self._times.seconds[:-1] / np.maximum(1, self._times.calls[:-1]), self._found.seconds)
        batch = each * self._batch / max(1, self._workers)
        saved, rest = batch[: self.split.stages + 1].sum(), batch[self.split.stages + 1 :].sum()
        compute = self.compute[0] / self.compute[1] if self.compute[1] else saved + rest
        if kind == "auto":
            reading = batch[0] > saved / 2
            kind = "fresh" if saved + rest <= compute else "echo" if reading else "reuse"
        if callable(views):
            views = int(np.clip(round(float(views(progress))), 1, MOST_VIEWS))
        elif views == "auto":
            views = views_needed(saved, rest, compute)
        if self.ranks is not None:
            number, views = map(int, self.ranks.broadcast([KINDS.index(kind), views]))
            kind = KINDS[number]
        return kind, views if kind == "echo" else 1

    def unread(self, plan: Plan) -> npt.NDArray[np.bool_] | None:
        """Visits whose intermediate should be on this node, bool [visits]; None if there are none, or with several nodes, since
        each has only those it made."""
        if self.split is None or self.kind == "fresh" or (self.ranks is not None and self.ranks.several_nodes):
            return None
        return (plan.level & LEVEL_MASK) == REUSED

    def treatment(self, shard: Shard) -> Callable[[slice], Treatment]:
        """A function from the position of a batch in the plan to its treatment, for the workers."""
        plan = shard.plan
        created = np.full(len(plan), plan.window, dtype=np.int32)
        slot = np.zeros(len(plan), dtype=np.int64)
        if self.kind == "reuse":
            slot = self._table.slot[plan.ids].astype(np.int64)
            created = np.where(slot >= 0, self._table.created[plan.ids], plan.window).astype(np.int32)
        elif self.kind == "echo" and self.split is not None:
            slot = echo_slots(plan.ids, plan.views, self.split.slots)
        split, size = (0, 0) if self.split is None else (self.split.stages, self.split.size)
        seed_reads = self._found is not None and bool(self._found.random[0])
        unread = self.unread(plan) is not None
        adapted = 1.0 if self.adapting is None else self.adapting.amount

        def of(span: slice) -> Treatment:
            progress = self._progress(plan, span.start) if self.changes else None
            return Treatment(
                plan.window, plan.level[span], created[span], slot[span], plan.importance[span], split, size, seed_reads,
                unread, progress, adapted,
            )  # fmt: skip

        return of

    def count_compute(self, seconds: float) -> None:
        """Count the loop's own time for a batch."""
        self.compute[0] += seconds
        self.compute[1] += 1

    def count(self, ids: npt.NDArray[np.int64], level: npt.NDArray[np.uint8], report: BatchReport) -> None:
        """Count what a worker reports about a batch."""
        np.add.at(self._visits, ids, 1)
        np.add.at(self._fresh, ids, (level & LEVEL_MASK) != REUSED)
        self._times.seconds += report.seconds
        self._times.calls += report.calls
        self._batch = len(level)
        kinds = np.bincount(level & LEVEL_MASK, minlength=3)
        for name, count in zip(COUNTS, (len(level), *kinds.tolist(), report.missed, report.unfit), strict=True):
            self.counts[name] += count

    @property
    def costs(self) -> dict[str, float]:
        """Microseconds per call of reading, of each stage, and of an intermediate."""
        labels = "read", *(stage.label for stage in self.stages), "intermediate"
        each = 1e6 * self._times.seconds / np.maximum(1, self._times.calls)
        return dict(zip(labels, np.round(each, 1).tolist(), strict=True))

    @property
    def saved(self) -> float:
        """Seconds of workers' time that intermediates saved, net of their own cost."""
        if self.split is None:
            return 0.0
        before = slice(0, self.split.stages + 1)
        each = self._times.seconds[before] / np.maximum(1, self._times.calls[before])
        return float(each.sum() * self._times.calls[-1] - self._times.seconds[-1])

    @property
    def fresh_shares(self) -> tuple[float, float, float]:
        """Share of its visits at which a sample was fresh: minimum, median and maximum over the samples visited."""
        seen = self._visits > 0
        shares = self._fresh[seen] / self._visits[seen] if seen.any() else np.ones(1)
        return float(shares.min()), float(np.median(shares)), float(shares.max())

    def event(self) -> dict[str, Any]:
        """The fields of a `treat` event."""
        return {
            "treatment": self.kind, "views": self.views, "split": None if self.split is None else self.split.stages,
            "adapted": 1.0 if self.adapting is None else self.adapting.amount,
            "frozen": self.frozen, "fresh_shares": self.fresh_shares,
            "costs_us": self.costs, "saved_seconds": round(self.saved, 3), **self.counts,
        }  # fmt: skip

    @property
    def frozen(self) -> list[str]:
        """Stages whose draws are kept with the intermediate."""
        before = () if self.split is None else self.stages[: self.split.stages]
        return [stage.label for stage in before if stage.random is not False]

    def state_dict(self) -> dict[str, Any]:
        found = self._found
        return {
            "stages": [stage.label for stage in self.stages],
            "kind": self.kind, "views": self.views, "compute": list(self.compute), "batch": self._batch,
            "split": None if self.split is None else [self.split.stages, self.split.size, self.split.slots],
            "slot": torch.from_numpy(self._table.slot.copy()), "born": torch.from_numpy(self._table.created.copy()),
            "uses": torch.from_numpy(self._table.uses.copy()), "turn": torch.from_numpy(self._turn.copy()),
            "adapting": None if self.adapting is None else self.adapting.state_dict(),
            "found": None if found is None else [part.tolist() for part in found[:4]],
            "visits": torch.from_numpy(self._visits.copy()), "fresh": torch.from_numpy(self._fresh.copy()),
            "seconds": self._times.seconds.tolist(), "calls": self._times.calls.tolist(), "counts": dict(self.counts),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        labels = [stage.label for stage in self.stages]
        if state is None or state["stages"] != labels:
            saved = "none" if state is None else ", ".join(state["stages"])
            raise StateError(f"The state was saved with the stages {saved}; resume with the same augment= and treat=.")
        self.kind, self.views = state["kind"], int(state["views"])
        self.compute, self._batch, self.counts = list(state["compute"]), int(state["batch"]), dict(state["counts"])
        self.split = None
        if state["split"] is not None:
            stages, size, slots = state["split"]
            self.split = SplitPoint(stages=stages, size=size, slots=slots)
        self._table = ReuseTable(slot=state["slot"].numpy(), created=state["born"].numpy(), uses=state["uses"].numpy())
        self._turn = state["turn"].numpy().copy()
        self._visits[:], self._fresh[:] = state["visits"].numpy(), state["fresh"].numpy()
        self._times.seconds[:], self._times.calls[:] = state["seconds"], state["calls"]
        if self.adapting is not None and state.get("adapting") is not None:
            self.adapting.load_state_dict(state["adapting"])
        if state["found"] is not None:
            seconds, sizes, keeping, random = map(np.array, state["found"])
            self._found = Rehearsal(seconds, sizes, keeping, random, {})


KINDS = ("fresh", "reuse", "echo")
COUNTS = ("visits", "fresh", "stored", "reused", "missed", "unfit")
MIN_SLOT_SLACK_BYTES = 512
"""A slot has at least this many bytes more than the largest intermediate that was seen."""


def allowed_splits(
    stages: Sequence[Stage], random: npt.NDArray[np.bool_], strength: bool
) -> tuple[npt.NDArray[np.bool_], str]:
    """The numbers of stages after which an intermediate may be kept, bool [stages], and the reasons against the others.

    Every stage before it must be deterministic (as declared, and as found) or have draws that may be frozen. If draws are
    frozen, a random stage must follow, so that no two windows show the same tensor.
    """
    allowed, why = np.zeros(len(stages), dtype=bool), ""
    if random[0]:
        return allowed, "the data set itself draws random numbers, so what it gives may not be kept"
    frozen = False
    for k in range(len(stages)):
        if k:
            stage = stages[k - 1]
            if not (stage.freeze or (stage.random is False and not random[k])):
                why = (
                    f"what stage {stage.label!r} gives may not be kept (declare it deterministic with salience.Stage(..., "
                    "random=False), or allow its draws to be kept with freeze=True)"
                )
                break
            if (strength and takes(stage.call, "strength")) or stage.changes:
                why = f"what stage {stage.label!r} gives depends on {'progress' if stage.changes else 'strength'}"
                break
            frozen |= stage.random is not False
        allowed[k] = not frozen or any(later.random is not False and not later.freeze for later in stages[k:])
        if not allowed[k]:
            why = "no stage that draws would be left after it"
    return allowed, why


def _copies_left_out(plan: Plan, copies: Copies | None) -> npt.NDArray[np.int64]:
    """The number of near-copies of each planned sample that this plan does not visit, int64 [visits]."""
    if copies is None:
        return np.zeros(len(plan), dtype=np.int64)
    groups = int(copies.group.max(initial=-1)) + 1
    grouped = copies.group >= 0
    size = np.bincount(copies.group[grouped], minlength=groups)
    group = copies.group[plan.ids]
    here = np.bincount(group[group >= 0], minlength=groups)
    left = np.where(here > 0, (size - here) // np.maximum(1, here), 0)
    return np.where(group >= 0, left[group], 0).astype(np.int64) if groups else np.zeros(len(plan), dtype=np.int64)
