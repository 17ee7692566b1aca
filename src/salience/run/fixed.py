"""The fixed subset of a run whose selection is static."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from salience.config import SelectConfig
from salience.errors import ConfigError
from salience.plan import Plan
from salience.run.arrays import arrays, tensors
from salience.run.part import Setup
from salience.select.static import again, opinions_of


class Fixed:
    """`chosen` is the plan that chose the subset; None before that."""

    def __init__(self, config: SelectConfig, setup: Setup, *, even: bool) -> None:
        if even or setup.pieces > 1:
            raise ConfigError("select.mode = 'static' plans whole epochs; leave out even=True and window=.")
        self._after, self._setup = config.scored_for, setup
        if self._after >= (setup.epochs or 1):
            raise ConfigError(
                f"select.after is {self._after} and the run has {setup.epochs} epochs: no subset would ever be chosen; make "
                "it smaller."
            )
        self.opinions = opinions_of(config.ledgers, setup.n)
        """Ledgers of other runs by whose mean score it is chosen."""
        self.chosen: Plan | None = None

    def later(self, window: int) -> Plan | None:
        """The plan of a window after the one that chose."""
        if self.chosen is None or window <= self.chosen.window:
            return None
        return again(self.chosen, window, self._setup.seed)

    def choose(self, plan: Plan, *, scored: bool) -> None:
        """Keep the samples of `plan` for the rest of the run, if it is time to."""
        if plan.window < self._after:
            return
        if scored and plan.all_alike:
            raise ConfigError(
                f"select.mode = 'static' would choose its subset in window {plan.window} by scores that know nothing: raise "
                "after, name ledgers, or start from the ledger= of another run."
            )
        self.chosen = plan

    def state_dict(self) -> dict[str, Any] | None:
        return None if self.chosen is None else tensors(self.chosen.arrays())

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        self.chosen = None if state is None else Plan.from_arrays(arrays(state))

    @property
    def text(self) -> str:
        by = f"the mean score over {len(self.opinions)} ledgers" if self.opinions else "what the ledger knew"
        when = f"after {self._after} epochs of everything" if self._after else "before the first epoch"
        size = "" if self.chosen is None else f" of {len(self.chosen):,} of {self.chosen.population:,} samples"
        return f"Selection is static: one fixed subset{size}, chosen {when} by {by}."


def told(fixed: Fixed | None, visits: int | None, full: int) -> str:
    """Whether a selection is static or dynamic, and what it saves where its `visits` of `full` are known in advance."""
    text = "Selection is dynamic: every window is chosen anew." if fixed is None else fixed.text
    if visits is None or not full:
        return text
    return (
        f"{text} It makes {visits:,} of {full:,} visits, {1 - visits / full:.1%} fewer, as its curve says in advance."
    )
