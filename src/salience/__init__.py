"""salience: train on what matters. An importance-aware training accelerator for PyTorch."""

from salience._version import __version__
from salience.config import SelectConfig, Use
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
from salience.ledger import Ledger
from salience.loader import Loader
from salience.plan import Plan, Trace
from salience.schedule import ProgressLR
from salience.selector import Selector
from salience.treat import Stage, Treat

__all__ = [
    "BrokenSample",
    "ConfigError",
    "DataError",
    "Ledger",
    "Loader",
    "LossError",
    "Misattributed",
    "MissingExtra",
    "Plan",
    "PluginError",
    "ProgressLR",
    "RankError",
    "SalienceError",
    "SelectConfig",
    "Selector",
    "Source",
    "Stage",
    "StateError",
    "StoreError",
    "Trace",
    "Treat",
    "Use",
    "__version__",
]
