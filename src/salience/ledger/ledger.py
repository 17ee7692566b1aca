"""The ledger itself: columns over N samples in one block of memory, updated with whole arrays only."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from salience.errors import ConfigError, Misattributed, StateError
from salience.ledger.columns import CLASS_LIMIT, COLUMNS, COUNT_LIMIT, VOTE_COLUMNS, VOTE_DECAY, VOTES, Column
from salience.ledger.keys import Keys
from salience.ledger.likeliest import strongest
from salience.ledger.statistics import CLASS_ROWS

Array = npt.NDArray[Any]
Ids = npt.NDArray[np.int64]
Rows = Mapping[str, npt.NDArray[np.float32]]

ARRAYS = COLUMNS | VOTE_COLUMNS
"""Everything a ledger holds, by name."""
TRIAL_FIELDS = 6
"""Number of columns of `Ledger.trial`; `select.trial` names them."""
LOSS_SMOOTHING = 0.5
"""Weight of the newest value in exponential means: visits are few, and the model changes quickly between them."""


class Ledger:
    """Columns of `COLUMNS` over `n` samples, each an attribute: `ledger.mean_loss` is a float32 array [n]."""

    def __init__(self, n: int, *, memory: mmap.mmap | None = None, fresh: bool = True) -> None:
        """`memory` is a block of `block_bytes(n)` bytes shared by several processes; by default a private one."""
        if n < 1:
            raise ConfigError(f"The data set has {n} samples; a ledger needs at least one.")
        self.n = n
        self.memory = memory
        block: Any = memory if memory is not None else np.zeros(block_bytes(n), dtype=np.uint8)
        self._columns: dict[str, Array] = {}
        offset = 0
        for name, column in sorted(ARRAYS.items(), key=lambda item: -np.dtype(item[1].dtype).itemsize):
            array = np.frombuffer(block, dtype=column.dtype, count=n * column.width, offset=offset)
            offset += array.nbytes
            self._columns[name] = array if column.width == 1 else array.reshape(n, column.width)
            if fresh and column.first != 0:  # new memory is zero, and handed out only once it is written to
                array[:] = column.first
        self.course: list[tuple[float, float, float, float]] = []
        """How often predictions contradicted labels, one row per window: among all samples, among the surest, how many those
        are, and the share of samples that the window before left out for their labels."""
        self.trial: npt.NDArray[np.float64] = np.empty((0, TRIAL_FIELDS))
        """Hard samples on trial, one row per sample and trial: see `select.trial`."""
        self.keys: Keys | None = None
        """The name of the sample of each row; None where rows are positions in one data set."""
        self._room = dict(self._columns)
        """The memory of the columns, which may be for more rows than there are."""

    def extend(self, n: int) -> None:
        """Add rows of samples never seen at the end, up to `n`; room is made for half as many again at a time."""
        if self.memory is not None:
            raise ConfigError("A ledger that processes share cannot grow; make a new one.")
        if n < self.n:
            raise ConfigError(f"The ledger has {self.n} rows and cannot shrink to {n}.")
        for name, column in ARRAYS.items():
            if n > len(self._room[name]):
                larger = np.zeros((n + n // 2, *self[name].shape[1:]), dtype=column.dtype)
                if column.first != 0:
                    larger[self.n :] = column.first
                larger[: self.n] = self[name]
                self._room[name] = larger
            self._columns[name] = self._room[name][:n]
        self.n = n

    def taken(self, rows: npt.NDArray[np.int64]) -> Ledger:
        """A private ledger of these rows of this one, int64 [m]; -1 is a sample never seen. It has no keys."""
        part, known = Ledger(len(rows)), rows >= 0
        for name in ARRAYS:
            part[name][known] = self[name][rows[known]]
        part.course = list(self.course)
        return part

    def grown(self, n: int) -> Ledger:
        """A private ledger of `n` rows that begins with the rows of this one; new rows are for samples never seen."""
        if n < self.n:
            raise ConfigError(f"The ledger has {self.n} rows and cannot shrink to {n}.")
        larger = Ledger(n)
        for name in ARRAYS:
            larger[name][: self.n] = self[name]
        larger.course, larger.trial = list(self.course), self.trial.copy()
        return larger

    def __getattr__(self, name: str) -> Array:
        try:
            return self.__dict__["_columns"][name]
        except KeyError:
            raise AttributeError(f"The ledger has no column {name!r}; it has {', '.join(COLUMNS)}.") from None

    def __getitem__(self, name: str) -> Array:
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(COLUMNS)

    def __len__(self) -> int:
        return self.n

    @property
    def nbytes(self) -> int:
        return block_bytes(self.n)

    def set_labels(self, labels: npt.ArrayLike) -> None:
        """Set the class of every sample, int [n]."""
        array = np.asarray(labels)
        if array.shape != (self.n,) or array.dtype.kind not in "iu":
            raise ConfigError(
                f"labels must be {self.n} integers, one per sample; got shape {array.shape} of {array.dtype}."
            )
        self.label[:] = array

    def check_labels(self, ids: Ids, targets: npt.NDArray[np.integer[Any]]) -> None:
        """Compare targets with the known classes of `ids`, and store classes that were not known yet."""
        known = self.label[ids]
        wrong = (known != targets) & (known >= 0)
        if wrong.any():
            first = int(np.flatnonzero(wrong)[0])
            raise Misattributed(
                f"Losses were recorded for the wrong samples: {int(wrong.sum())} of {len(ids)} targets differ from the "
                f"classes known for these ids (sample {int(ids[first])}: class {int(known[first])}, now "
                f"{int(targets[first])}). A loop that fetches ahead must use with_ids=True and pass ids= to loss(); where the "
                "target of a sample changes from visit to visit, pass no targets."
            )
        if (known < 0).any():
            self.label[ids] = targets

    def record(
        self, ids: Ids, rows: Rows, *, window: int, seen: bool = True, trained: bool = True, unique: bool = False
    ) -> int:
        """Enter one batch: `rows` maps names of statistics to float32 [B]. Returns how many losses were not finite.

        An id that occurs twice in the batch counts as two visits with their mean. `seen=False` with
        `trained=True` only counts the ids as trained: they were recorded when they were seen. `unique` says that no
        id occurs twice.
        """
        if not seen:
            if trained:
                self._count("trained", *np.unique(ids, return_counts=True))
            return 0
        finite = np.isfinite(rows["loss"])
        bad = len(ids) - int(np.count_nonzero(finite))
        if bad:
            broken, times = np.unique(ids[~finite], return_counts=True)
            self._count("bad", broken, times)
            self.last_seen[broken] = window
            ids, rows = ids[finite], {name: row[finite] for name, row in rows.items()}
        if not len(ids):
            return bad
        times = None
        if not unique and has_doubles(ids[id_order(ids)]):
            ids, rows, times = _average_doubles(ids, rows)
        self._update(ids, rows, times, window, trained)
        return bad

    def _update(self, ids: Ids, rows: Rows, times: Array | None, window: int, trained: bool) -> None:
        loss = rows["loss"]
        old = self.mean_loss.take(ids)
        first = np.isnan(old)
        step = loss - old
        # Exponential mean and variance (West 1979): m += a d;  v = (1-a)(v + a d^2); the first visit has d = v = 0.
        var = self.var_loss.take(ids)
        if first.any():
            step[first] = var[first] = 0
        new = np.uint16(1) if times is None else times.astype(np.uint16)
        if "margin" in rows:
            self._update_classified(ids, rows, new, window)
        self.last_loss[ids] = loss
        self.mean_loss[ids] = loss - (1 - LOSS_SMOOTHING) * step
        step *= step
        self.var_loss[ids] = (1 - LOSS_SMOOTHING) * (var + LOSS_SMOOTHING * step)
        self.last_seen[ids] = window
        self.seen[ids] = _saturated(self.seen.take(ids), new)
        if trained:
            self.trained[ids] = _saturated(self.trained.take(ids), new)
        if "grad_norm" in rows:
            self.grad_norm[ids] = rows["grad_norm"]

    def _update_classified(self, ids: Ids, rows: Rows, new: Any, window: int) -> None:
        """Update the votes, fading old ones by the windows since the last visit; call this before `last_seen` is updated."""
        label = rows["target"].astype(np.int32)
        guess = rows["guess"].astype(np.int32)
        right = guess == label
        self.right[ids] = _saturated(self.right.take(ids), right * new)
        lost = ids[(self.guess.take(ids) == label) & ~right]
        self.forgotten[lost] = _saturated(self.forgotten.take(lost), np.uint16(1))
        self.guess[ids] = guess
        other = rows["other"]
        self.other[ids] = np.where(other <= CLASS_LIMIT, other, -1).astype(np.int16)
        for name in ("el2n", "entropy"):
            self[name][ids] = half(rows[name])
        margin = rows["margin"]
        self.margin[ids] = _smoothed(self.margin.take(ids), margin)
        for name in ("confidence", "guess_p"):
            self[name][ids] = half(_smoothed(_single(self[name].take(ids)), rows[name]))
        self.margin_sum[ids] = self.margin_sum.take(ids) + margin * new
        if "p_0" in rows:
            waited = np.maximum(window - self.last_seen.take(ids), 1)
            self._update_votes(ids, rows, VOTE_DECAY ** waited.astype(np.float32))

    def _update_votes(self, ids: Ids, rows: Rows, decay: Array) -> None:
        classes = np.stack([rows[name] for name in CLASS_ROWS]).astype(np.int32)
        p = np.stack([rows[f"p_{k}"] for k in range(VOTES)])
        known = self.vote.take(ids, axis=0).T, np.ascontiguousarray(_single(self.vote_p.take(ids, axis=0)).T)
        vote, strength = averaged_votes(*known, classes, p, decay)
        strength = half(strength)
        for k in range(VOTES):  # one column at a time: several times as fast as whole rows
            self.vote[:, k][ids], self.vote_p[:, k][ids] = vote[k], strength[k]

    def _count(self, name: str, ids: Ids, times: Array) -> None:
        self[name][ids] = _saturated(self[name][ids], times.astype(np.uint16))

    def state_dict(self) -> dict[str, Array]:
        """Copies of every column, the votes, the course of the run and its trials."""
        course = {"course": np.array(self.course, dtype=np.float64)} if self.course else {}
        trial = {"trial": self.trial.copy()} if len(self.trial) else {}
        return {name: self[name].copy() for name in (ARRAYS if self.vote_p[:, 0].any() else COLUMNS)} | course | trial

    def load_state_dict(self, state: Mapping[str, Any], *, columns: bool = True) -> None:
        """Restore a saved state. Raises StateError, and changes nothing, unless every field can have come from a ledger.

        Without `columns`, only what is not in shared memory is restored; another process of this node loads the columns.
        """
        arrays = {name: np.asarray(state[name]) for name in state}
        course, trial = arrays.pop("course", np.empty((0, 4))), arrays.pop("trial", np.empty((0, TRIAL_FIELDS)))
        lengths = {array.shape for name, array in arrays.items() if name not in VOTE_COLUMNS}
        if lengths != {(self.n,)}:
            raise StateError(
                f"The saved ledger has columns of shape {sorted(lengths)}, this data set has {self.n} samples; "
                "load it with the data set it was made from."
            )
        for name, column in ARRAYS.items():
            if name in arrays:
                _check_values(name, arrays[name], column, self[name].shape)
        if ("vote" in arrays) != ("vote_p" in arrays):
            raise StateError("The saved ledger has votes without their probabilities, or these without votes.")
        if course.ndim != 2 or course.shape[1] != 4 or course.dtype.kind != "f":
            raise StateError(
                f"The course of the saved ledger is {course.dtype} {course.shape}; it must be four numbers per window."
            )
        if not ((course >= 0) & np.isfinite(course) & (course[:, (0, 1, 0, 3)] <= 1)).all():
            raise StateError("The course of the saved ledger has shares that are not from 0 to 1.")
        _check_trial(trial, self.n)
        for name, column in ARRAYS.items() if columns else ():
            self[name][:] = arrays.get(name, np.asarray(column.first))
        self.course = [(d, s, m, o) for d, s, m, o in course.tolist()]
        self.trial = trial.astype(np.float64)


def _check_trial(trial: Array, n: int) -> None:
    """Raise StateError unless these can be the rows of trials over `n` samples."""
    if trial.ndim != 2 or trial.shape[1] != TRIAL_FIELDS or trial.dtype.kind != "f":
        raise StateError(
            f"The samples on trial in the saved ledger are {trial.dtype} {trial.shape}; each must be {TRIAL_FIELDS} numbers."
        )
    whole, before, after = trial[:, :4], trial[:, 4], trial[:, 5]
    fine = (whole == np.floor(whole)).all() and np.isfinite(whole).all() and (whole >= 0).all()
    fine = fine and (trial[:, 1] < n).all() and (trial[:, 2] <= 1).all()
    if not (fine and np.isfinite(before).all() and (before >= 0).all() and ((after >= 0) | np.isnan(after)).all()) or (
        np.isinf(after).any()
    ):
        raise StateError("The samples on trial in the saved ledger have numbers that no trial gives.")


def _check_values(name: str, values: Array, column: Column, shape: tuple[int, ...]) -> None:
    """Raise StateError unless `values` are numbers that the column can hold, within its limits (or NaN)."""
    if values.shape != shape:
        raise StateError(f"The saved ledger has {name} of shape {values.shape}, wanted {shape}.")
    dtype, low, high = np.dtype(column.dtype), column.low, column.high
    whole = dtype.kind in "iu"
    if not (values.dtype.kind in "iu" if whole else values.dtype.kind == "f" and np.can_cast(values.dtype, dtype)):
        raise StateError(f"The saved ledger has {name} as {values.dtype}; it must be {dtype}.")
    if whole:
        held = np.iinfo(dtype.char)
        low, high = max(low, held.min), min(high, held.max)
    flat = values.ravel()
    least, most = float(np.fmin.reduce(flat)), float(np.fmax.reduce(flat))  # NaN only where there is nothing else
    if least < low or most > high:
        raise StateError(f"The saved ledger has {name} from {least} to {most}; allowed: {low:g} to {high:g}.")


def block_bytes(n: int) -> int:
    """Size in bytes of a ledger over `n` samples."""
    return n * sum(column.nbytes for column in ARRAYS.values())


def averaged_votes(vote: Array, strength: Array, classes: Array, p: Array, decay: Array) -> tuple[Array, Array]:
    """Average one more prediction per sample into its votes, [VOTES, B] each, the likeliest first; `decay` is b, [B].

    t <- b t + (1 - b) p, over the classes named on either side; the VOTES largest are kept. The first prediction is taken
    unchanged.
    """
    decay = np.where(strength[0] > 0, decay, np.float32(0))
    both = np.concatenate((decay * strength, (1 - decay) * p))
    old, new = both[:VOTES], both[VOTES:]
    same = (vote[:, None] == classes) & (old > 0)[:, None]  # [old, new, B]
    old += (same * new).sum(axis=1)
    new[same.any(axis=0)] = 0
    strength, vote = strongest(both, np.concatenate((vote, classes)))
    return vote, strength


def id_order(ids: Ids) -> npt.NDArray[np.int64]:
    """The order that sorts ids, so that memory is visited from front to back: a radix sort, 16 bits at a time."""
    order = np.argsort(ids.astype(np.uint16), kind="stable")
    rest = ids >> 16
    while rest.any():
        order = order[np.argsort(rest.astype(np.uint16)[order], kind="stable")]
        rest >>= 16
    return order


def has_doubles(ordered: Ids) -> bool:
    return bool((ordered[1:] == ordered[:-1]).any())


def _smoothed(old: Array, value: Array) -> Array:
    """m + a (x - m), or x if nothing was known."""
    step = value - old
    step[np.isnan(step)] = 0
    return value - (1 - LOSS_SMOOTHING) * step


def half(values: Array) -> Array:
    """float32 to float16 by torch, which uses the processor's own conversion; NumPy's is many times slower."""
    return torch.from_numpy(values).half().numpy()


def _single(values: Array) -> Array:
    return torch.from_numpy(values).float().numpy()


def _saturated(count: Array, new: Any) -> Array:
    """count + new, at most the counter's limit."""
    return count + np.minimum(new, COUNT_LIMIT - count)


def _average_doubles(ids: Ids, rows: Rows) -> tuple[Ids, Rows, Array]:
    """Unique ids, the mean of each row over repeated ids (the last value for classes), and how often each id occurs."""
    unique, group, times = np.unique(ids, return_inverse=True, return_counts=True)
    last = np.empty(len(unique), dtype=np.int64)
    last[group] = np.arange(len(ids))
    averaged = {
        name: row[last]
        if name in ("target", "guess", "other") or name.startswith(("class_", "p_"))
        else (np.bincount(group, weights=row, minlength=len(unique)) / times).astype(np.float32)
        for name, row in rows.items()
    }
    return unique, averaged, times
