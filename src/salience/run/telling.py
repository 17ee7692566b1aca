"""What a run reports: events of its windows, findings in its ledger, its summary and its report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from salience._version import __version__
from salience.config import SelectConfig
from salience.events.kinds import FilterNote, RunStarted, WindowClosed, WindowPlanned
from salience.plan import Plan
from salience.select import preset
from salience.select.findings import Study, study
from salience.select.summary import summarise

if TYPE_CHECKING:
    from salience.report.words import SampleNames
    from salience.run.run import Run


def run_started(run: Run) -> RunStarted:
    """The event of a run at its start."""
    setup, config = run.setup, run.planning.config
    return RunStarted(
        salience=__version__, torch=torch.__version__, population=setup.n, batch_size=setup.batch_size,
        epochs=setup.epochs, steps=setup.steps, pieces=setup.pieces, seed=setup.seed, world=setup.world,
        drop_last=setup.drop_last,
        select=config.to_dict() if isinstance(config, SelectConfig) else run.planning.described,
        knowledge="" if run.sharing is None else run.sharing.known.digest,
    )  # fmt: skip


def window_planned(run: Run, plan: Plan) -> WindowPlanned:
    """The event of a plan."""
    return WindowPlanned(
        window=plan.window, picked=len(plan), population=plan.population, progress=run.course.progress,
        seconds=run.voice.watch.seconds.get("plan", 0.0), visited=run.course.visits,
        filters=tuple(FilterNote(name=n.name, dropped=n.dropped, forced=n.forced, reason=n.reason) for n in plan.notes),
        by_importance=picked_by_importance(plan), resolution=plan.resolution,
    )  # fmt: skip


def warn_of_plan(run: Run, plan: Plan) -> None:
    """Warn of what a user may not expect of a new window."""
    setup, left = run.setup, run.course.steps_left
    if not run.course.left:
        run.voice.warn_once(
            f"drop_last leaves no batch: there are {len(plan)} samples and a batch has {plan.batch_size}."
        )
    if plan.window == setup.windows if left is None else left <= 0:
        more = (
            f"epochs are made than epochs={setup.epochs}"
            if left is None
            else f"steps are made than steps={setup.steps}"
        )
        run.voice.warn_once(f"More {more}: they go on as the last epoch; progress stays at 1.")


def window_closed(run: Run, *, finished: bool) -> WindowClosed:
    """The event of the window in progress, at its end."""
    course, shard = run.course, run.course.shard
    return WindowClosed(
        window=course.window, batches=len(course.delivered), of=0 if shard is None else len(shard), finished=finished,
        visited=course.visits, loss=_mean_loss(run), overhead=dict(run.voice.watch.seconds), **run.watching.spent(),
    )  # fmt: skip


def _mean_loss(run: Run) -> float | None:
    """Mean loss of the samples visited in this window; None where it is not known yet, as on several ranks."""
    if run.setup.ranks is not None:
        return None
    ledger = run.recording.ledger
    visited = (ledger.last_seen == run.course.window) & np.isfinite(ledger.last_loss)
    return float(ledger.last_loss[visited].mean(dtype=np.float64)) if visited.any() else None


def picked_by_importance(plan: Plan) -> tuple[float, ...] | None:
    """Share of the samples that is visited, in each tenth of importance, the least important first; None if all are alike."""
    if plan.importance_of_all is None or plan.all_alike:
        return None
    tenth = np.minimum((plan.importance_of_all.astype(np.float32) * 10).astype(np.int64), 9)
    visited = np.zeros(plan.population, dtype=bool)
    visited[plan.ids] = True
    every = np.bincount(tenth, minlength=10)
    return tuple((np.bincount(tenth[visited], minlength=10) / np.maximum(1, every)).round(4).tolist())


def studied(run: Run) -> Study:
    """Findings in the ledger as it is now; an unchanged ledger is not examined twice."""
    copies, course = run.copying.found, run.course
    near = None if copies is None else (copies.group, copies.similarity)
    with run.voice.watch("findings"):
        run.study = study(
            run.recording.ledger, near, windows=course.window, visits=course.visits_before, last=run.study
        )
    return run.study


def emit_findings(run: Run) -> None:
    """Write what is found in the ledger to the event log, unless it was written before."""
    before = run.study
    if studied(run) is not before:
        run.events.emit(studied(run).findings)


def summary(run: Run, *, local: bool) -> dict[str, Any]:
    """What the run has learnt so far, as plain numbers; `local` = without asking other ranks."""
    if run.setup.ranks is None or not local:
        run.flush()
    setup, course, config = run.setup, run.course, run.planning.config
    selects = isinstance(config, SelectConfig)
    epochs = max(1, run.epoch) if setup.stream else course.window // setup.pieces
    found = summarise(
        run.recording.ledger, config if isinstance(config, SelectConfig) else preset("default"),
        windows=setup.epochs or max(10, epochs), seed=setup.seed, batch_size=setup.global_batch,
        reference=run.sensing.reference, evaluations=run.evaluations, studied=studied(run),
        selected=(epochs, course.visits_before) if selects else None,
    )  # fmt: skip
    if setup.steps is not None and found["selected"] is not None:
        found["selected"]["steps"] = course.batches - len(course.delivered)
    return found


def report(run: Run, classes: Sequence[str] | None, *, names: SampleNames = None, local: bool) -> str:
    """The summary as text, with names of classes and samples and the report of each part; also written to the event log."""
    from salience.report.text import render

    if run.setup.ranks is None or not local:
        run.flush()
        run.copying.look(run.recording.ledger, run.course.window, last=True)
    emit_findings(run)
    told = run.events.emit("observed", summary=summary(run, local=local))["summary"]
    text = render(told, names=classes, samples=names)
    if run.feeding is not None:
        run.feeding.compare(run.trace, None if run.staging is None else run.staging.treating.unread)
    return "\n\n".join([text, *filter(None, (part.report() for part in run.parts))])
