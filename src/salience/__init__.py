"""salience: train on what matters. An importance-aware training accelerator for PyTorch."""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from salience._version import __version__

if TYPE_CHECKING:
    from salience.batches import Collated
    from salience.config import SelectConfig, Use
    from salience.decide.tuning import tune_select
    from salience.errors import (
        BrokenSample,
        ConfigError,
        DataError,
        LossError,
        Misattributed,
        MissingExtra,
        PluginError,
        RankError,
        SalienceError,
        StateError,
        StoreError,
    )
    from salience.feed import Source
    from salience.feed.sharing.shared import SharedFeed
    from salience.gradients import sync
    from salience.ledger import Ledger
    from salience.ledger.sharing import SharedLedger
    from salience.loader import Loader
    from salience.observer import Observer
    from salience.plan import Plan, Trace
    from salience.schedule import ProgressLR
    from salience.selector import Selector
    from salience.speed import Tuned, tune
    from salience.treat import Stage, Treat

__all__ = [
    "BrokenSample",
    "Collated",
    "ConfigError",
    "DataError",
    "Ledger",
    "Loader",
    "LossError",
    "Misattributed",
    "MissingExtra",
    "Observer",
    "Plan",
    "PluginError",
    "ProgressLR",
    "RankError",
    "SalienceError",
    "SelectConfig",
    "Selector",
    "SharedFeed",
    "SharedLedger",
    "Source",
    "Stage",
    "StateError",
    "StoreError",
    "Trace",
    "Treat",
    "Tuned",
    "Use",
    "__version__",
    "sync",
    "tune",
    "tune_select",
]

_HOMES = {
    name: f"salience.{module}"
    for module, names in {
        "batches": "Collated", "config": "SelectConfig Use", "decide.tuning": "tune_select",
        "errors": "BrokenSample ConfigError DataError LossError Misattributed MissingExtra PluginError RankError SalienceError "
        "StateError StoreError",
        "feed": "Source", "feed.sharing.shared": "SharedFeed", "gradients": "sync", "ledger": "Ledger",
        "ledger.sharing": "SharedLedger", "loader": "Loader",
        "observer": "Observer", "plan": "Plan Trace", "schedule": "ProgressLR", "selector": "Selector",
        "speed": "Tuned tune", "treat": "Stage Treat",
    }.items()
    for name in names.split()
}  # fmt: skip
"""Module of each public name. It is imported on first use, so that `salience --help` does not wait for torch."""


def __getattr__(name: str) -> Any:
    """A public name, or one of the package's modules (`salience.ledger`), imported now."""
    if name in _HOMES:
        found = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
        return found
    if not name.startswith("_") and importlib.util.find_spec(f"salience.{name}") is not None:
        return importlib.import_module(f"salience.{name}")
    raise AttributeError(f"module 'salience' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
