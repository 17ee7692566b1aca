"""A column of the user's own: the quality of every sample, by which a plan has some first and others last."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from salience.config import SelectConfig, Use
from salience.errors import ConfigError
from salience.plan import Trace
from salience.run.naming import column_of

Quality = npt.NDArray[np.float32]
NAME = "quality"
"""Name of the filter that reads it."""


def quality_of(dataset: Any, given: npt.ArrayLike | str) -> Quality:
    """Quality of every sample, float32 [n], high = good; NaN = unknown. `given` is an array or the name of a column."""
    n = len(dataset)
    found = given
    if isinstance(given, str):
        found = column_of(dataset, given)
        if found is None:
            raise ConfigError(
                f"quality is {given!r}, and {type(dataset).__name__} has no such column; pass one number per sample."
            )
    try:
        column = np.asarray(found, dtype=np.float32)
    except (TypeError, ValueError) as cause:
        raise ConfigError(f"quality cannot be read as numbers ({cause}); pass one number per sample, [{n}].") from cause
    if column.shape != (n,) or np.isinf(column).any():
        raise ConfigError(
            f"quality has shape {column.shape}; pass one finite number per sample (NaN = unknown), [{n}]."
        )
    if np.isnan(column).all():
        raise ConfigError("quality is NaN for every sample, so that there is nothing to order them by; leave it out.")
    return column


def graded(config: SelectConfig | Trace | None, quality: Quality | None) -> SelectConfig | Trace | None:
    """The selection with the filter `quality`, where samples have one; with its own options if it names them."""
    uses = isinstance(config, SelectConfig) and any(use.name == NAME for use in config.filters)
    if quality is None:
        if uses:
            raise ConfigError("The filter 'quality' reads a number per sample: pass quality=, an array or a column.")
        return config
    if isinstance(config, Trace):
        raise ConfigError("A trace has its plans already; leave out quality=.")
    if config is None:
        config = SelectConfig()
    return config if uses else replace(config, filters=(*config.filters, Use(name=NAME)))
