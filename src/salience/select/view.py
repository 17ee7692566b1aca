"""What plug-ins may read: the ledger's columns as read-only arrays, and the clock."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from salience.errors import ConfigError
from salience.ledger import COLUMNS, Ledger
from salience.ledger.copies import Copies
from salience.seeds import TIES, generator

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
Rng: TypeAlias = "np.random.Generator"  # quoted, so that numpy.random is loaded by whoever draws first


@dataclass(frozen=True, kw_only=True, slots=True)
class Clock:
    """The position of a window in the run."""

    window: int
    windows: int
    """Windows of the whole run; in observe mode without `epochs`, the ones so far."""
    keep: float = 1.0
    """Share of the samples that the curve grants this window."""
    steered: float | None = None
    """Share that `keep = "auto"` was steered to; None without steering."""
    learnt_loss: float | None = None
    """Loss below which nine tenths of a sample's gradient are near zero, by the run's probe; None without a probe."""

    @property
    def time(self) -> float:
        """window / windows: 0 in the first window, close to 1 in the last."""
        return min(1.0, self.window / max(1, self.windows))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Reference:
    """The opinion of one or several other networks on every sample, read-only."""

    loss: Floats
    """Their mean loss, float32 [n]; NaN where unknown."""
    hardness: Floats
    """Mean over the networks of each sample's rank, hard = 1, in (0, 1), float32 [n]; NaN where unknown."""


NO_REFERENCE = (
    "what another model thinks of every sample: pass reference= (a Ledger, its file, the folder of a run, "
    "an array of losses, or a list of them), or train a small one alongside: loader.attach(model, proxy=small_model) "
    "before the first step"
)


class View:
    """A ledger as plug-ins see it: `view.mean_loss`, `view.seen`, ... are read-only arrays [n]; `view.clock` is the time."""

    def __init__(
        self,
        ledger: Ledger,
        clock: Clock,
        reference: Reference | None = None,
        copies: Copies | None = None,
        judged: Any = None,
        seed: int = 0,
        jury: tuple[Ledger, Ledger] | None = None,
        quality: Floats | None = None,
    ) -> None:
        self.n = ledger.n
        self._quality = quality
        self._seed = seed
        self.copies = copies
        """Which samples are copies of each other; None if they were not searched for."""
        self.judged = judged
        """The judgement of the labels, if it was already made for this ledger."""
        self.jury = jury
        """Ledgers of a jury: of the nets that trained on each sample, and of those that held it out. None without a jury."""
        self.clock = clock
        self._ledger = ledger
        self._reference = reference

    def rng(self, purpose: str, *path: int) -> np.random.Generator:
        """Random numbers for breaking ties, the same for every view of this window with the same purpose and path."""
        return generator(self._seed, TIES, zlib.crc32(purpose.encode()), *path)

    @property
    def vote(self) -> npt.NDArray[np.int32]:
        """Likeliest classes by predictions averaged over visits, int32 [n, VOTES], read-only."""
        return _read_only(self._ledger.vote)

    @property
    def vote_p(self) -> npt.NDArray[np.float16]:
        """Their averaged probabilities, float16 [n, VOTES], read-only; 0 = none."""
        return _read_only(self._ledger.vote_p)

    @property
    def course(self) -> Sequence[tuple[float, float, float, float]]:
        """How often predictions contradicted labels, one row per window: see `Ledger.course`."""
        return tuple(self._ledger.course)

    @property
    def trial(self) -> npt.NDArray[np.float64]:
        """Hard samples on trial, [k, 6], read-only: see `select.trial`."""
        return _read_only(self._ledger.trial)

    def __getattr__(self, name: str) -> npt.NDArray[Any]:
        if name not in COLUMNS:
            raise AttributeError(f"A view has no column {name!r}; it has {', '.join(COLUMNS)}.")
        return _read_only(self._ledger[name])

    @property
    def reference(self) -> Floats:
        """Loss of another model on each sample, float32 [n]; NaN where unknown."""
        return self._referred().loss

    @property
    def hardness(self) -> Floats:
        """Mean rank of each sample by other models, hard = 1, float32 [n]; NaN where unknown."""
        return self._referred().hardness

    def _referred(self) -> Reference:
        if self._reference is None:
            raise ConfigError(f"A plug-in reads {NO_REFERENCE}.")
        return self._reference

    @property
    def quality(self) -> Floats:
        """The user's own column, high = good, float32 [n], read-only; NaN where unknown, as everywhere without `quality=`."""
        if self._quality is None:
            return np.full(self.n, np.nan, dtype=np.float32)
        return _read_only(self._quality)

    @property
    def unseen(self) -> Bools:
        return self.seen == 0

    @functools.cached_property
    def age(self) -> npt.NDArray[np.int32]:
        """Windows since the last visit, int32 [n]; never visited counts from before the first window."""
        age = np.int32(self.clock.window) - self.last_seen
        age.setflags(write=False)
        return age


def _read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    view = array.view()
    view.setflags(write=False)
    return view


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Verdict:
    """What a filter says: which samples may be visited, which must be, and why."""

    keep: Bools | None = None
    """False = left out of this window, bool [n]; None leaves nothing out."""
    force: Bools | None = None
    """True = visited for certain, budget permitting, even if another filter left it out; bool [n]."""
    factor: Floats | None = None
    """Factor for the loss weight of a visited sample, float32 [n]; 0 = seen, not learnt. The mean weight is unchanged."""
    noise: float | None = None
    """Estimated share of wrong labels; NaN if it is not estimated yet, None if the filter has no opinion."""
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Candidates:
    """What a sampler chooses from: the samples that passed the filters and are not forced, M of them."""

    view: View
    ids: Ids
    """int64 [M], ascending."""
    importance: Floats
    """Rank-normalised, in [0, 1], float32 [M]."""
    noise: float | None = None
    """Share of wrong labels, the highest estimate of the filters; NaN = not estimated yet, None = no filter estimates it."""
    raw_of_all: Floats
    """Weighted sum of the scores before normalisation for all samples, float32 [n]; NaN where nothing is known."""

    @property
    def raw(self) -> Floats:
        """The raw scores of the candidates, float32 [M]."""
        return self.raw_of_all[self.ids]

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Draw:
    """What a sampler returns: positions among the candidates and their inclusion probabilities."""

    positions: Ids
    """int64 [m], each at most once, any order."""
    inclusion: Floats | None = None
    """Inclusion probability of each drawn sample, float32 [m]; None if it has no meaning."""
    temper: float | None = None
    """Exponent on the loss weights 1 / p: 1 is unbiased, less prefers samples drawn often; None: 1 if the sampler's card
    says `unbiased`, otherwise no weights."""
    note: str = ""
    """What the sampler did, for the notes of the plan."""
