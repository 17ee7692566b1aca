"""salience.Observer: the ledger, findings and report for loops that draw their own samples. Nothing else is touched."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from salience._version import __version__
from salience.errors import ConfigError, LossError, MissingExtra, StateError
from salience.events import EventLog
from salience.ledger import COLUMNS, Ledger
from salience.ranks import current_ranks
from salience.report.sinks import Sink
from salience.run.losses import check_losses
from salience.run.part import Batch, Setup, Voice
from salience.run.planning import Planning
from salience.run.recording import Recording
from salience.run.watching import open_sinks
from salience.select import preset
from salience.select.findings import Study, study
from salience.select.summary import summarise
from salience.watch.usage import UsageRecord

if TYPE_CHECKING:
    from salience.report.words import Names, SampleNames

STATE_VERSION = 1
NO_PRIORITY = 1e-6
"""Added to every loss, so that a sample whose loss is 0 can still be drawn."""


class Observer:
    """Records the losses of samples that your own code draws.

        observer = salience.Observer(len(data))
        for ids, x, y in my_own_batches():
            logits = model(x)
            losses = F.cross_entropy(logits, y, reduction="none")
            losses.mean().backward(); ...
            observer.record(ids, losses, logits, y)
        print(observer.report())

    A window, by which the ledger measures age, is `n` recorded samples over all ranks. `labels` are the classes, int [n], if
    they are known beforehand; `ledger`, `log`, `sinks` and `strict` are those of `Loader`.
    """

    def __init__(
        self,
        n: int,
        *,
        labels: npt.ArrayLike | None = None,
        ledger: Ledger | str | Path | None = None,
        log: EventLog | str | Path | None = None,
        sinks: Sequence[str | Sink] = (),
        strict: bool = False,
    ) -> None:
        self._setup = Setup(n=n, batch_size=1, epochs=None, seed=0, drop_last=False, ranks=current_ranks())
        self.events = log if isinstance(log, EventLog) else EventLog(log if self._setup.rank == 0 else None)
        """The event log."""
        self._voice = Voice(self.events, strict=strict)
        open_sinks(self._setup, self._voice, sinks)
        self._recording = Recording(self._setup, self._voice, ledger)
        self._planning = Planning(self._setup, None, self._voice)
        if labels is not None:
            self._recording.ledger.set_labels(labels)
        self._recorded = self._batches = self._window = self._closed_at = 0
        self._usage = UsageRecord()
        self._opened_at = time.perf_counter()
        self._study: Study | None = None
        self.events.emit(
            "run", salience=__version__, torch=torch.__version__, population=n, batch_size=1, epochs=None, seed=0,
            world=self._setup.world, drop_last=False, select="recorded",
        )  # fmt: skip

    @property
    def n(self) -> int:
        """Number of samples."""
        return self._setup.n

    @property
    def visits(self) -> int:
        """Number of losses recorded so far; with several ranks, the number on this rank times the number of ranks."""
        return self._recorded * self._setup.world

    # --- a batch ---

    def record(
        self,
        ids: Tensor | npt.ArrayLike,
        losses: Tensor,
        logits: Tensor | None = None,
        targets: Tensor | None = None,
        *,
        trained: bool = True,
    ) -> None:
        """Enter one loss per sample, [B], for the samples `ids`, int [B]; an id may occur twice.

        With `logits` [B, C] and integer `targets` [B], the ledger also learns margins, guesses and more. Ids on the CPU and
        losses on a GPU cost no synchronisation. `trained=False`: the samples were evaluated and not trained on.
        """
        begin, rows = time.perf_counter(), self._rows(ids)
        window = self.visits // self.n
        batch = Batch(window, self._batches, rows)
        check_losses("record", losses, batch)
        labels = self._recording.labels(batch, len(losses), logits, targets)
        if window > self._window and self._setup.ranks is None:
            self.flush()
        self._recording.recorder.record(rows, losses, labels.logits, labels.classes, window=window, trained=trained)
        self._recorded, self._batches = self._recorded + len(rows), self._batches + 1
        self._voice.watch.add("record", time.perf_counter() - begin)
        self._usage.note()

    def forget(self, ids: Tensor | npt.ArrayLike) -> None:
        """Forget what is known about the samples `ids`, for instance after new entries were written to a replay buffer."""
        rows, ledger = self._rows(ids), self._recording.ledger
        self.flush()
        if self._setup.ranks is None or self._setup.ranks.leads_node:
            for name, column in COLUMNS.items():
                ledger[name][rows] = column.first
            ledger.vote[rows], ledger.vote_p[rows] = 0, 0

    def priorities(self, power: float = 0.6) -> npt.NDArray[np.float32]:
        """Probabilities for drawing each sample, float32 [n], which sum to 1: (last loss + 1e-6)^power (Schaul et al. 2016).

        Samples without a loss count as the highest so far. `power` 0 is uniform, 1 proportional to the loss.
        """
        if not 0 <= power <= 1:
            raise ConfigError(f"priorities: power is {power}; it must be from 0 (uniform) to 1 (proportional).")
        last = self.ledger.last_loss.astype(np.float64)
        known = np.isfinite(last)
        size = np.abs(np.where(known, last, np.abs(last[known]).max(initial=0.0))) + NO_PRIORITY
        weight = size**power
        return (weight / weight.sum()).astype(np.float32)

    def _rows(self, ids: Tensor | npt.ArrayLike) -> npt.NDArray[np.int64]:
        array = ids.detach().cpu().numpy() if isinstance(ids, Tensor) else np.asarray(ids)
        if array.ndim != 1 or (len(array) and array.dtype.kind not in "iu"):
            raise LossError(f"ids are {array.dtype} of shape {array.shape}; pass one integer per sample, [B].")
        if len(array) and (array.min() < 0 or array.max() >= self.n):
            raise LossError(
                f"ids go from {array.min()} to {array.max()}; with {self.n} samples they must be from 0 to {self.n - 1}."
            )
        return array.astype(np.int64)  # a copy: the caller may modify these in place

    # --- windows ---

    def flush(self) -> None:
        """Enter what was recorded into the ledger. Collective: each rank must call it the same number of times."""
        self._recording.flush(self._window)
        if (window := self.visits // self.n) > self._window:
            self._close(window)

    def _close(self, window: int) -> None:
        """As many samples as there are were recorded: a window ends, which is logged as if it had been planned."""
        ledger, done, now = self._recording.ledger, self._batches, time.perf_counter()
        self._planning.note_course(ledger)
        visited = (ledger.last_seen == self._window) & np.isfinite(ledger.last_loss)
        alone = self._setup.ranks is None and bool(visited.any())  # else others know more of it
        self.events.emit(
            "plan",
            window=self._window,
            picked=self.visits - self._closed_at,
            population=self.n,
            visited=self._closed_at,
        )
        self.events.emit(
            "window", window=self._window, batches=done, of=done, finished=True, visited=self.visits,
            seconds=now - self._opened_at, loss=float(ledger.last_loss[visited].mean(dtype=np.float64)) if alone else None,
            overhead=dict(self._voice.watch.seconds), usage=self._usage.taken(),
        )  # fmt: skip
        self._usage.begin()
        self._window, self._batches, self._opened_at, self._closed_at = window, 0, now, self.visits

    def evaluated(self, metric: float, **more: float) -> None:
        """Report a validation result, higher is better; it goes into the event log."""
        self.events.emit(
            "evaluated", metric=float(metric), progress=0.0, window=self.visits // self.n, visited=self.visits, **more
        )

    # --- what is known ---

    @property
    def ledger(self) -> Ledger:
        """What is known about every sample, up to date; with several ranks, as of the last `flush()`."""
        if self._setup.ranks is None:
            self.flush()
        return self._recording.ledger

    def summary(self) -> dict[str, Any]:
        """What the run has learnt so far, as plain numbers. Collective with several ranks."""
        self.flush()
        found = summarise(
            self._recording.ledger, preset("default"), windows=max(10, self._window), seed=0, batch_size=1,
            studied=self._studied(),
        )  # fmt: skip
        found["forecast"]["cannot_say"] = "an Observer does not know how long the run will be"
        return found

    def report(self, path: str | Path | None = None, *, names: SampleNames = None, classes: Names = None) -> str:
        """The summary as text, also written to the event log, as are the findings. Collective with several ranks.

        With a `path` ("report.html") rank 0 also writes it as a page; `names` and `classes` are as in `Loader.report`.
        """
        from salience.report.text import render

        before, summary = self._study, self.summary()
        if self._studied() is not before:
            self.events.emit(self._studied().findings)
        text = render(self.events.emit("observed", summary=summary)["summary"], names=classes, samples=names)
        if path is not None and self._setup.rank == 0:
            from salience.report.html import live_page, write_page

            write_page(path, live_page(self.events, name="this run", names=names, classes=classes))
        return text

    def _repr_html_(self) -> str | None:
        """The page of what was recorded so far, for notebooks; None without jinja2, where the notebook shows text."""
        from salience.report.html import framed, live_page

        try:
            return framed(live_page(self.events, name="this run"))
        except MissingExtra:
            return None

    def _studied(self) -> Study:
        self._study = study(self._recording.ledger, windows=self._window, visits=self.visits, last=self._study)
        return self._study

    # --- saved ---

    def state_dict(self) -> dict[str, Any]:
        """Everything recorded so far. Collective with several ranks."""
        self.flush()
        return {
            "version": STATE_VERSION, "population": self.n, "recorded": self._recorded, "window": self._window,
            "batches": self._batches, "recording": self._recording.state_dict(),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from where `state_dict()` was taken."""
        for key, mine in (("version", STATE_VERSION), ("population", self.n)):
            if state.get(key) != mine:
                raise StateError(f"The state was saved with {key} {state.get(key)!r}, this observer has {mine!r}.")
        self._recording.load_state_dict(state["recording"])
        self._recorded, self._window, self._batches = (int(state[k]) for k in ("recorded", "window", "batches"))
