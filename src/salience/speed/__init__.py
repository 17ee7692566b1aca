"""Speed: the levers of the training step itself, found one at a time and kept where they pay.

measure a few steps -> best predicted lever on -> steps with and without it -> kept, or undone
"""

from salience.speed.levers import NUMERICS, SPEED_LEVERS
from salience.speed.tuned import Tuned, tune

__all__ = ["NUMERICS", "SPEED_LEVERS", "Tuned", "tune"]
