"""The worker's side: reads samples, runs and times the stages, and stores or reuses intermediates as planned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset, get_worker_info

from salience.errors import DataError, SalienceError
from salience.feed.dataset import SourceDataset, substitute
from salience.feed.reads import Broken, Counts
from salience.feed.sharing.handle import SharedHandle
from salience.plan import FRESH, LEVEL_MASK, REUSED, VIEW_SHIFT
from salience.treat.seeding import FETCH, PREFIX, REST, own_globals, sample_seeds, seed_globals
from salience.treat.slots import Slots
from salience.treat.stages import Runner, Stage, joined, parts

Floats = npt.NDArray[np.float64]


class Treatment(NamedTuple):
    """How the samples of one batch are treated; arrays are [B]."""

    window: int
    level: npt.NDArray[np.uint8]
    created: npt.NDArray[np.int32]
    """Window whose seed the stages before the split use, [B]."""
    slot: npt.NDArray[np.int64]
    strength: npt.NDArray[np.float32]
    split: int = 0
    """Number of stages before the intermediate."""
    size: int = 0
    """Bytes per slot; 0 = nothing is kept."""
    seed_reads: bool = False
    """True if the data set itself draws random numbers."""
    unread: bool = False
    """True if the cache did not read the samples whose intermediate is reused."""
    progress: float | None = None
    """Progress of the run at this batch, from 0 to 1; None if no stage needs it."""
    adapted: float = 1.0
    """The adaptive strength, which follows the gap to validation."""

    @classmethod
    def fresh(cls, count: int) -> Treatment:
        """Every stage is fresh, outside of any window."""
        zeros = np.zeros(count, dtype=np.int64)
        return cls(0, zeros.astype(np.uint8), zeros.astype(np.int32), zeros, np.ones(count, np.float32))


class StageTimes:
    """Seconds and calls of reading, of each stage, and of storing and loading intermediates, [stages + 2]."""

    def __init__(self, stages: int) -> None:
        self.seconds, self.calls = np.zeros(stages + 2), np.zeros(stages + 2, dtype=np.int64)

    def add(self, part: int, seconds: float, calls: int = 1) -> None:
        self.seconds[part] += seconds
        self.calls[part] += calls


class BatchReport(NamedTuple):
    """What a worker reports about a batch."""

    seconds: Floats
    """Seconds of reading, of each stage and of intermediates, as in StageTimes."""
    calls: npt.NDArray[np.int64]
    cost_us: npt.NDArray[np.float32]
    """Microseconds for each sample that was read and went through every stage, otherwise NaN, [B]."""
    missed: int
    """Number of intermediates that were to be reused but were missing."""
    unfit: int
    """Number of intermediates that could not be stored."""
    broken: dict[int, str]
    """Position in the batch -> the reason why the sample that belongs there is broken."""
    counts: dict[str, int]
    """Counts of requests to a Source."""


class StagedBatch(NamedTuple):
    """A collated batch and the report on it."""

    batch: Any
    report: BatchReport


class Treated(list[Any]):
    """The samples of one batch, and the report on them."""

    report: BatchReport


class StagedDataset(Dataset[Any]):
    """The data set followed by its stages, read a whole order at once. It holds nothing that changes with the window."""

    def __init__(
        self, dataset: Any, stages: Sequence[Stage], *, seed: int, strength: bool = False, slots: Slots | None = None
    ) -> None:
        self.dataset, self.stages, self.slots = dataset, tuple(stages), slots
        self._seed = seed
        self._source = dataset if isinstance(dataset, SourceDataset) else None
        self._many = callable(getattr(dataset, "__getitems__", None))
        self._run = [Runner(stage, strength, place) for place, stage in enumerate(stages)]
        random = [stage.random is not False for stage in stages]
        self._draws = [any(random[:k]) for k in range(len(random) + 1)]
        """True if a stage before number k may draw random numbers."""

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, i: int) -> Any:
        return self._taken([int(i)], -1, Treatment.fresh(1))[0]

    def take(self, order: Any) -> Treated:
        """The samples of an order, treated as the order says."""
        ids: list[int] = order.ids.tolist()
        treatment = order.treatment or Treatment.fresh(len(ids))
        if get_worker_info() is not None:
            return self._taken(ids, order.ticket, treatment)
        with own_globals():
            return self._taken(ids, order.ticket, treatment)

    def _taken(self, ids: list[int], ticket: int, how: Treatment) -> Treated:
        times, array = StageTimes(len(self.stages)), np.asarray(ids, dtype=np.int64)
        found = self._taken_up(ids, how, times)
        wanted = [k for k in range(len(ids)) if k not in found]
        reading = sample_seeds(self._seed, how.window, array[wanted], FETCH).tolist() if how.seed_reads else None
        begin = perf_counter()
        reused = (how.level[wanted] & LEVEL_MASK) == REUSED
        samples, counts = self.read([ids[k] for k in wanted], ticket, reading, (reused & how.unread).tolist())
        per_read = (perf_counter() - begin) / max(1, len(wanted))
        times.add(0, per_read * len(wanted), len(wanted))
        read = dict(zip(wanted, samples, strict=True))
        first_seeds: list[int] = []
        if how.split:
            first_seeds = sample_seeds(self._seed, how.created, array, PREFIX).tolist()
        seeds = sample_seeds(self._seed, how.window, array, how.level >> VIEW_SHIFT, REST).tolist()
        cost = np.full(len(ids), np.nan, dtype=np.float32)
        unfit = 0
        out: list[Any] = []
        rests: list[Any] = []
        for k in range(len(ids)):
            strength, start = float(how.strength[k]), perf_counter()
            if k in found:
                value, rest = found[k]
            else:
                value, rest = parts(read.pop(k))
                if how.split:
                    if self._draws[how.split]:
                        seed_globals(first_seeds[k])
                    value = self.through(
                        value, 0, how.split, strength, first_seeds[k], times, how.progress, how.adapted
                    )
                unfit += not self._kept(k, ids[k], value, rest, how, times)
            seed_globals(seeds[k])
            stop = len(self.stages)
            out.append(self.through(value, how.split, stop, strength, seeds[k], times, how.progress, how.adapted))
            rests.append(rest)
            if k not in found and not isinstance(out[k], Broken):
                cost[k] = 1e6 * (per_read + perf_counter() - start)
        broken = {k: value.reason for k, value in enumerate(out) if isinstance(value, Broken)}
        self._stand_in(ids, out, broken)
        treated = Treated(joined(value, rest) for value, rest in zip(out, rests, strict=True))
        missed = int(np.count_nonzero(reused))
        treated.report = BatchReport(times.seconds, times.calls, cost, missed, unfit, broken, counts)
        return treated

    def _taken_up(self, ids: list[int], how: Treatment, times: StageTimes) -> dict[int, tuple[Any, Any]]:
        """Position -> intermediate and the rest of the sample, for reused samples that were found."""
        found: dict[int, tuple[Any, Any]] = {}
        if self.slots is None or not how.size:
            return found
        begin = perf_counter()
        for k in np.flatnonzero((how.level & LEVEL_MASK) == REUSED).tolist():
            got = self.slots.get(int(how.slot[k]), how.size, ids[k], int(how.created[k]))
            if got is not None:
                found[k] = got[0]
        times.add(-1, perf_counter() - begin, len(found))
        return found

    def _kept(self, k: int, i: int, value: Any, rest: Any, how: Treatment, times: StageTimes) -> bool:
        """Store the intermediate if the plan says so; False if that is not possible."""
        if self.slots is None or not how.size or how.level[k] & LEVEL_MASK == FRESH or isinstance(value, Broken):
            return True
        begin = perf_counter()
        stored = value, None if rest is None else joined(None, rest)
        kept = self.slots.put(int(how.slot[k]), how.size, i, int(how.created[k]), stored)
        times.add(-1, perf_counter() - begin, 0)
        return kept

    def through(
        self,
        value: Any,
        start: int,
        stop: int,
        strength: float = 1.0,
        seed: int = 1,
        times: StageTimes | None = None,
        progress: float | None = None,
        adapted: float = 1.0,
    ) -> Any:
        """The value after stages `start` to `stop`, or a Broken that names the stage that failed."""
        if isinstance(value, Broken):
            return value
        for k in range(start, stop):
            begin = perf_counter()
            try:
                value = self._run[k](value, strength, seed, progress, adapted)
            except SalienceError:  # a missing package, for example
                raise
            except Exception as error:  # a stage may raise anything when it is fed garbage
                return Broken(f"stage {self._run[k].label!r} failed on it ({type(error).__name__}: {str(error)[:200]})")
            if times is not None:
                times.add(k + 1, perf_counter() - begin)
        return value

    def read(
        self, ids: list[int], ticket: int, seeds: list[int] | None, unread: Sequence[bool] = ()
    ) -> tuple[list[Any], dict[str, int]]:
        """The data set's sample for each id; for a Source, bytes (or a Broken) with the label.

        The cache has no bytes for `unread` samples, whose intermediate was to be reused: they are read from the store.
        """
        if not ids:
            return [], {}
        if self._source is None:
            if self._many:
                if seeds is not None:
                    seed_globals(seeds[0])
                return list(self.dataset.__getitems__(ids)), {}
            samples: list[Any] = []
            for k, i in enumerate(ids):
                if seeds is not None:
                    seed_globals(seeds[k])
                samples.append(self.dataset[i])
            return samples, {}
        source, handle = self._source.source, self._source.handle
        if self._source.decode is not None or isinstance(
            handle, SharedHandle
        ):  # a shared feed decodes before the stages
            taken = self._source.decoded(ids, ticket)
            data, counts = taken.samples, taken.counts
        elif handle is None or ticket < 0:
            data, counts = source.read_counted(ids)
            self._source.note(ids, data)
        else:
            late = [i for i, again in zip(ids, unread, strict=True) if again]
            found, counts = source.read_counted(late) if late else ([], Counts())
            lost = dict(zip(late, found, strict=True))
            here = iter(handle.read(ticket, [i for i in ids if i not in lost]))
            data = [lost[i] if i in lost else next(here) for i in ids]
            self._source.note(ids, data)
        if not source.classes:
            return list(data), asdict(counts)
        labels = source.labels[np.asarray(ids, dtype=np.int64)].tolist()
        return list(zip(data, labels, strict=True)), asdict(counts)

    def _stand_in(self, ids: list[int], out: list[Any], broken: dict[int, str]) -> None:
        if not broken:
            return
        if len(broken) == len(ids):
            raise DataError(f"All {len(ids)} samples of a batch are broken; the first, sample {ids[0]}: {broken[0]}.")
        labels = np.zeros(len(ids), dtype=np.int32)
        if self._source is not None:
            labels = self._source.source.labels[np.asarray(ids, dtype=np.int64)]
        for k in broken:
            out[k] = out[substitute(k, labels, broken)]


class TreatCollate:
    """The user's collate function, which puts the report beside its result."""

    def __init__(self, collate: Callable[[Any], Any], last: str) -> None:
        self.collate, self._last = collate, last

    def __call__(self, samples: Treated) -> StagedBatch:
        try:
            return StagedBatch(self.collate(samples), samples.report)
        except Exception as cause:
            shapes = {
                tuple(getattr(parts(sample)[0], "shape", ())): k for k, sample in reversed(list(enumerate(samples)))
            }
            if len(shapes) < 2:
                raise
            (one, a), (two, b) = sorted(shapes.items(), key=lambda item: item[1])[:2]
            raise DataError(
                f"Stages gave shape {one} at position {a} of a batch and {two} at position {b}; the last one, {self._last!r}, "
                "must give one shape, or pass a collate_fn= that takes several."
            ) from cause
