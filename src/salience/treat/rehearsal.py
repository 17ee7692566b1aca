"""A rehearsal with a few samples before the run: the cost of stages, the size of intermediates, and which stages are random."""

from __future__ import annotations

import copy
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset

from salience.errors import DataError
from salience.feed.reads import Broken
from salience.memory import Memory
from salience.treat.dataset import Floats, StagedDataset
from salience.treat.seeding import globals_state, own_globals, seed_globals
from salience.treat.slots import Slots, pickled, stored_bytes
from salience.treat.stages import joined, parts

SAMPLES_TRIED, SAMPLES_RUN_TWICE = 8, 2
"""Number of samples that are tried, and how many of these run twice."""


class Rehearsal(NamedTuple):
    """The measurements on a few samples."""

    seconds: Floats
    """Seconds per sample of reading and of each stage, [1 + stages]."""
    sizes: npt.NDArray[np.int64]
    """Bytes of a slot for the largest input of stage k, [stages]."""
    keeping: Floats
    """Seconds per sample to store that input and to load it again, [stages]."""
    random: npt.NDArray[np.bool_]
    """True if reading, or a stage, drew random numbers or gave two results for one sample, [1 + stages]."""
    counts: dict[str, int]
    """Counts of requests to a Source."""


def rehearsed(staged: StagedDataset, workers: int, options: dict[str, Any]) -> Rehearsal:
    """Rehearse, in a worker if there are any: a data set may open files at its first read, which must not precede a fork."""
    ids = np.linspace(0, len(staged) - 1, min(SAMPLES_TRIED, len(staged))).astype(np.int64)
    taken = {
        name: options[name] for name in ("multiprocessing_context", "worker_init_fn", "timeout") if name in options
    }
    loader: DataLoader[Rehearsal] = DataLoader(
        _Rehearsing(staged, ids.tolist()), batch_size=None, num_workers=min(1, workers), generator=torch.Generator(),
        collate_fn=_as_it_is, **taken,  # pyright: ignore[reportArgumentType]
    )  # fmt: skip
    return next(iter(loader))


def _as_it_is(found: Rehearsal) -> Rehearsal:
    return found


class _Rehearsing(Dataset[Rehearsal]):
    """A rehearsal as a data set of one."""

    def __init__(self, staged: StagedDataset, ids: list[int]) -> None:
        self.staged, self.ids = staged, ids

    def __len__(self) -> int:
        return 1

    def __getitem__(self, i: int) -> Rehearsal:
        with own_globals():
            return rehearse(self.staged, self.ids)


def rehearse(staged: StagedDataset, ids: list[int]) -> Rehearsal:
    """Rehearse with these samples; leaves the global generators seeded."""
    count, pair = len(staged.stages), min(SAMPLES_RUN_TWICE, len(ids))
    random, sizes = np.zeros(count + 1, dtype=bool), np.zeros(count, dtype=np.int64)
    keeping = np.zeros((len(ids), count))
    seed_globals(1)
    state = globals_state()
    begin = perf_counter()
    samples, counts = staged.read(ids, -1, None)
    per_read = (perf_counter() - begin) / len(ids)
    if not counts:  # bytes of a Source do not change
        random[0] = globals_state() != state
        random[0] |= any(
            _differ(a, b) for a, b in zip(samples, staged.read(ids[:pair], -1, [2] * pair)[0], strict=False)
        )
    whole: list[list[float]] = []
    trouble = ""
    for j, sample in enumerate(samples):
        value, rest = parts(sample)
        rest = None if rest is None else joined(None, rest)
        took = [per_read]
        for k in range(count):
            size, keeping[j, k] = _kept((value, rest))
            sizes[k] = max(sizes[k], size)
            spare = _copied(value) if j < pair else None
            seed_globals(1)
            state = globals_state()
            begin = perf_counter()
            value = staged.through(value, k, k + 1)
            took.append(perf_counter() - begin)
            random[k + 1] |= globals_state() != state
            if spare is not None:
                seed_globals(2)
                random[k + 1] |= _differ(value, staged.through(spare[0], k, k + 1, seed=2))
        if isinstance(value, Broken):
            trouble = trouble or f"sample {ids[j]}: {value.reason}"
        else:
            whole.append(took)
    if not whole:
        raise DataError(f"None of {len(ids)} samples came through the stages; {trouble}.")
    return Rehearsal(np.median(np.array(whole), axis=0), sizes, np.median(keeping, axis=0), random, counts)


def _copied(value: Any) -> tuple[Any] | None:
    try:
        return (copy.deepcopy(value),)
    except Exception:  # what cannot be copied is not run twice
        return None


def _differ(a: Any, b: Any) -> bool:
    try:
        (head, buffers), (other, others) = pickled(a), pickled(b)
    except Exception:  # what cannot be taken apart cannot be compared, nor kept
        return False
    same = head == other and len(buffers) == len(others)
    return not (same and all(np.array_equal(x, y) for x, y in zip(buffers, others, strict=True)))


def _kept(value: Any) -> tuple[int, float]:
    """Bytes of a slot for a value, and seconds to store and load it."""
    try:
        size = stored_bytes(value)
    except Exception:  # what cannot be taken apart is never kept
        return 1 << 61, 0.0
    slots = Slots(Memory(size))
    slots.put(0, size, 0, 0, value)  # pages are there from now on
    begin = perf_counter()
    slots.put(0, size, 0, 0, value)
    slots.get(0, size, 0, 0)
    return size, perf_counter() - begin
