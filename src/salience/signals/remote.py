"""A scorer that works near the data, in a separate process, and communicates with the run through a shared folder.

    the run, at a window's start                          `salience score`, near the store
    ask()    question.pt: ids, weights, window       ->   takes the newest one, at most every `interval` seconds
    take()   scores-<window>-<part>.npz              <-   SCORE_ROWS of a few thousand samples, with that window

Files appear whole or not at all, so neither side waits or locks. Nothing is unpickled: weights are loaded with
`weights_only=True`, scores are plain arrays, and the run checks both ids and shapes before it enters them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from salience.errors import PluginError, StateError
from salience.files import atomic, read_npz, write_npz
from salience.signals.scorer import SCORE_ROWS, Found, Ids, LastLinear, score

QUESTION, SCORES = "question.pt", "scores-*.npz"
QUESTION_FORMAT, SCORES_FORMAT = "salience-question-1", "salience-scores-1"
SAMPLES_PER_FILE = 4096
"""Number of samples whose scores are sent back together."""
SECONDS_BETWEEN_LOOKS = 0.5

Samples = Callable[[Ids], Any]
"""A function from ids to a collated batch (inputs, ..., integer targets)."""


class RemoteScorer:
    """The remote scorer, seen from the run: like a `Scorer`, but its process is started elsewhere."""

    def __init__(self, model: nn.Module, folder: str | Path, *, n: int) -> None:
        self.folder, self._model, self._n = Path(folder), model, n
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for old in (self.folder / QUESTION, *self.folder.glob(SCORES)):
                old.unlink(missing_ok=True)  # of an earlier run, whose samples may be others
        except OSError as cause:
            raise PluginError(f"the folder {str(self.folder)!r} cannot be used: {cause.strerror or cause}") from cause
        self._window = -1

    def take(self) -> Found:
        """The scores of the earliest window that has new ones; raises PluginError if they cannot belong to this run."""
        files = sorted(self.folder.glob(SCORES))
        first = next((path.name.split("-")[1] for path in files), "")
        found: list[Found] = []
        for path in (path for path in files if path.name.split("-")[1] == first):
            try:
                found.append(self._checked(read_npz(path, SCORES_FORMAT, "file of scores")))
                path.unlink()
            except (StateError, OSError) as cause:
                raise PluginError(str(cause)) from cause
        if not found:
            return np.empty(0, dtype=np.int64), np.empty((len(SCORE_ROWS), 0), dtype=np.float32), max(0, self._window)
        ids = np.concatenate([part[0] for part in found])
        if len(np.unique(ids)) != len(ids):
            raise PluginError(f"the scores in {str(self.folder)!r} name a sample twice")
        return ids, np.concatenate([part[1] for part in found], axis=1), found[0][2]

    def _checked(self, arrays: dict[str, Any]) -> Found:
        ids, values, window = (arrays.get(name, np.empty(0)) for name in ("ids", "values", "window"))
        fits = ids.dtype == np.int64 and values.dtype == np.float32 and values.shape == (len(SCORE_ROWS), len(ids))
        if not fits or window.shape != () or not 0 <= int(window) <= self._window:
            raise PluginError(f"the scores in {str(self.folder)!r} are not answers to this run's questions")
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self._n:
            raise PluginError(f"the scores in {str(self.folder)!r} are of ids beyond {self._n - 1}")
        return ids, values, int(window)

    def ask(self, ids: Ids, *, window: int) -> None:
        """Leave a question: these samples, with the current weights. A question not taken yet is replaced."""
        self._window = window
        self._write({"ids": torch.from_numpy(ids.copy()), "model": self._model.state_dict(), "window": window})

    def close(self) -> None:
        """Tell the process that the run is over."""
        self._write({"over": True})

    def _write(self, question: dict[str, Any]) -> None:
        try:
            with atomic(self.folder / QUESTION, sync=False) as file:
                torch.save({"format": QUESTION_FORMAT, **question}, file)
        except (OSError, RuntimeError) as cause:
            raise PluginError(f"no question could be left in {str(self.folder)!r}: {cause}") from cause


def answer(
    folder: str | Path,
    model: nn.Module,
    samples: Samples,
    *,
    interval: float = 0.0,
    batch_size: int = 256,
    device: torch.device | str = "cpu",
    say: Callable[[str], None] = lambda text: None,
) -> int:
    """Answer the questions of a run until it is over; returns how many samples were scored.

    A new question is taken `interval` seconds after the last one at the earliest; the rest of the old one is dropped.
    """
    folder, model = Path(folder), model.to(device).eval()
    last, scored, asked, taken = LastLinear(model), 0, -1, -interval
    ids, done = np.empty(0, dtype=np.int64), 0
    while True:
        if time.monotonic() - taken >= interval or done >= len(ids):
            question = _read(folder / QUESTION)
            if question is not None and question.get("over"):
                return scored
            if question is not None and int(question["window"]) > asked:
                model.load_state_dict(question["model"])
                asked, taken, done = int(question["window"]), time.monotonic(), 0
                ids = cast(Tensor, question["ids"]).numpy()
                say(f"window {asked}: {len(ids):,} samples are wanted")
        if done >= len(ids):
            time.sleep(SECONDS_BETWEEN_LOOKS)
            continue
        some = ids[done : done + SAMPLES_PER_FILE]
        parts = [
            score(model, last, samples(part), len(part), torch.device(device)).numpy()
            for part in (some[start : start + batch_size] for start in range(0, len(some), batch_size))
        ]
        name = f"scores-{asked:06}-{done:09}.npz"
        arrays = {"ids": some, "values": np.concatenate(parts, axis=1), "window": np.array(asked)}
        write_npz(folder / name, {"format": np.array(SCORES_FORMAT), **arrays})
        done, scored = done + len(some), scored + len(some)


def _read(path: Path) -> dict[str, Any] | None:
    """The question in that file, never running code from it; None if there is none."""
    try:
        question: Any = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        return None
    except Exception as cause:  # a loader fed with rubbish may raise anything
        raise StateError(f"The question {str(path)!r} is damaged.") from cause
    if not isinstance(question, dict) or question.get("format") != QUESTION_FORMAT:
        raise StateError(f"{str(path)!r} is not a question of a run.")
    return cast("dict[str, Any]", question)
