"""Watch: where does the time go?"""

from salience.watch.steps import Step, Steps, Stopwatch

__all__ = ["Step", "Steps", "Stopwatch"]
