"""Treat: turns the data that was read into tensors, and decides how much of that work each sample deserves."""

from salience.treat.config import Treat
from salience.treat.stages import Stage

__all__ = ["Stage", "Treat"]
