"""Windows: what is planned, delivered and done, and how far the run is."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import RandomSampler

from salience import ledger as ledgers
from salience.config import SelectConfig
from salience.errors import ConfigError, StateError
from salience.events import EventLog
from salience.ledger import Ledger, Recorder
from salience.ledger.exchange import shared_ledger
from salience.plan import Plan, Shard, Trace
from salience.ranks import current_ranks
from salience.report.sinks import Sink
from salience.run.base import Batch, warn
from salience.run.losses import Losses
from salience.run.selection import Select, resolve
from salience.select import Pipeline
from salience.select.batching import Batching
from salience.select.fetching import Stock
from salience.select.noise import evidence
from salience.select.pick import RecentLosses
from salience.select.reference import Opinion, reference_of
from salience.select.steering import Paths, Steering
from salience.signals import Attached
from salience.signals.proxy import Proxy
from salience.signals.scorer import Scorer
from salience.watch import Steps, Stopwatch


class Windows(Losses):
    """One run over `n` samples, window by window."""

    def __init__(
        self,
        n: int,
        *,
        batch_size: int,
        epochs: int | None,
        select: Select,
        seed: int,
        drop_last: bool,
        generator: torch.Generator | None,
        ledger: Ledger | str | Path | None,
        reference: Opinion | Sequence[Opinion] | None,
        baseline: Paths | None,
        embeddings: npt.ArrayLike | None,
        trace: str | Path | None,
        log: EventLog | str | Path | None,
        sinks: Sequence[str | Sink],
        strict: bool,
    ) -> None:
        self._config = resolve(select)
        if n < 1:
            raise ConfigError(f"The data set has {n} samples; there must be at least one.")
        if batch_size < 1:
            raise ConfigError(f"batch_size is {batch_size}; it must be at least 1.")
        if epochs is not None and epochs < 1:
            raise ConfigError(f"epochs is {epochs}; it must be at least 1.")
        if epochs is None and self._config is not None:
            raise ConfigError("select needs epochs=: the number of passes you will make, so that it can pace itself.")
        if seed < 0:
            raise ConfigError(f"seed is {seed}; it must be at least 0.")
        self.n, self.batch_size, self.epochs, self.seed, self.drop_last = n, batch_size, epochs, seed, drop_last
        self._group = current_ranks()
        self.rank, self.world = (self._group.rank, self._group.world) if self._group else (0, 1)
        self.events = log if isinstance(log, EventLog) else EventLog(log if self.rank == 0 else None)
        self._open_sinks(sinks, strict)
        self.watch = Stopwatch()
        self.steps = Steps()
        self._ledger = shared_ledger(self._group, n) if self._group else Ledger(n)
        if ledger is not None:
            self._warm_start(ledger if isinstance(ledger, Ledger) else ledgers.load(ledger))
        self._recorder = Recorder(self._ledger, self._group)
        self._reference = None if reference is None else reference_of(reference, n)
        self._pipeline: Pipeline | None = None
        self._offered = None
        self._steering: Steering | None = None
        self._evaluations: list[tuple[float, float]] = []
        if isinstance(self._config, SelectConfig):
            self._pipeline = Pipeline(
                self._config, reference=self._reference, strict=strict, warn=functools.partial(warn, self.events)
            )
            self._steering = self._make_steering(baseline)
        elif isinstance(self._config, Trace):
            self._config.check(n, epochs)
        self._copies = self._make_search(embeddings)
        self._suspects: tuple[int, npt.NDArray[np.bool_]] | None = None
        """Labels that looked wrong at the start of the window of that number, where somebody asked."""
        self._left_out = 0.0
        """Share of the samples that the last plan left out for their labels."""
        self._trace = None if trace is None else Trace(trace)
        self._generator = generator or torch.Generator().manual_seed(seed)
        self._shuffle: Any = iter(())
        self._shuffle_state: Tensor = self._generator.get_state()
        self._drew_worker_seed = True
        self._started = False
        """Whether a window was opened before, in this process or the one that was resumed."""
        self.epoch = 0
        """The window in progress, or the next one between two windows."""
        self._shard: Shard | None = None
        """This rank's part of the window in progress, or of the last one: a loop that fetches ahead is late with losses."""
        self._open = False
        self._resumed = False
        self._delivered: set[int] = set()
        self._batch: Batch | None = None
        self._span = (0.0, 0.0)
        self._visited = 0
        budgets = self._budgets(0)
        self.visits_expected: int | None = None if budgets is None else sum(budgets)
        """Sample visits of the whole run, over all ranks, as far as they can be known now; None without `epochs`."""
        self._recent = RecentLosses()
        self._weights: dict[torch.device, Tensor] = {}
        self._plain_weights = True
        self._no_doubles = False
        self._checked_needs = False
        self._strict = strict
        self._attached: Attached | None = None
        self._proxy: Proxy | None = None
        self._proxy_state: Mapping[str, Any] | None = None
        self._scorer: Scorer | None = None
        self._warned: set[str] = set()
        self._opened_at = 0.0
        self._emit_run()
        if self._steering is not None and baseline is None:
            self._warn(
                'keep = "auto" has no baseline and stays at its default curve; pass baseline= the event log(s) of earlier '
                "runs that called loader.evaluated(metric)."
            )

    def _offer(self, select: Select) -> None:
        """Have a selection ready that can be switched on between two windows."""
        config = resolve(select)
        assert isinstance(config, SelectConfig)
        warning = functools.partial(warn, self.events)
        self._offered = config, Pipeline(config, reference=self._reference, strict=self._strict, warn=warning)
        if self._copies is None:
            self._pipeline = self._offered[1]
            self._copies, self._pipeline = self._make_search(None), None

    def _selecting(self, on: bool) -> None:
        """Switch it."""
        assert self._offered is not None
        self._config, self._pipeline = self._offered if on else (None, None)
        self._checked_needs = False
        self._shuffle_state = self._generator.get_state()  # where plain windows go on

    @property
    def _kept(self) -> list[float]:
        """Share of the samples that the selection on offer would visit, by window."""
        if self._offered is None or self.epochs is None:
            return []
        return [self._offered[1].budget(w, self.epochs, self.n) / self.n for w in range(self.epochs)]

    def _warm_start(self, known: Ledger) -> None:
        """Take over what another run learnt; windows of that run mean nothing here."""
        if known.n != self.n:
            raise StateError(
                f"The ledger to start from has {known.n} samples, the data set {self.n}; they must be the same."
            )
        if self._group is None or self._group.leads_node:
            self._ledger.load_state_dict(known.state_dict())
            self._ledger.last_seen[:] = -1
        if self._group is not None:
            self._group.barrier()

    def _open_window(self, *, draws_worker_seed: bool = True) -> Shard:
        """Make (or, after a resume, take up) the plan of the next window."""
        if self._proxy_state is not None:
            raise StateError("The state has a proxy; call loader.attach(model, proxy=...) with it before going on.")
        self._opened_at = time.perf_counter()
        self._started = True
        if self._resumed and self._shard is not None:
            self._resumed = False
            return self._shard
        if self._open:  # the last window was broken off
            self._close_window(finished=False)
        self._flush()
        self._take_scores()
        self._note_course()
        self._steer()
        self._look_for_copies()
        with self.watch("plan"):
            plan = self._treated(self._plan(draws_worker_seed))
            self._adopt(plan, set())
        self._left_out = sum(note.dropped for note in plan.notes if note.name == "noise") / self.n
        later = self._later(len(plan))
        self.visits_expected = None if later is None else self._visited + len(plan) + later
        self._span = self._progress_span(len(plan), later)
        self._emit_plan(plan)
        if self._trace is not None and self.rank == 0:
            self._trace.write(plan)
        self._ask_scores(plan.ids)
        assert self._shard is not None
        return self._shard

    def _note_course(self) -> None:
        """Note how often predictions contradict labels by now: whether that falls tells hard samples from wrong labels."""
        known = self._ledger
        if known.vote_p[:, 0].any():
            with self.watch("plan"):
                found = evidence(known.label, known.vote, known.vote_p)
                known.course.append((found.differs, found.rate, float(found.sure), self._left_out))

    def _plan(self, draws_worker_seed: bool) -> Plan:
        size = self.batch_size * self.world
        if self._pipeline is not None:
            assert self.epochs is not None
            self._pipeline.reference = self._opinion()
            return self._pipeline.plan(
                self._ledger, window=self.epoch, windows=self.epochs, batch_size=size, world=self.world, seed=self.seed,
                drop_last=self.drop_last, steered=self._steered,
                copies=None if self._copies is None else self._copies.found, stock=self._stock(),
            )  # fmt: skip
        if isinstance(self._config, Trace):
            return self._config.read(self.epoch)
        ones = np.ones(self.n, dtype=np.float32)
        return Plan(
            window=self.epoch, population=self.n, batch_size=size, drop_last=self.drop_last,
            ids=self._plain_order(draws_worker_seed), weights=ones, importance=ones.copy(),
            level=np.zeros(self.n, dtype=np.uint8),
        )  # fmt: skip

    def _treated(self, plan: Plan) -> Plan:
        """The plan with treatment levels, where there are stages."""
        return plan

    def _stock(self) -> Stock | None:
        """Where the bytes of the samples are, the same on every rank; None where that is not known."""
        return None

    def _plain_order(self, draws_worker_seed: bool) -> npt.NDArray[np.int64]:
        """The order in which DataLoader(shuffle=True, generator=g) would deliver, drawing from g what it would draw."""
        self._shuffle_state = self._generator.get_state()
        self._drew_worker_seed = draws_worker_seed
        if draws_worker_seed:
            torch.empty((), dtype=torch.int64).random_(generator=self._generator)
        self._shuffle = iter(RandomSampler(range(self.n), generator=self._generator))
        return np.fromiter(itertools.islice(self._shuffle, self.n), dtype=np.int64, count=self.n)

    def _adopt(self, plan: Plan, delivered: set[int]) -> None:
        self._shard = plan.shard(self.rank, self.world)
        self._open = True
        self._delivered = delivered
        self._weights = {}
        self._plain_weights = bool((plan.weights == 1).all())
        once = np.zeros(self.n, dtype=bool)
        once[plan.ids] = True
        self._no_doubles = int(np.count_nonzero(once)) == len(plan)
        self._batch = None

    def _deliver(
        self,
        number: int,
        ids: npt.NDArray[np.int64],
        hint: Tensor | None = None,
        prints: npt.NDArray[np.int64] | None = None,
    ) -> None:
        if prints is not None and self._copies is not None:
            self._copies.prints[ids] = prints & np.iinfo(np.int64).max
        self._batch = Batch(self.epoch, number, ids, hint)
        self._delivered.add(number)
        self._take_signals()
        if self._attached is not None:
            self._attached.deliver(number)
        if self._proxy is not None:
            self._proxy.deliver()

    def _close_window(self, *, finished: bool = True) -> None:
        assert self._shard is not None
        if finished:
            next(self._shuffle, None)  # a plain shuffle draws once more at its end
        if self._group is None:
            self._flush()
        spent = self.steps.spent()
        self.events.emit(
            "window", window=self.epoch, batches=len(self._delivered), of=len(self._shard), finished=finished,
            visited=self.visits,
            seconds=time.perf_counter() - self._opened_at, overhead=dict(self.watch.seconds),
            **({"steps": asdict(spent)} if spent.steps else {}),
        )  # fmt: skip
        self._open = False
        self._visited += sum(int(self._shard.global_sizes[number]) for number in self._delivered)
        self._delivered = set()
        self._span = (self._span[1], self._span[1])
        self.epoch += 1
        if finished and self.epoch == self.epochs:
            self._close_scorer()
            if self._group is None:  # several ranks tell it in report()
                self._look_for_copies(last=True)
            self._emit_findings()

    def _budgets(self, first: int) -> list[int] | None:
        """Planned visits of each window from `first` on; None when the number of windows is not known."""
        if self.epochs is None:
            return None
        if isinstance(self._config, Trace):
            return [len(self._config.read(w)) for w in range(first, len(self._config))]
        if self._pipeline is None:
            return [self.n] * (self.epochs - first)
        batching = self._batching
        return [batching.visits(self._granted(w), self.n, last=w == self.epochs - 1) for w in range(first, self.epochs)]

    @property
    def _batching(self) -> Batching:
        assert self._pipeline is not None
        return self._pipeline.batching(self.batch_size * self.world, self.world, self.drop_last)

    def _granted(self, window: int) -> int:
        """Visits the curve grants a window."""
        assert self._pipeline is not None
        assert self.epochs is not None
        return self._pipeline.budget(window, self.epochs, self.n, self._steered)

    def _later(self, visits: int) -> int | None:
        """Visits to expect after this window, which makes `visits`: the curve's, corrected by what this window did to it.

        A rule that spends more than the curve grants will do so again; a filter that leaves less keeps doing so.
        """
        budgets = self._budgets(min(self.epoch, (self.epochs or 1) - 1))
        if budgets is None:
            return None
        granted, *later = budgets
        if visits > granted:
            later = [max(budget, visits) for budget in later]
        elif visits < granted:
            later = [min(budget, visits) for budget in later]
        return sum(later)

    def _progress_span(self, visits: int, later: int | None) -> tuple[float, float]:
        """Progress at this window's start and end: the share its visits have in what is still to come."""
        start = self._span[1]
        if later is None:
            return start, start
        return start, min(1.0, start + (1 - start) * visits / (visits + later))

    @property
    def total_steps(self) -> int | None:
        """Batches of the whole run on each rank, or None where a plug-in decides as it goes."""
        if self._pipeline is not None and not self._pipeline.exact:
            return None
        if isinstance(self._config, Trace):
            return None if self.epochs is None else sum(self._replayed_steps(w) for w in range(len(self._config)))
        return None if self.epochs is None else sum(self._steps(window) for window in range(self.epochs))

    @property
    def lr_scale(self) -> float:
        """Factor on the learning rate of the next step that goes with its batch size; 1 unless steps = "constant".

        After a window's last batch it is that of the window to come, as far as the curve tells.
        """
        window, last = self.epoch, 1.0 if self._shard is None else self._shard.plan.lr_scale
        if self._open and self._shard is not None:
            if len(self._delivered) < len(self._shard):
                return last
            window += 1
        if self.epochs is None or window >= self.epochs:
            return last
        if isinstance(self._config, Trace):
            return self._config.read(window).lr_scale
        if self._pipeline is None or not self._batching.constant:
            return 1.0
        batch = self._batching.batch(self._granted(window), self.n)
        return (batch / (self.batch_size * self.world)) ** self._pipeline.config.lr_power

    @property
    def batch_len(self) -> int:
        """Samples in the batch delivered last."""
        return 0 if self._batch is None else len(self._batch.ids)

    def _steps(self, window: int) -> int:
        """Batches of a window on each rank, as far as they are known before it is planned."""
        if self._pipeline is not None and self.epochs is not None:
            return self._batching.steps(self._granted(window), self.n, last=window == self.epochs - 1)
        whole, tail = divmod(self.n, self.batch_size * self.world)
        return whole + (not self.drop_last and tail >= self.world)

    def _replayed_steps(self, window: int) -> int:
        assert isinstance(self._config, Trace)
        return len(self._config.read(window).shard(self.rank, self.world))

    def __len__(self) -> int:
        """Batches of the window in progress, or of the next one."""
        if self._open and self._shard is not None:
            return len(self._shard)
        window = min(self.epoch, (self.epochs or 1) - 1)
        if isinstance(self._config, Trace):
            return self._replayed_steps(window)
        return self._steps(window)

    @property
    def ledger(self) -> Ledger:
        """What is known of every sample, up to date; with several ranks, as of the last window's end."""
        if self._group is None:
            self._flush()
        return self._ledger
