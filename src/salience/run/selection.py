"""What a user may give as `select`, what it stands for, what `even=True` makes of it, and the subset of a static selection."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from salience.config import SelectConfig, Use, read_toml
from salience.errors import ConfigError
from salience.plan import Note, Plan, Trace
from salience.run.part import Setup
from salience.run.state import arrays, tensors
from salience.seeds import STATIC, generator
from salience.select import Clock, Pipeline, preset
from salience.select.reference import opinions_of

Select = str | SelectConfig | Mapping[str, Any] | Trace | None


def resolve(select: Select) -> SelectConfig | Trace | None:
    """What people write for `select` as a config: a preset's name, a TOML file, a table, a config, a trace, or nothing."""
    if select is None or isinstance(select, (SelectConfig, Trace)):
        return select
    table: dict[str, Any]
    if not isinstance(select, (str, Mapping)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(
            f'select is {select!r}; name a preset (select="default"), a TOML file or a table; None observes.'
        )
    if isinstance(select, str):
        if not select.endswith(".toml"):
            return preset(select)
        tables = read_toml(select)
        if "select" not in tables:
            raise ConfigError(f"{select!r} has no [select] table; write one, or name a preset.")
        table = dict(tables["select"])
    else:
        table = dict(select)
    return preset(table.pop("preset", "default")).merged(table)


def at_mean_share(config: SelectConfig, epochs: int) -> SelectConfig:
    """The selection with the mean of its keep curve in every epoch: the same number of visits over the run."""
    if config.keep.name == "auto":
        raise ConfigError('even=True fixes the share of every epoch, which keep = "auto" moves; leave one of them out.')
    keep = Pipeline(config).keep
    share = float(np.mean([keep(Clock(window=window, windows=epochs)) for window in range(epochs)]))
    return replace(config, keep=Use(name="constant", options={"share": share}))


def of_steps(plan: Plan, steps: int, rng: np.random.Generator) -> Plan:
    """The plan with that many whole batches: its first samples, which are in random order, or some of them a second time."""
    wanted = steps * plan.batch_size
    if len(plan) == wanted:
        return plan
    more = rng.choice(len(plan), max(0, wanted - len(plan)), replace=wanted > 2 * len(plan))
    chosen = np.concatenate((np.arange(min(len(plan), wanted)), more))
    return plan.taken(chosen)


def check_length(setup: Setup, config: SelectConfig | Trace | None, *, even: bool) -> None:
    """Raise ConfigError unless it is said how long the run is, in a way that fits the rest."""
    if setup.epochs is None and config is not None and not setup.stream:
        raise ConfigError(
            "select needs epochs= (the number of passes you will make) or steps= (of batches), so that it can pace itself."
        )
    if setup.steps is not None and setup.mean_batch is not None:
        raise ConfigError(
            f"steps={setup.steps} counts batches of equal size, and batch_tokens= makes batches of as many samples as fit; say "
            "how long the run is by epochs=."
        )
    if setup.steps is not None and (even or isinstance(config, Trace)):
        other = "even=True fixes the batches of an epoch" if even else "the plans of a trace are those of whole epochs"
        raise ConfigError(
            f"{other}, and steps={setup.steps} may end the run in the middle of one; leave one of them out."
        )


def pace_over_steps(setup: Setup, expected: Callable[[int], int]) -> None:
    """Give a run that is counted in steps the fewest epochs that make them, as far as the curve tells.

    `expected` returns the batches of a window, given the epochs that `setup` has by then.
    """
    if setup.steps is None:
        return

    def made(epochs: int) -> int:
        setup.count_epochs(epochs)
        return sum(expected(window) for window in range(epochs * setup.pieces))

    few, many = 0, setup.epochs or 1
    while made(many) < setup.steps:
        few, many = many, 2 * many
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (middle, many) if made(middle) < setup.steps else (few, middle)
    setup.count_epochs(many)


def check_growth(setup: Setup, config: SelectConfig | Trace | None, *, even: bool) -> None:
    """Raise ConfigError where batches cannot grow."""
    fixed = isinstance(config, Trace) or (config is not None and config.mode == "static")
    if setup.epochs is None or setup.steps is not None:
        raise ConfigError(
            "grow= needs epochs=: the windows in which batches grow are shares of a run counted in epochs."
        )
    if setup.mean_batch is not None:
        raise ConfigError(
            "grow= counts samples per batch, and batch_tokens= makes batches of as many as fit; leave one of them out."
        )
    if even or fixed:
        raise ConfigError(
            "grow= cannot change plans of a trace, a static selection or even=True; leave one of them out."
        )


def first_batches(plan: Plan, batches: int) -> Plan:
    """The plan up to that many batches: the last window of a run that is counted in steps."""
    end = batches * plan.batch_size
    return replace(
        plan, ids=plan.ids[:end], weights=plan.weights[:end], importance=plan.importance[:end], level=plan.level[:end]
    )


class Fixed:
    """The fixed subset of a run whose selection is static."""

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
        """The plan that chose the subset; None before that."""

    def plan(self, window: int) -> Plan | None:
        """The plan of `window`: the subset in a new order; None up to the window that chooses it."""
        if self.chosen is None or window <= self.chosen.window:
            return None
        chosen = self.chosen
        order = generator(self._setup.seed, STATIC, window).permutation(len(chosen))
        fixed = Note(
            name="static", dropped=chosen.population - len(chosen), forced=0,
            reason=f"one fixed subset of {len(chosen):,} samples, chosen in window {chosen.window}",
        )  # fmt: skip
        return chosen.taken(order, window=window, notes=(fixed,))

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


def described(fixed: Fixed | None, visits: int | None, full: int) -> str:
    """Whether a selection is static or dynamic, and what it saves where its `visits` of `full` are known in advance."""
    text = "Selection is dynamic: every window is chosen anew." if fixed is None else fixed.text
    if visits is None or not full:
        return text
    return (
        f"{text} It makes {visits:,} of {full:,} visits, {1 - visits / full:.1%} fewer, as its curve says in advance."
    )
