"""Treat: from what was read to tensors, and how much of that work each sample deserves."""

from salience.treat.config import Treat
from salience.treat.stages import Stage

__all__ = ["Stage", "Treat"]
