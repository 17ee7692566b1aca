"""One training run: a conductor (`Run`) and its parts. `Loader` and `Selector` own a run and add nothing but their front.

recording   losses into the ledger, and back as one weighted mean
planning    which samples the next window visits
copying     near-copies among the samples
sensing     what the attached model says besides losses
probing     which gradients are near zero, at marks of accuracy
watching    where the time goes
balancing   which part of a batch each rank takes, where ranks differ in speed
feeding     bytes of a Source, its cache, broken samples
staging     stages of augmentation
deciding    what `auto` changes between two windows

`parts` makes the parts that every run has from what a user passes, `state` saves and resumes a run, `telling` has its events
and its report.
"""

from salience.run.run import Run
from salience.run.selection import Select, resolve

__all__ = ["Run", "Select", "resolve"]
