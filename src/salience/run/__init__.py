"""What both front doors share: one run's ledger, plans, losses, progress and state. `Loader` and `Selector` add iteration.

open a window:   flush the ledger -> Pipeline.plan (or the plain shuffle, or a replayed trace) -> shard of this rank
each batch:      deliver(number, ids) -> loss(losses, ...) -> Recorder, weighted mean
close a window:  events, next window

One class in layers, each in a file: Base (parts, events) <- Watching (model, copies, validation) <- Losses <- Windows <- Run.
"""

from salience.run.base import warn
from salience.run.selection import Select, resolve
from salience.run.state import Run

__all__ = ["Run", "Select", "resolve", "warn"]
