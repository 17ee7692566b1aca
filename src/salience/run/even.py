"""Epochs of equal length, for frameworks that ask for the number of batches once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from salience.config import SelectConfig, Use
from salience.errors import ConfigError
from salience.plan import Plan
from salience.select import Clock, Pipeline


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
