"""Watch: where does the time go?"""

from salience.watch.steps import Step, Steps
from salience.watch.stopwatch import Stopwatch

__all__ = ["Step", "Steps", "Stopwatch"]
