"""What a user may give as `select`, what it stands for, and what `even=True` makes of it: epochs of equal length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from salience.config import SelectConfig, Use, read_toml
from salience.errors import ConfigError
from salience.plan import Plan, Trace
from salience.select import Clock, Pipeline, preset

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
    return replace(
        plan,
        ids=plan.ids[chosen], weights=plan.weights[chosen], importance=plan.importance[chosen], level=plan.level[chosen],
    )  # fmt: skip
