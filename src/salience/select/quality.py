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
    share `last`. Equal samples are treated alike: a group of them is in where its middle is, and the lowest (later the highest)
    group always is. Unknown quality (NaN) stays. `first` = 1 is two-stage training (everything, then the best); with the
    length as quality and `switch` = 1, `first` = 0.3 is short sequences first.
    """
    for name, value in (("switch", switch), ("first", first), ("last", last)):
        if not 0 < value <= 1:
            raise ConfigError(f"quality: {name} is {value}; it must be above 0 and at most 1.")
    column, time = view.quality, view.clock.time
    unknown = np.isnan(column)
    known = np.sort(column[~unknown])
    if not len(known):
        return Verdict(reason="no quality is known")
    below, upto = (np.searchsorted(known, column, side=side) for side in ("left", "right"))
    middle = (below + upto) / 2
    if time < switch:
        share = first + (1 - first) * time / switch
        keep = (middle <= share * len(known)) | (column == known[0])
        return Verdict(keep=keep | unknown, reason=f"not among the {share:.0%} of lowest quality, which come first")
    keep = (len(known) - middle <= last * len(known)) | (column == known[-1])
    return Verdict(keep=keep | unknown, reason=f"not among the {last:.0%} of highest quality")
