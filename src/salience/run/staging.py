"""Staging: stages of augmentation between the data set and the batch, and which samples get all of them fresh."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from salience.errors import ConfigError
from salience.ledger import Ledger
from salience.ledger.copies import Copies
from salience.plan import Plan, Shard
from salience.run.part import Batch, Part, Voice
from salience.select.ranks import rank_normalise
from salience.treat.config import Treat
from salience.treat.curves import training_accuracy
from salience.treat.dataset import Treatment
from salience.treat.treating import Treating


class Staging(Part):
    """The treatment of the samples, window by window."""

    name = "treating"

    def __init__(self, voice: Voice, ledger: Ledger, treating: Treating, *, optional: Treat | None = None) -> None:
        self._voice, self._ledger = voice, ledger
        self.treating = treating
        self.optional = optional
        """Reuse that `auto` may switch on, where the user left that open."""
        self.reuses = optional is None
        """True while the optional reuse is on, or the user asked for it."""
        self.refused = ""
        """Why reuse cannot be tried; empty if it can."""
        self._shard: Shard | None = None
        self._result: tuple[float, int] | None = None
        """The last validation result, and the number of windows done; None once it was acted on."""
        self._treatment: Callable[[slice], Treatment] | None = None
        self._handed_over = 0.0

    def plan(self, plan: Plan, options: dict[str, Any], copies: Copies | None) -> tuple[Plan, dict[str, int]]:
        """The plan with treatment levels, and what the rehearsal asked of a Source."""
        with self._voice.watch("rehearsal"):
            said, counts = self.treating.begin(options)
        if self.optional is not None:  # nobody asked for it: whatever is said is a reason not to try it
            self.refused = said[-1] if said else self.refused
            self.treating.config = self.optional if self.reuses else replace(self.optional, kind="fresh")
            said = []
        for text in said:
            if self._voice.strict:
                raise ConfigError(text)
            self._voice.warn(text)
        return self.treating.plan(plan, self._importance(plan), copies), counts

    def _importance(self, plan: Plan) -> npt.NDArray[Any] | None:
        """Importance of every sample, [n]: what the plan says, else the rank of the mean loss; None if unused or unknown."""
        config = self.treating.config
        if plan.importance_of_all is not None or not (config.strength or config.kind in ("echo", "auto")):
            return plan.importance_of_all
        known = np.isfinite(self._ledger.mean_loss)
        if not known.any():
            return None
        ranks = np.full(plan.population, 0.5, dtype=np.float32)
        ranks[known] = rank_normalise(self._ledger.mean_loss[known])
        return ranks

    def evaluated(self, metric: float, window: int) -> None:
        """Take a validation result, by which the strength of stages adapts."""
        self._result = metric, window

    def prepare(self, window: int, ledger: Ledger) -> None:
        """Adapt the strength of the stages to the last result; rank 0 decides."""
        adapting, result = self.treating.adapting, self._result
        self._result = None
        if adapting is None:
            return
        if result is not None and 0 <= result[0] <= 1:
            training = training_accuracy(ledger, result[1] - 1)
            why = "" if training is None else adapting.evaluated(training, result[0])
            if why:
                self._voice.events.emit("decision", window=window, lever="augmentation", action="keep", reason=why)
        if self.treating.ranks is not None:
            adapting.numbers = self.treating.ranks.broadcast(adapting.numbers)

    def open(self, shard: Shard, done: frozenset[int]) -> None:
        self._shard, self._treatment = shard, self.treating.treatment(shard)

    @property
    def treatment(self) -> Callable[[slice], Treatment]:
        """The treatment of a batch of this window, by its place in the plan, for the workers."""
        found = self._treatment
        assert found is not None
        # Without the split, draws match a run without reuse.
        return found if self.reuses else lambda span: found(span)._replace(split=0, size=0)

    def hand_over(self, batch: Batch) -> None:
        report = batch.report
        if report is not None and self._shard is not None:
            self.treating.count(batch.planned_ids, self._shard.plan.level[self._shard.span(batch.number)], report)
            known = np.isfinite(report.cost_us)
            self._ledger.cost_us[batch.planned_ids[known]] = report.cost_us[known]
        self._handed_over = time.perf_counter()

    def take_back(self, batch: Batch) -> None:
        self.treating.count_compute(time.perf_counter() - self._handed_over)

    def close(self, *, finished: bool) -> None:
        if self._shard is not None:
            self._voice.events.emit("treat", window=self._shard.plan.window, **self.treating.event())

    def stage_names(self, first: str) -> tuple[str, ...]:
        """Names of what a batch costs its worker: reading it is called `first`."""
        return first, *(stage.label for stage in self.treating.stages)

    def report(self) -> str:
        return treatment_summary(self.treating)

    def state_dict(self) -> dict[str, Any]:
        return {**self.treating.state_dict(), "result": None if self._result is None else list(self._result)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.treating.load_state_dict(state)
        result = state.get("result")
        self._result = None if result is None else (float(result[0]), int(result[1]))


def treatment_summary(treating: Treating) -> str:
    """The treatment in words: the cost of each stage, how often samples were fresh, and what that saved."""
    counts, costs = treating.counts, treating.costs
    lines = [
        "Stages, microseconds per call: " + ", ".join(f"{label} {cost:,.0f}" for label, cost in costs.items()) + "."
    ]
    visits = max(1, counts["visits"])
    made = counts["fresh"] + counts["stored"]
    lines.append(
        f"Of {counts['visits']:,} visits {made:,} ({made / visits:.0%}) were fresh throughout and {counts['reused']:,} took up "
        f"an intermediate ({counts['missed']:,} of them had to make it again; {counts['unfit']:,} could not be kept)."
    )
    least, median, most = treating.fresh_shares
    lines.append(f"A sample was fresh at {least:.0%} (least), {median:.0%} (median), {most:.0%} (most) of its visits.")
    if treating.split is not None:
        before = [stage.label for stage in treating.stages[: treating.split.stages]]
        lines.append(
            f"Intermediates lie after {', '.join(before) or 'reading'}, {treating.split.size:,} bytes each; that saved "
            f"{treating.saved:.1f} seconds of workers' time."
        )
        if treating.frozen:
            lines.append(
                f"Draws kept with them, for {treating.config.r_max} visits at most: {', '.join(treating.frozen)}."
            )
    return "\n".join(lines)
