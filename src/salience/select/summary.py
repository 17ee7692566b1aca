"""What a run has learnt about its samples, as plain numbers: classes, hardest, never learnt, what selection would save."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from salience.config import SelectConfig
from salience.curves import Shorter, shorter
from salience.events import Findings
from salience.ledger import Ledger
from salience.ledger.ledger import LOSS_SMOOTHING
from salience.select.findings import SAMPLES_SHOWN, Study, study
from salience.select.noise import Judgement
from salience.select.pipeline import Pipeline
from salience.select.view import Reference

Results = Sequence[tuple[float, float]]
"""Progress and metric of validation results."""


def summarise(
    ledger: Ledger,
    forecast_with: SelectConfig,
    *,
    windows: int,
    seed: int = 0,
    batch_size: int = 1,
    reference: Reference | None = None,
    evaluations: Results | None = None,
    selected: tuple[int, int] | None = None,
    studied: Study | None = None,
) -> dict[str, Any]:
    """JSON-ready summary of a ledger; the forecast runs `forecast_with` over `windows` windows, given what is known now.

    `evaluations` are the validation results of the run; None if only its ledger is known. `selected` are the windows and
    visits that a selecting run has made. `studied` is what was found in the ledger as it is now, if that is known already.
    """
    studied = studied or study(ledger)
    found = studied.findings
    seen = ledger.seen > 0
    known = seen & np.isfinite(ledger.mean_loss)
    hardest = _top(np.where(known, ledger.mean_loss, -np.inf), int(known.sum()))
    classified = seen & (ledger.guess >= 0)
    never = np.flatnonzero(classified & (ledger.right == 0) & (ledger.seen >= 2))
    never = never[np.argsort(-ledger.mean_loss[never], kind="stable")]
    return {
        "samples": ledger.n,
        "seen": int(seen.sum()),
        "visits": int(ledger.seen.sum(dtype=np.int64)),
        "trained": int(ledger.trained.sum(dtype=np.int64)),
        "not_finite": found.not_finite,
        "mean_loss": float(ledger.mean_loss[known].mean()) if known.any() else None,
        "classes": [{"class": one.label, **asdict(one)} for one in found.classes],
        "class_count": found.class_count,
        "hardest": [_sample(ledger, int(i)) for i in hardest],
        "never_learnt": len(never),
        "never_learnt_samples": [_sample(ledger, int(i)) for i in never[:SAMPLES_SHOWN]],
        "suspects": _suspects(ledger, found),
        "forgotten": int((ledger.forgotten > 0).sum()) if classified.any() else None,
        "forecast": forecast(
            ledger, forecast_with, windows=windows, seed=seed, batch_size=batch_size, reference=reference,
            evaluations=evaluations, judged=studied.judged,
        ),
        "selected": None if selected is None or not selected[0] else _saved(*selected, ledger.n),
    }  # fmt: skip


def forecast(
    ledger: Ledger,
    config: SelectConfig,
    *,
    windows: int,
    seed: int = 0,
    batch_size: int = 1,
    reference: Reference | None = None,
    evaluations: Results | None = None,
    judged: Judgement | None = None,
) -> dict[str, Any]:
    """The visits `config` would have made over `windows` windows, what a middle window would leave out, and what that costs.

    The cost is that of a run on all data with as many visits (`Shorter`), the only one that can be estimated from a curve.
    """
    pipeline = Pipeline(config, reference=reference)
    budgets = np.array([pipeline.budget(window, windows, ledger.n) for window in range(windows)])
    middle = windows // 2
    plans = {
        window: pipeline.plan(ledger, window=window, windows=windows, batch_size=batch_size, seed=seed, judged=judged)
        for window in _telling_windows(budgets, middle)
    }
    order = sorted(plans, key=lambda window: budgets[window])
    spent = np.interp(budgets, budgets[order], [float(len(plans[window])) for window in order])
    visits, full = round(float(spent.sum())), windows * ledger.n
    skipped = np.ones(ledger.n, dtype=bool)
    skipped[plans[middle].ids] = False
    known = skipped & np.isfinite(ledger.mean_loss)
    return {
        **_saved(windows, visits, ledger.n),
        "skipped_in_middle": int(skipped.sum()),
        "skipped_mean_loss": float(ledger.mean_loss[known].mean()) if known.any() else None,
        **asdict(_shorter(ledger, evaluations, share=visits / full, epochs=windows)),
        "config": config.to_dict(),
    }


def _telling_windows(budgets: np.ndarray, middle: int) -> list[int]:
    """The middle window, and those nearest to it with the smallest and the largest budget: filters have an effect in each."""
    far = np.abs(np.arange(len(budgets)) - middle)
    ends = [int(np.argmin(np.where(budgets == end, far, len(budgets)))) for end in (budgets.min(), budgets.max())]
    found = {int(budgets[window]): window for window in (*ends, middle)}
    return list(found.values())


def _saved(windows: int, visits: int, population: int) -> dict[str, Any]:
    full = windows * population
    return {"windows": windows, "visits": visits, "visits_full": full, "saved": 1 - visits / full}


def _shorter(ledger: Ledger, evaluations: Results | None, *, share: float, epochs: int) -> Shorter:
    """What a run on all data with `share` of the visits would lose, by validation results or else by training losses."""
    progress, metric = zip(*evaluations, strict=True) if evaluations else ((), ())
    fall = training_fall(ledger.last_loss, ledger.mean_loss, float(ledger.seen.mean()))
    found = shorter(progress, metric, share=share, epochs=epochs, fall=fall)
    if evaluations is not None:
        return found
    return replace(found, cannot_say="a ledger holds no validation results; `salience report` has them from the log")


def _suspects(ledger: Ledger, found: Findings) -> dict[str, Any] | None:
    """Labels the training history contradicts, most certain first, and their estimated share; None without logits."""
    if not found.judged:
        return None
    shown = [{**_sample(ledger, one.id), **asdict(one)} for one in found.suspects]
    return {
        "noise_rate": found.noise_rate, "count": found.suspected, "expected": found.expected, "weak": found.weak,
        "samples": shown,
    }  # fmt: skip


def _top(score: np.ndarray, available: int) -> np.ndarray:
    """Positions of the SAMPLES_SHOWN largest, largest first."""
    count = min(SAMPLES_SHOWN, available)
    if count == 0:
        return np.empty(0, dtype=np.int64)
    best = np.argpartition(-score, count - 1)[:count]
    return best[np.argsort(-score[best], kind="stable")]


def _sample(ledger: Ledger, i: int) -> dict[str, Any]:
    return {
        "id": i,
        "label": int(ledger.label[i]),
        "guess": int(ledger.guess[i]),
        "mean_loss": float(ledger.mean_loss[i]),
        "seen": int(ledger.seen[i]),
        "right": int(ledger.right[i]) if ledger.guess[i] >= 0 else None,
    }


def training_fall(
    last_loss: npt.NDArray[np.float32], mean_loss: npt.NDArray[np.float32], visits: float
) -> float | None:
    """Fall of the training loss over the last fifth of `visits` per sample, as a share of itself; None if unclear.

    An exponential mean with weight a for the newest value trails a line by (1 - a) / a visits, one with a = 1/2, so mean - last
    is the fall per visit, d; a fifth of the visits before the end the loss was last + d visits / 5. Unclear: fewer than three
    visits, or within two standard errors of zero. A loss that does not fall shows nothing: a decayed rate ends every fall.
    """
    known = np.isfinite(last_loss) & np.isfinite(mean_loss)
    if visits < 3 or int(known.sum()) < 2:
        return None
    step = mean_loss[known].astype(np.float64) - last_loss[known]
    fall = float(step.mean())
    if fall <= 2 * float(step.std(ddof=1)) / np.sqrt(len(step)):
        return None
    fall *= LOSS_SMOOTHING / (1 - LOSS_SMOOTHING) * visits / 5
    return fall / (float(last_loss[known].mean()) + fall)
