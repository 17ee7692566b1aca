"""What the ledger held about some of the samples after each window: how losses fell, fluctuated or stayed.

A ledger only holds the present. A history keeps a few of its columns after every window, for up to MAX_SAMPLES samples drawn by
the seed: ten bytes per sample and window.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from salience.errors import StateError
from salience.files import read_npz, write_npz
from salience.ledger.ledger import Ledger, half
from salience.seeds import TIES, generator

FORMAT = "salience-history-1"
MAX_SAMPLES = 5_000
"""Maximum number of samples that are followed."""
MAX_WINDOWS = 200
"""Maximum number of windows that are kept; when there are more, every second one is dropped."""
MAX_HALF = 60_000
"""Larger values are kept as this, which half precision can hold."""
FOLLOWED: dict[str, type[np.generic]] = {
    "last_loss": np.float16, "var_loss": np.float16, "confidence": np.float16, "forgotten": np.int16, "right": np.int16,
}  # fmt: skip
"""The columns that are kept, and their types."""


class History:
    """Columns of the ledger after each window, [windows, followed samples]."""

    def __init__(self, n: int, seed: int = 0) -> None:
        self.n = n
        self.ids: npt.NDArray[np.int64] = np.arange(n)
        """The samples followed, ascending, int64 [m]."""
        if n > MAX_SAMPLES:
            self.ids = np.sort(generator(seed, TIES, n).choice(n, MAX_SAMPLES, replace=False))
        self.windows: list[int] = []
        self._every = 1
        self._rows: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in FOLLOWED}

    def note(self, ledger: Ledger, window: int) -> None:
        """Keep what the ledger says after `window`, replacing an earlier record of the same window."""
        if window % self._every:
            return
        if window in self.windows:
            self._cut(self.windows.index(window))
        self.windows.append(window)
        for name, dtype in FOLLOWED.items():
            values = ledger[name].take(self.ids)
            if values.dtype == np.float32:
                values = half(np.clip(values, -MAX_HALF, MAX_HALF))
            elif values.dtype != dtype:
                values = np.minimum(values, np.iinfo(np.int16).max).astype(dtype)
            self._rows[name].append(values)
        if len(self.windows) > MAX_WINDOWS:
            self._every *= 2
            stay = [i for i, window in enumerate(self.windows) if window % self._every == 0]
            self.windows = [self.windows[i] for i in stay]
            self._rows = {name: [rows[i] for i in stay] for name, rows in self._rows.items()}

    def _cut(self, length: int) -> None:
        del self.windows[length:]
        for rows in self._rows.values():
            del rows[length:]

    def __len__(self) -> int:
        """Number of windows."""
        return len(self.windows)

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        """One column, [windows, followed samples]."""
        rows = self._rows[name]
        return np.stack(rows) if rows else np.empty((0, len(self.ids)), dtype=FOLLOWED[name])

    def state_dict(self) -> dict[str, npt.NDArray[Any]]:
        columns = {name: self[name] for name in FOLLOWED}
        head = {"n": np.array(self.n), "every": np.array(self._every), "ids": self.ids}
        return {**head, "windows": np.array(self.windows, dtype=np.int64), **columns}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        names = ("n", "every", "ids", "windows", *FOLLOWED)
        missing = [name for name in names if name not in state]
        if missing:
            raise StateError(f"The saved history lacks {', '.join(missing)}.")
        found = {name: np.asarray(state[name]) for name in names}
        n, ids, windows = int(found["n"]), found["ids"], found["windows"]
        fits = (
            ids.ndim == windows.ndim == 1 and ids.dtype.kind == windows.dtype.kind == "i" and int(found["every"]) >= 1
        )
        fits = fits and bool(((ids >= 0) & (ids < n)).all()) and bool((np.diff(windows) > 0).all())
        fits = fits and all(
            found[name].shape == (len(windows), len(ids)) and found[name].dtype == dtype
            for name, dtype in FOLLOWED.items()
        )
        if not fits:
            raise StateError("The saved history has columns whose types or shapes do not fit each other.")
        self.n, self.ids, self.windows, self._every = n, ids, windows.tolist(), int(found["every"])
        self._rows = {name: list(found[name]) for name in FOLLOWED}


def save(history: History, path: str | Path) -> None:
    """Write the history; the file appears whole or not at all."""
    write_npz(path, {"format": np.array(FORMAT), **history.state_dict()})


def load(path: str | Path) -> History:
    history = History(0)
    try:
        history.load_state_dict(read_npz(path, FORMAT, "history"))
    except StateError as cause:
        raise StateError(f"{str(path)!r} cannot be loaded. {cause}") from cause
    return history
