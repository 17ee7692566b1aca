"""One training run: a conductor (`Run`) and its parts. `Loader` and `Selector` own a run and add only their interface.

Parts, each a class with methods of `Part` (`part`):

recording   losses into the ledger, and back as one weighted mean
planning    which samples the next window visits
copying     near-copies among the samples
sensing     what the attached model says besides losses
probing     which gradients are near zero, at marks of accuracy
watching    where the time goes
balancing   which part of a batch each rank takes, if ranks differ in speed
by_length   batches of similar length, measured in tokens (`bylength`)
streaming   the samples of a stream, a window at a time, and the plan over them
sharing     what this job learns, for other jobs over the same data
feeding     bytes of a Source, its cache, broken samples
resizing    smaller images in a part of the run
staging     stages of augmentation (the work itself is in `salience.treat.treating`)
deciding    what `auto` changes between two windows

Around them: `parts` makes the parts that every run has from what a user passes, `course` counts windows, batches and visits,
`iterating` is what `iter(loader)` returns, `workers` makes batches by a DataLoader and `moving` copies them to a device,
`state` saves and resumes a run, `telling` makes its events and its report, `agreeing` compares the plans of several ranks,
`opening` says what a user's data is and which options go with it, `growing` takes in what a data set has got at its end. Beside
a part that uses them: `order`, `selection`, `grading` (planning), `losses`, `tokens`, `visits` (recording), `naming` (keys),
`speeds` (balancing), `lengths` (by_length), `buffer` (streaming). `planned` is the plan as a PyTorch sampler.
"""

from salience.run.run import Run
from salience.run.selection import Select, resolve

__all__ = ["Run", "Select", "resolve"]
