"""What other code finds as `sampler` and `batch_sampler` of a loader: the plan in progress."""

from __future__ import annotations

from collections.abc import Iterator

from torch.utils.data import Sampler

from salience.errors import StateError
from salience.plan import Shard
from salience.run.run import Run


class PlannedSampler(Sampler[int]):
    """The ids of the window in progress, for this rank. The order is the plan's, so there is nothing to set."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def __len__(self) -> int:
        """Number of samples of the window in progress, or the expected number of the next one."""
        return self._run.visits_of_window // self._run.setup.world

    def __iter__(self) -> Iterator[int]:
        shard = _planned(self._run)
        return (i for number in range(len(shard)) for i in shard.ids(number).tolist())

    def set_epoch(self, epoch: int) -> None:
        """As `Loader.set_epoch`."""
        self._run.set_epoch(epoch)


class PlannedBatches(Sampler[list[int]]):
    """The batches of ids of the window in progress, for this rank."""

    def __init__(self, run: Run) -> None:
        self._run, self.sampler = run, PlannedSampler(run)
        self.batch_size, self.drop_last = run.setup.batch_size, run.setup.drop_last

    def __len__(self) -> int:
        return len(self._run)

    def __iter__(self) -> Iterator[list[int]]:
        shard = _planned(self._run)
        return (shard.ids(number).tolist() for number in range(len(shard)))

    def set_epoch(self, epoch: int) -> None:
        """As `Loader.set_epoch`."""
        self._run.set_epoch(epoch)


def _planned(run: Run) -> Shard:
    if run.course.shard is None or not run.course.open:
        raise StateError("No window is planned yet, so there are no ids to give; call iter(loader) first.")
    return run.course.shard
