"""Ledger: what do we know of sample i?"""

from salience.ledger.columns import COLUMNS, bytes_per_sample
from salience.ledger.files import load, merge, save
from salience.ledger.ledger import Ledger
from salience.ledger.recorder import Recorder

__all__ = ["COLUMNS", "Ledger", "Recorder", "bytes_per_sample", "load", "merge", "save"]
