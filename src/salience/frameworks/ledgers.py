"""What Ray trials know of the samples: one snapshot that all start from, and an actor that collects what they learn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from salience.ledger import Ledger
from salience.ledger.sharing import Known, SharedLedger


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """What the trials of a search start from, as arrays, which Ray keeps once per node."""

    columns: Mapping[str, np.ndarray]
    """The columns of the ledger; empty if nothing is known."""
    n: int
    jobs: int
    comparison: str
    digest: str

    @staticmethod
    def of(known: Known) -> Snapshot:
        columns = {} if known.ledger is None else known.ledger.state_dict()
        n = 0 if known.ledger is None else known.ledger.n
        return Snapshot(columns=columns, n=n, jobs=known.jobs, comparison=known.comparison, digest=known.digest)

    def known(self) -> Known:
        ledger = None
        if self.columns:
            ledger = Ledger(self.n)
            ledger.load_state_dict(self.columns)
        return Known(ledger=ledger, jobs=self.jobs, comparison=self.comparison)


class Collector:
    """Writes what trials learn into the folder of a shared ledger, on the node where the search was started.

    As an actor it needs no CPU, so that trials that hold every CPU do not starve it, and Ray may restart it: what it knows is
    in files.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def give(self, job: str, n: int, columns: Mapping[str, np.ndarray]) -> None:
        """Replace what this job left before."""
        ledger = Ledger(n)
        ledger.load_state_dict(columns)
        SharedLedger(self._folder, job=job).give(ledger)

    def ready(self) -> bool:
        return True


def started(folder: str) -> Any:
    """A Collector as a Ray actor on this node."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor: Any = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(Collector)
    handle = actor.options(scheduling_strategy=here).remote(folder)
    ray.get(handle.ready.remote())
    return handle


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialsLedger:
    """The ledger that the trials of one search share: what each starts from, and where each leaves what it learns."""

    start: Snapshot
    collector: Any
    """Handle of the actor."""


class TrialBoard:
    """One trial's end of it, in the form that a Loader takes as `ledger=`."""

    def __init__(self, shared: TrialsLedger, job: str) -> None:
        self._shared, self.job = shared, job
        self._given: Any = None
        """The last call, so that a trial that is ahead of the actor does not pile up ledgers."""

    @property
    def digest(self) -> str:
        return self._shared.start.digest

    def begin(self) -> Known:
        """The same for every trial of the search."""
        return self._shared.start.known()

    def give(self, ledger: Ledger) -> None:
        """Leave what this trial knows by now."""
        self.wait()
        self._given = self._shared.collector.give.remote(self.job, ledger.n, ledger.state_dict())

    def wait(self) -> None:
        """Wait until what was given last has arrived."""
        import ray

        given, self._given = self._given, None
        if given is not None:
            ray.get(given)
