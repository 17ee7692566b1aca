"""A ledger that jobs share: each gives what it has learnt, and the jobs of one comparison all start from the same snapshot.

    FOLDER/jobs/NAME.npz           what one job knows, replaced at the end of each of its windows
    FOLDER/comparisons/NAME.npz    what the jobs of a comparison start from, merged once, by the first of them

Whoever starts later knows more. Jobs that are to be compared must not differ in that, so what a comparison starts from is
fixed when its first job asks.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from salience.errors import ConfigError, StateError
from salience.ledger.files import COUNTERS, load, merge, save
from salience.ledger.ledger import ARRAYS, Ledger

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=,-]{0,120}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """What a job starts from."""

    ledger: Ledger | None = None
    """The merged ledger of other jobs; None if nothing is known yet."""
    jobs: int = 0
    """Number of jobs that it was learnt by."""
    comparison: str = ""
    """Name of the comparison whose jobs all start from it; empty if each job starts from what is known at that moment."""

    @property
    def digest(self) -> str:
        """Eight hex digits, equal for equal knowledge; "nothing" if there is none."""
        if self.ledger is None:
            return "nothing"
        return f"{zlib.crc32(b''.join(array.tobytes() for array in self.ledger.state_dict().values())):08x}"


@runtime_checkable
class Board(Protocol):
    """Where the jobs of a data set leave what they learn, and find what others have learnt."""

    job: str
    """Name of this job."""

    def begin(self) -> Known:
        """What this job starts from."""
        ...

    def give(self, ledger: Ledger) -> None:
        """Leave what this job knows by now, in place of what it left before."""
        ...


class SharedLedger:
    """A folder through which jobs over one data set share what they learn: pass it as `ledger=` to each of their Loaders.

        ledger = salience.SharedLedger("runs/ledgers", comparison="learning rates")   # in every job

    A job starts from the merged ledgers of the others and, where it selects, does not warm up; at the end of every window it
    leaves its own ledger in `folder` for jobs that start later. All jobs of one `comparison` start from what was known when
    the first of them did, so that none has an advantage. Without a comparison, each starts from all that is known by then:
    such runs should not be compared with each other. `job` names this job (default: a name of its own).
    """

    def __init__(self, folder: str | os.PathLike[str], *, comparison: str = "", job: str = "") -> None:
        self.folder, self.comparison = Path(folder), comparison
        self.job = job or f"{os.getpid()}-{secrets.token_hex(4)}"
        for what, name in (("comparison", comparison), ("job", self.job)):
            if name and not NAME.fullmatch(name):
                raise ConfigError(
                    f"{what} is {name!r}, which becomes the name of a file; use letters, digits and . _ = , - alone."
                )

    def __repr__(self) -> str:
        return f"SharedLedger({str(self.folder)!r}, comparison={self.comparison!r}, job={self.job!r})"

    def begin(self) -> Known:
        """What this job starts from: the snapshot of its comparison, or what is known now."""
        if not self.comparison:
            return self._now()
        file = self.folder / "comparisons" / f"{self.comparison}.npz"
        nothing = file.with_suffix(".nothing")
        with self._locked():
            if not file.exists() and not nothing.exists():
                now = self._now()
                file.parent.mkdir(parents=True, exist_ok=True)
                if now.ledger is None:
                    nothing.touch()
                else:
                    save(now.ledger, file)
                    file.with_suffix(".jobs").write_text(str(now.jobs))
        if nothing.exists():
            return Known(comparison=self.comparison)
        return Known(ledger=load(file), jobs=_count(file.with_suffix(".jobs")), comparison=self.comparison)

    def give(self, ledger: Ledger) -> None:
        """Leave what this job knows by now, in place of what it left before."""
        save(ledger, self.folder / "jobs" / f"{self.job}.npz")

    def _now(self) -> Known:
        """What all other jobs have left so far."""
        files = [path for path in sorted((self.folder / "jobs").glob("*.npz")) if path.stem != self.job]
        found = [load(path) for path in files]
        if not found:
            return Known(comparison=self.comparison)
        try:
            # Of a single one, everything is taken over; votes and the course of a run cannot be merged.
            merged = found[0] if len(found) == 1 else merge(found)
        except StateError as cause:
            raise StateError(
                f"The jobs that share {str(self.folder)!r} do not train on the same data. {cause} Choose another folder."
            ) from cause
        return Known(ledger=merged, jobs=len(found), comparison=self.comparison)

    @contextmanager
    def _locked(self) -> Generator[None]:
        """Of jobs that start at once, one makes the snapshot. The lock ends with its process."""
        self.folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)


def learnt_here(ledger: Ledger, known: Ledger | None) -> Ledger:
    """A copy with what this job itself has seen, so that what it started from is not counted twice when ledgers are merged."""
    own = Ledger(ledger.n)
    own.load_state_dict(ledger.state_dict())
    if known is None:
        return own
    elsewhere = own.last_seen < 0  # visited by others alone: a job begins with no visit of its own
    for name in (*COUNTERS, "margin_sum"):
        own[name][:] = own[name] - np.minimum(known[name], own[name]) if name in COUNTERS else own[name] - known[name]
    for name, column in ARRAYS.items():
        if name not in ("size", "label"):
            own[name][elsewhere] = column.first
    return own


def _count(file: Path) -> int:
    """The number of jobs noted beside a snapshot; 1 if the note is lost."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return 1
