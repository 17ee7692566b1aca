"""The Plan: what exactly happens in one window of training, as a frozen value that every other part reads."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from salience.errors import ConfigError, StateError
from salience.files import read_npz, write_npz

FORMAT = "salience-plan-1"
FRESH, STORED, REUSED = range(3)
"""Treatment levels: every stage is fresh; fresh, and the intermediate is stored; a stored intermediate is used."""
VIEW_SHIFT = 2
"""Number of low bits of a level that hold FRESH, STORED or REUSED; the index of the view is above them."""
LEVEL_MASK = (1 << VIEW_SHIFT) - 1
"""Mask of those low bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """What one filter did to a plan, and why."""

    name: str
    dropped: int
    forced: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Plan:
    """The samples of one window in order of delivery, each with its weight, importance and treatment level."""

    window: int
    population: int
    """Number of samples the plan was chosen from."""
    batch_size: int
    """Samples per optimizer step, over all ranks."""
    ids: npt.NDArray[np.int64]
    """Sample ids in order of delivery, int64 [n]."""
    weights: npt.NDArray[np.float32]
    """Loss weights, float32 [n], mean 1 in expectation."""
    importance: npt.NDArray[np.float32]
    """Rank-normalised importance in [0, 1], float32 [n]."""
    level: npt.NDArray[np.uint8]
    """How each sample is treated, uint8 [n]: FRESH, STORED or REUSED, and in the upper six bits the index of the view."""
    drop_last: bool = False
    lr_scale: float = 1.0
    """Factor for the learning rate if `batch_size` was changed to keep the number of steps, otherwise 1."""
    resolution: float = 1.0
    """Share of the full side at which images are shown."""
    robust: float = 0.0
    """Strength of the term in the loss that keeps a model from learning wrong labels by heart."""
    importance_of_all: npt.NDArray[np.float16] | None = None
    """Importance of every sample, picked or not, float16 [population]: what a cache should keep. None = all equal."""
    notes: tuple[Note, ...] = field(default=())

    def __post_init__(self) -> None:
        for name in ("ids", "weights", "importance", "level"):
            array: npt.NDArray[Any] = getattr(self, name)
            if array.shape != self.ids.shape or array.ndim != 1:
                raise ConfigError(
                    f"Plan.{name} has shape {array.shape}, ids have {self.ids.shape}; they must be equal."
                )
            array.setflags(write=False)
        if self.importance_of_all is not None and self.importance_of_all.shape != (self.population,):
            raise ConfigError(
                f"Plan.importance_of_all has shape {self.importance_of_all.shape}; it must be [{self.population}], one per "
                "sample."
            )

    def __len__(self) -> int:
        """Number of samples in the plan."""
        return len(self.ids)

    @property
    def all_alike(self) -> bool:
        """True if every sample is equally important, because nothing is known or no score is configured."""
        known = self.importance_of_all
        return known is None or bool(known.min() == known.max())

    @property
    def views(self) -> npt.NDArray[np.uint8]:
        """Index of the view that each visit shows of its sample, uint8 [n]; 0 is the first."""
        return self.level >> np.uint8(VIEW_SHIFT)

    @property
    def steps(self) -> int:
        """Number of optimizer steps on a single rank; with several ranks, `len(shard(...))`."""
        return len(_bounds(len(self.ids), self.batch_size, 1, self.drop_last)) - 1

    def taken(self, positions: npt.NDArray[np.integer[Any]], **changes: Any) -> Plan:
        """The plan with the visits at these positions, in this order, and other fields as `changes` say."""
        return replace(
            self, ids=self.ids[positions], weights=self.weights[positions], importance=self.importance[positions],
            level=self.level[positions], **changes,
        )  # fmt: skip

    def shard(self, rank: int = 0, world: int = 1, shares: Sequence[float] | None = None) -> Shard:
        """The part of every global batch for `rank` of `world`, in proportion to `shares` (default: equal).

        All ranks together cover the plan exactly once (with drop_last: its whole batches). A tail with
        fewer samples than ranks joins the batch before it, so that no rank is ever without work.
        """
        if not 0 <= rank < world:
            raise ConfigError(f"rank is {rank}; with {world} ranks it must be from 0 to {world - 1}.")
        parts = np.ones(world) if shares is None else np.asarray(shares, dtype=np.float64)
        if parts.shape != (world,) or (parts <= 0).any():
            raise ConfigError(f"shares are {shares!r}; there must be {world} positive numbers, one per rank.")
        bounds = _bounds(len(self.ids), self.batch_size, world, self.drop_last)
        sizes = np.diff(bounds)
        return Shard(plan=self, rank=rank, cuts=bounds[:-1] + _cuts(sizes, parts / parts.sum()), global_sizes=sizes)

    def arrays(self) -> dict[str, np.ndarray]:
        """The plan as plain arrays, for files and checkpoints."""
        return {
            "window": np.array(self.window),
            "population": np.array(self.population),
            "batch_size": np.array(self.batch_size),
            "drop_last": np.array(self.drop_last),
            "lr_scale": np.array(self.lr_scale),
            "robust": np.array(self.robust),
            **({} if self.resolution == 1 else {"resolution": np.array(self.resolution)}),
            "ids": self.ids,
            "weights": self.weights,
            "importance": self.importance,
            "level": self.level,
            **({} if self.importance_of_all is None else {"ranks": self.importance_of_all}),
        }

    @classmethod
    def from_arrays(cls, arrays: dict[str, Any]) -> Plan:
        return cls(
            window=int(arrays["window"]),
            population=int(arrays["population"]),
            batch_size=int(arrays["batch_size"]),
            drop_last=bool(arrays["drop_last"]),
            lr_scale=float(arrays.get("lr_scale", 1.0)),
            robust=float(arrays.get("robust", 0.0)),
            resolution=float(arrays.get("resolution", 1.0)),
            ids=np.array(arrays["ids"], dtype=np.int64),
            weights=np.array(arrays["weights"], dtype=np.float32),
            importance=np.array(arrays["importance"], dtype=np.float32),
            level=np.array(arrays["level"], dtype=np.uint8),
            importance_of_all=None if arrays.get("ranks") is None else np.array(arrays["ranks"], dtype=np.float16),
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Shard:
    """One rank's batches of a plan: batch k is `plan.ids[cuts[rank, k]:cuts[rank + 1, k]]`."""

    plan: Plan
    rank: int
    cuts: npt.NDArray[np.int64]
    """Where the part of each rank begins in the plan, and where the last part ends, int64 [ranks + 1, batches]."""
    global_sizes: npt.NDArray[np.int64]
    """Samples of each batch over all ranks, not counting visits that only fill it up."""
    fill: npt.NDArray[np.float64] | None = None
    """Where batches are measured in tokens: the tokens of each, divided by their mean. Then every sample of the window counts
    alike, whatever batch it is in. None = every batch counts alike."""

    def __len__(self) -> int:
        """Number of batches."""
        return self.cuts.shape[1]

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.cuts) - 1

    @property
    def start(self) -> npt.NDArray[np.int64]:
        """Where each batch of this rank begins in the plan's arrays."""
        return self.cuts[self.rank]

    @property
    def stop(self) -> npt.NDArray[np.int64]:
        """Where each batch of this rank ends."""
        return self.cuts[self.rank + 1]

    def span(self, number: int) -> slice:
        """The slice of the plan's arrays that holds batch `number`."""
        return slice(self.cuts.item(self.rank, number), self.cuts.item(self.rank + 1, number))

    def sizes(self, number: int) -> npt.NDArray[np.int64]:
        """Number of visits of batch `number` on each rank."""
        return np.diff(self.cuts[:, number])

    def of(self, rank: int) -> Shard:
        """The same plan's part for another rank."""
        return replace(self, rank=rank)

    def arrays(self) -> dict[str, np.ndarray]:
        """The plan and how it is divided, as plain arrays."""
        fill = {} if self.fill is None else {"fill": self.fill}
        return {**self.plan.arrays(), "cuts": self.cuts, "sizes": self.global_sizes, **fill}

    @classmethod
    def from_arrays(cls, arrays: dict[str, Any]) -> Shard:
        """The part of rank 0."""
        cuts, sizes = (np.array(arrays[name], dtype=np.int64) for name in ("cuts", "sizes"))
        fill = None if arrays.get("fill") is None else np.array(arrays["fill"], dtype=np.float64)
        return cls(plan=Plan.from_arrays(arrays), rank=0, cuts=cuts, global_sizes=sizes, fill=fill)

    def among(self, rank: int, world: int, done: Collection[int]) -> Shard:
        """The same window for another number of ranks: samples outside the batches `done` are covered exactly once.

        Batches stay what they are. Only a tail with fewer samples than ranks joins the batch before it; where that one is
        done already, visits of weight 0 fill it up, so that no rank is without work.
        """
        plan, begins, sizes, last = self.plan, self.cuts[0], self.global_sizes, len(self) - 1
        small = [number for number in range(len(self)) if number not in done and sizes[number] < world]
        if small not in ([], [last]) or (small and self.fill is not None):
            raise StateError(
                f"The window in progress has batches of {int(sizes[small[0]])} samples, which cannot be divided among {world} "
                "ranks; resume with fewer ranks."
            )
        if small and last > 0 and last - 1 not in done:
            begins, sizes = begins[:-1], np.append(sizes[:-2], sizes[-2:].sum())
        elif small:
            plan = _filled_up(plan, slice(int(begins[last]), int(begins[last] + sizes[last])), world)
        cuts = begins + _cuts(np.maximum(sizes, world), np.full(world, 1 / world))
        return Shard(plan=plan, rank=rank, cuts=cuts, global_sizes=sizes, fill=self.fill)

    def ids(self, number: int) -> npt.NDArray[np.int64]:
        return self.plan.ids[self.span(number)]

    def weights(self, number: int) -> npt.NDArray[np.float32]:
        return self.plan.weights[self.span(number)]


