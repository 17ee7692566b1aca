"""salience: train on what matters. An importance-aware training accelerator for PyTorch."""

from salience.config import SelectConfig, Use
from salience.errors import (
    BrokenSample,
    ConfigError,
    DataError,
    LossError,
    Misattributed,
    MissingExtra,
    PluginError,
    SalienceError,
    StateError,
)
from salience.ledger import Ledger
from salience.plan import Plan, Trace

__version__ = "0.1.0"

from salience.loader import Loader
from salience.schedule import ProgressLR
from salience.selector import Selector

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
    "SalienceError",
    "SelectConfig",
    "Selector",
    "StateError",
    "Trace",
    "Use",
    "__version__",
]
