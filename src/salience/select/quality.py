"""Quality as a plan: some samples first, others last, by a column that the user gives."""

from __future__ import annotations

import numpy as np

from salience.errors import ConfigError
from salience.registry import card
from salience.select.view import Verdict, View


@card(needs=("quality",), exact=False)
def quality(view: View, *, switch: float = 0.5, first: float = 1.0, last: float = 0.5) -> Verdict:
    """Low quality first, high quality last: a band of `view.quality` that moves with the progress of the run.

    At time t < `switch` the lowest share  h(t) = first + (1 - first) t / switch  may be visited, from `switch` on the highest
    share `last`. A sample is among the lowest share h if fewer than h n samples are below it, and among the highest share
    if fewer than that are above it, so that equal samples are treated alike. Unknown quality (NaN) always stays. `first` = 1 is
    two-stage training (everything, then the best); with minus the length as quality and `switch` = 1, `first` = 0.3 is short
    sequences first.
    """
    for name, value in (("switch", switch), ("first", first), ("last", last)):
        if not 0 < value <= 1:
            raise ConfigError(f"quality: {name} is {value}; it must be above 0 and at most 1.")
    column, time = view.quality, view.clock.time
    known = np.sort(column[~np.isnan(column)])
    unknown = np.isnan(column)
    if time < switch:
        share = first + (1 - first) * time / switch
        keep = np.searchsorted(known, column, side="left") < share * len(known)
        return Verdict(keep=keep | unknown, reason=f"not among the {share:.0%} of lowest quality, which come first")
    above = len(known) - np.searchsorted(known, column, side="right")
    return Verdict(keep=(above < last * len(known)) | unknown, reason=f"not among the {last:.0%} of highest quality")