def _bounds(n: int, batch_size: int, world: int, drop_last: bool) -> npt.NDArray[np.int64]:
    """Edges of the global batches: 0, B, 2B, ..., n; a tail smaller than `world` joins the batch before it."""
    edges = np.arange(0, n + 1, batch_size, dtype=np.int64)
    tail = n - int(edges[-1])
    if tail and not drop_last:
        if tail >= world:
            edges = np.append(edges, n)
        elif len(edges) > 1:
            edges[-1] = n
        else:
            raise ConfigError(f"The plan has {n} samples for {world} ranks; every rank needs at least one.")
    return edges


def _filled_up(plan: Plan, batch: slice, size: int) -> Plan:
    """The plan with `batch` filled up to `size` visits; those added have weight 0 and are not recorded."""
    again = np.resize(plan.ids[batch], size - (batch.stop - batch.start))
    nothing, view = np.zeros(len(again), dtype=np.float32), np.full(len(again), FRESH | 1 << VIEW_SHIFT, dtype=np.uint8)
    return replace(
        plan, ids=np.append(plan.ids[: batch.stop], again), weights=np.append(plan.weights[: batch.stop], nothing),
        importance=np.append(plan.importance[: batch.stop], nothing), level=np.append(plan.level[: batch.stop], view),
    )  # fmt: skip


def _cuts(sizes: npt.NDArray[np.int64], shares: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Edges inside each batch, int64 [ranks + 1, batches]: in proportion to `shares`, at least one sample per rank."""
    world = len(shares)
    edges = np.concatenate(([0.0], np.cumsum(shares)))
    edges[-1] = 1.0
    cuts = np.rint(edges[:, None] * sizes).astype(np.int64)
    for rank in range(1, world):
        cuts[rank] = np.maximum(cuts[rank], cuts[rank - 1] + 1)
    for rank in range(world - 1, 0, -1):
        cuts[rank] = np.minimum(cuts[rank], cuts[rank + 1] - 1)
    return cuts


class Trace:
    """Plans on disk, one file per window: recorded once, replayed through other stores, links or models."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def _path(self, window: int) -> Path:
        return self.folder / f"window-{window:06d}.npz"

    def write(self, plan: Plan) -> None:
        write_npz(self._path(plan.window), {"format": np.array(FORMAT), **plan.arrays()})

    def read(self, window: int) -> Plan:
        return Plan.from_arrays(read_npz(self._path(window), FORMAT, "plan"))

    def __len__(self) -> int:
        return len(list(self.folder.glob("window-*.npz")))

    def check(self, population: int, windows: int | None = None) -> None:
        """Raise StateError unless the trace holds plans over `population` samples for `windows` windows."""
        if not len(self):
            raise StateError(
                f"There are no plans in {str(self.folder)!r}; record a trace with trace={str(self.folder)!r}."
            )
        if windows is not None and len(self) < windows:
            raise StateError(f"The trace {str(self.folder)!r} holds {len(self)} windows; epochs is {windows}.")
        found = self.read(0).population
        if found != population:
            raise StateError(f"The trace {str(self.folder)!r} is over {found} samples, this data set has {population}.")
