"""What both front doors share: one run's ledger, plans, losses, progress and state. `Loader` and `Selector` add iteration.

open a window:   flush the ledger -> Pipeline.plan (or the plain shuffle, or a replayed trace) -> shard of this rank
each batch:      deliver(number, ids) -> loss(losses, ...) -> Recorder, weighted mean
close a window:  events, next window
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.data import RandomSampler

from salience import ledger as ledgers
from salience._version import __version__
from salience.config import SelectConfig, read_toml
from salience.errors import ConfigError, LossError, PluginError, StateError
from salience.events import EventLog
from salience.ledger import COLUMNS, Ledger, Recorder
from salience.ledger.copies import Copies
from salience.ledger.embeddings import Embeddings
from salience.ledger.exchange import current_group
from salience.plan import Plan, Shard, Trace
from salience.seeds import PICK, torch_generator
from salience.select import Clock, Pipeline, preset
from salience.select.findings import findings
from salience.select.noise import judge
from salience.select.pick import RecentLosses, pick_positions
from salience.select.redundancy import CopySearch, redundancy
from salience.select.reference import Opinion, checksum, reference_of
from salience.select.steering import NOTCHES, Paths, Steering, read_histories
from salience.select.summary import summarise
from salience.signals import Attached
from salience.signals.features import WIDTH
from salience.signals.ghost import Extent
from salience.watch import Stopwatch

STATE_VERSION = 1

Select = str | SelectConfig | Mapping[str, Any] | Trace | None


def resolve(select: Select) -> SelectConfig | Trace | None:
    """What people write for `select` as a config: a preset's name, a TOML file, a table, a config, a trace, or nothing."""
    if select is None or isinstance(select, (SelectConfig, Trace)):
        return select
    table: dict[str, Any]
    if isinstance(select, str):
        if not select.endswith(".toml"):
            return preset(select)
        tables = read_toml(select)
        if "select" not in tables:
            raise ConfigError(f"{select!r} has no [select] table; write one, or name a preset.")
        table = dict(tables["select"])
    else:
        table = dict(select)
    return preset(table.pop("preset", "default")).merged(table)


@dataclass(slots=True)
class _Batch:
    """The batch delivered last."""

    window: int
    number: int
    ids: npt.NDArray[np.int64]
    hint: Tensor | None = None
    """Integer targets found in the batch."""
    kept: Tensor | None = None
    """Positions chosen by pick()."""


class Run:
    """The state of one training run over `n` samples."""

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
        self._group = current_group()
        self.rank, self.world = (self._group.rank, self._group.world) if self._group else (0, 1)
        self.events = log if isinstance(log, EventLog) else EventLog(log if self.rank == 0 else None)
        self.watch = Stopwatch()
        self._ledger = self._group.ledger(n) if self._group else Ledger(n)
        if ledger is not None:
            self._warm_start(ledger if isinstance(ledger, Ledger) else ledgers.load(ledger))
        self._recorder = Recorder(self._ledger, self._group)
        self._reference = None if reference is None else reference_of(reference, n)
        self._pipeline: Pipeline | None = None
        self._steering: Steering | None = None
        if isinstance(self._config, SelectConfig):
            self._pipeline = Pipeline(
                self._config, reference=self._reference, strict=strict, warn=functools.partial(warn, self.events)
            )
            self._steering = self._make_steering(baseline)
        elif isinstance(self._config, Trace):
            self._config.check(n, epochs)
        self._copies = self._make_search(embeddings)
        self._noise = 0.0
        """Share of wrong labels the last plan's filters estimated."""
        self._suspects: tuple[int, npt.NDArray[np.bool_]] | None = None
        """Labels that looked wrong at the start of the window of that number, where somebody asked."""
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
        self._batch: _Batch | None = None
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
        self._warned: set[str] = set()
        self._opened_at = 0.0
        self._emit_run()
        if self._steering is not None and baseline is None:
            self._warn(
                'keep = "auto" has no baseline and stays at its default curve; pass baseline= the event log(s) of earlier '
                "runs that called loader.evaluated(metric)."
            )

    # ---------------------------------------------------------------- windows

    def _open_window(self, *, draws_worker_seed: bool = True) -> Shard:
        """Make (or, after a resume, take up) the plan of the next window."""
        self._opened_at = time.perf_counter()
        self._started = True
        if self._resumed and self._shard is not None:
            self._resumed = False
            return self._shard
        if self._open:  # the last window was broken off
            self._close_window(finished=False)
        self._flush()
        self._steer()
        self._look_for_copies()
        with self.watch("plan"):
            plan = self._plan(draws_worker_seed)
            self._adopt(plan, set())
        later = self._later(len(plan))
        self.visits_expected = None if later is None else self._visited + len(plan) + later
        self._span = self._progress_span(len(plan), later)
        self._emit_plan(plan)
        if self._trace is not None and self.rank == 0:
            self._trace.write(plan)
        assert self._shard is not None
        return self._shard

    def _plan(self, draws_worker_seed: bool) -> Plan:
        size = self.batch_size * self.world
        if self._pipeline is not None:
            assert self.epochs is not None
            plan = self._pipeline.plan(
                self._ledger, window=self.epoch, windows=self.epochs, batch_size=size, seed=self.seed,
                drop_last=self.drop_last, steered=self._steered, noise=self._noise,
                copies=None if self._copies is None else self._copies.found,
            )  # fmt: skip
            self._noise = plan.noise
            return replace(plan, batch_size=self._batch_for(len(plan)), lr_scale=self._scale_for(len(plan)))
        if isinstance(self._config, Trace):
            return self._config.read(self.epoch)
        ones = np.ones(self.n, dtype=np.float32)
        return Plan(
            window=self.epoch, population=self.n, batch_size=size, drop_last=self.drop_last,
            ids=self._plain_order(draws_worker_seed), weights=ones, importance=ones.copy(),
            level=np.zeros(self.n, dtype=np.uint8),
        )  # fmt: skip

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
        self, number: int, ids: npt.NDArray[np.int64], hint: Tensor | None = None, prints: Tensor | None = None
    ) -> None:
        if prints is not None and self._copies is not None:
            self._copies.prints[ids] = prints.numpy()
        self._batch = _Batch(self.epoch, number, ids, hint)
        self._delivered.add(number)
        self._take_signals()
        if self._attached is not None:
            self._attached.deliver(number)

    def _close_window(self, *, finished: bool = True) -> None:
        assert self._shard is not None
        if finished:
            next(self._shuffle, None)  # a plain shuffle draws once more at its end
        if self._group is None:
            self._flush()
        self.events.emit(
            "window", window=self.epoch, batches=len(self._delivered), of=len(self._shard), finished=finished,
            seconds=time.perf_counter() - self._opened_at, overhead=dict(self.watch.seconds),
        )  # fmt: skip
        self._open = False
        self._visited += sum(int(self._shard.global_sizes[number]) for number in self._delivered)
        self._delivered = set()
        self._span = (self._span[1], self._span[1])
        self.epoch += 1
        if finished and self.epoch == self.epochs and self._group is None:  # several ranks tell it in report()
            self._emit_findings()

    def _flush(self) -> None:
        """Enter what was recorded into the ledger; collective where there are several ranks."""
        self._take_signals()
        with self.watch("flush"):
            self._recorder.flush()
        bad, self._recorder.bad = self._recorder.bad, 0
        if bad:
            self._warn(f"{bad} losses were NaN or infinite (window {self.epoch}); they were counted and not stored.")

    def _budgets(self, first: int) -> list[int] | None:
        """Planned visits of each window from `first` on; None when the number of windows is not known."""
        if self.epochs is None:
            return None
        if isinstance(self._config, Trace):
            return [len(self._config.read(w)) for w in range(first, len(self._config))]
        if self._pipeline is None:
            return [self.n] * (self.epochs - first)
        return [self._pipeline.budget(w, self.epochs, self.n, self._steered) for w in range(first, self.epochs)]

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

    # ---------------------------------------------------------------- what users read

    @property
    def progress(self) -> float:
        """From 0 to 1 over the whole run, in sample visits; needs `epochs`."""
        start, end = self._span
        if not self._open or self._shard is None or not len(self._shard):
            return end
        return start + (end - start) * len(self._delivered) / len(self._shard)

    @property
    def total_steps(self) -> int | None:
        """Batches of the whole run on each rank, or None where a plug-in decides as it goes."""
        if self._pipeline is not None and not self._pipeline.exact:
            return None
        budgets = self._budgets(0)
        if isinstance(self._config, Trace) and budgets is not None:
            return sum(self._replayed_steps(window) for window in range(len(budgets)))
        return None if budgets is None else sum(self._steps(budget) for budget in budgets)

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
        if self._pipeline is None:
            return 1.0
        return self._scale_for(self._pipeline.budget(window, self.epochs, self.n, self._steered))

    @property
    def batch_len(self) -> int:
        """Samples in the batch delivered last."""
        return 0 if self._batch is None else len(self._batch.ids)

    def _steps(self, visits: int) -> int:
        whole, tail = divmod(visits, self._batch_for(visits))
        return whole + (not self.drop_last and tail >= self.world)

    def _replayed_steps(self, window: int) -> int:
        assert isinstance(self._config, Trace)
        return len(self._config.read(window).shard(self.rank, self.world))

    def _batch_for(self, visits: int) -> int:
        """Samples of a step, over all ranks, in a window of `visits`: with constant steps, batch_size * visits / n."""
        if not (isinstance(self._config, SelectConfig) and self._config.steps == "constant"):
            return self.batch_size * self.world
        return self.world * max(1, round(self.batch_size * visits / self.n))

    def _scale_for(self, visits: int) -> float:
        """(batch / batch_size)^lr_power: 1 is linear scaling (Goyal et al. 2017), 0.5 goes with the gradient's noise."""
        power = self._config.lr_power if isinstance(self._config, SelectConfig) else 0.0
        return (self._batch_for(visits) / (self.batch_size * self.world)) ** power

    def __len__(self) -> int:
        """Batches of the window in progress, or of the next one."""
        if self._open and self._shard is not None:
            return len(self._shard)
        window = min(self.epoch, (self.epochs or 1) - 1)
        if isinstance(self._config, Trace):
            return self._replayed_steps(window)
        budgets = self._budgets(window)
        return self._steps(budgets[0] if budgets else self.n)

    @property
    def plan(self) -> Plan | None:
        """The plan of the window in progress, or of the last one."""
        return None if self._shard is None else self._shard.plan

    @property
    def copies(self) -> Copies | None:
        """Which samples are copies of each other, as far as they were looked for."""
        return None if self._copies is None else self._copies.found

    @property
    def ledger(self) -> Ledger:
        """What is known of every sample, up to date; with several ranks, as of the last window's end."""
        if self._group is None:
            self._flush()
        return self._ledger

    # ---------------------------------------------------------------- losses

    def loss(
        self, losses: Tensor, logits: Tensor | None = None, targets: Tensor | None = None, ids: Tensor | None = None
    ) -> Tensor:
        """Record per-sample losses and return their weighted mean, sum(w * l) / B.

        With `logits` [B, C] and integer `targets` [B], the ledger also learns margins, guesses and more. Over
        several ranks the result is sum(w * l) * world / B_global, so that DDP's mean over ranks is the
        gradient of the whole batch. Nothing here waits for the device. Where `select` says so (selective_backprop) and
        the loop has not called `pick`, the mean is over the samples picked here.
        """
        begin = time.perf_counter()
        batch = self._batch_of(ids)
        kept = batch.kept
        if kept is None and self._picks < 1:
            kept = self._pick("loss", batch, losses, logits, targets)
            losses = losses[kept]
            logits, targets = (None if part is None else part[kept] for part in (logits, targets))
        count = len(batch.ids) if kept is None else len(kept)
        _check_losses("loss", losses, count)
        logits, targets = self._usable(losses, logits, targets)
        if not self._checked_needs:
            self._check_needs(logits)
        if self._attached is not None:
            choice = self._attached.watch(losses, batch.ids, kept, window=batch.window)
            if choice is not None:
                self.events.emit("signals", **asdict(choice), text=choice.text)
            features = None if self._copies is None else self._attached.take_features()
            if features is not None and len(features) in (len(batch.ids), count):
                of = kept if len(features) < len(batch.ids) else None
                self._recorder.features(batch.ids, features, of, window=batch.window)
        if kept is None:
            self._recorder.record(
                batch.ids, losses, logits, targets, window=batch.window, hint=batch.hint, number=self._number(batch)
            )
        else:
            self._recorder.trained(batch.ids, kept, window=batch.window)
        weights = None if self._plain_weights else self._weights_of(batch, losses.device)
        self.watch.add("record", time.perf_counter() - begin)
        if weights is not None and kept is not None:
            weights = weights[kept.to(weights.device)]
        share = count
        if self._shard is not None and self.world > 1 and kept is None:
            share = int(self._shard.global_sizes[batch.number]) / self.world
        if weights is None and share == count:
            return losses.mean()
        weighted = losses if weights is None else losses.float() * weights
        return weighted.sum() / share

    def pick(
        self,
        losses: Tensor,
        logits: Tensor | None = None,
        targets: Tensor | None = None,
        *,
        share: float | None = None,
        power: float | None = None,
    ) -> Tensor:
        """Choose after the forward pass: positions of round(share * B) samples of this batch, int64, on its device.

        The harder among recent losses, the likelier: P ~ percentile^power (selective backprop). `share` is what `select`
        says, or a half; `power` is 1 / share - 1, with which percentile^power is `share` on average. All samples
        count as seen; those later given to `loss(losses[keep], ...)` count as trained. Seeded by (seed, step).
        """
        batch = self._batch_of(None)
        batch.kept = self._pick("pick", batch, losses, logits, targets, share=share, power=power)
        return batch.kept

    @property
    def _picks(self) -> float:
        """Share of a batch that `loss` itself picks."""
        return self._config.pick if isinstance(self._config, SelectConfig) else 1.0

    def _pick(
        self,
        where: str,
        batch: _Batch,
        losses: Tensor,
        logits: Tensor | None,
        targets: Tensor | None,
        *,
        share: float | None = None,
        power: float | None = None,
    ) -> Tensor:
        share = (self._picks if self._picks < 1 else 0.5) if share is None else share
        if not 0 < share <= 1:
            raise ConfigError(f"pick: share is {share}; it must be above 0 and at most 1.")
        _check_losses(where, losses, len(batch.ids))
        logits, targets = self._usable(losses, logits, targets)
        self._recorder.record(batch.ids, losses, logits, targets, window=batch.window, trained=False, hint=batch.hint)
        generator = torch_generator(self.seed, PICK, batch.window, batch.number, self.rank)
        count, power = max(1, round(share * len(losses))), 1 / share - 1 if power is None else power
        return pick_positions(self._recent.percentile(losses), count, power, generator)

    def _number(self, batch: _Batch) -> int | None:
        return batch.number if self._no_doubles else None

    def _batch_of(self, ids: Tensor | None) -> _Batch:
        if ids is None:
            if self._batch is None:
                raise LossError("loss() was called before a batch was delivered; iterate first, or pass ids=.")
            return self._batch
        if ids.dtype not in (torch.int64, torch.int32) or ids.dim() != 1:
            raise LossError(
                f"ids are {ids.dtype} of shape {tuple(ids.shape)}; pass the int64 ids that came with the batch."
            )
        array = ids.detach().cpu().numpy().astype(np.int64)
        if self._batch is not None and np.array_equal(array, self._batch.ids):
            return self._batch
        if self._shard is None or not len(array):
            raise LossError("These ids belong to no batch of this window.")
        spots = np.flatnonzero(self._shard.plan.ids == array[0])
        number = int(np.searchsorted(self._shard.start, spots[0], side="right")) - 1 if len(spots) else -1
        if number < 0 or not np.array_equal(self._shard.ids(number), array):
            raise LossError(
                "These ids are not a batch of this window, in its order; pass them on as they were delivered."
            )
        return _Batch(self._shard.plan.window, number, array)

    def _usable(
        self, losses: Tensor, logits: Tensor | None, targets: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Logits and targets that class statistics can be made of; others are left alone, and that is said once."""
        if targets is None:
            return None, None
        if targets.dtype not in (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8) or targets.dim() != 1:
            self._warn_once(
                f"targets are {targets.dtype} with {targets.dim()} dimensions, not one integer class a sample: "
                "losses are recorded, class statistics (margin, guess, class floor) are off."
            )
            return None, None
        if len(targets) != len(losses):
            raise LossError(f"There are {len(targets)} targets for {len(losses)} losses; pass those of the same batch.")
        if logits is not None and (logits.dim() != 2 or len(logits) != len(losses)):
            raise LossError(
                f"logits have shape {tuple(logits.shape)}; with {len(losses)} losses they must be [{len(losses)}, classes]."
            )
        return logits, targets

    def _check_needs(self, logits: Tensor | None) -> None:
        self._checked_needs = True
        if self._pipeline is None:
            return
        for part, column in self._pipeline.needs():
            if column == "grad_norm" and self._attached is None:
                missing = "the model: call loader.attach(model) before the first step"
            elif COLUMNS[column].needs_logits and logits is None:
                missing = "logits and integer targets: call loader.loss(losses, logits, targets)"
            else:
                continue
            lack = f"{part.kind[:-1]} {part.name!r} reads {column!r}, which needs {missing}"
            if part.kind != "filters":
                raise ConfigError(f"{lack}.")
            self._pipeline.off.add(part.key)
            self._warn(f"{lack}. Without that this filter is off.")

    def _weights_of(self, batch: _Batch, device: torch.device) -> Tensor:
        assert self._shard is not None
        if device not in self._weights:
            self._weights[device] = torch.from_numpy(self._shard.plan.weights.copy()).to(device)
        return self._weights[device][self._shard.span(batch.number)]

    # ---------------------------------------------------------------- telling and asking

    def evaluated(self, metric: float, **more: float) -> None:
        """Report a validation result, higher is better; it goes into the event log and steers keep = "auto"."""
        self.events.emit("evaluated", metric=float(metric), progress=self.progress, window=self.epoch, **more)
        if self._steering is not None and self.plan is not None and self._in_the_middle(self.plan.window):
            self._steering.hear(float(metric), self.progress)

    def relabelled(self, targets: Tensor, ids: Tensor | None = None) -> Tensor:
        """The batch's targets with suspected ones replaced by the class the model gives; yours to use, off otherwise.

        Make the loss of what this returns, and pass the targets as they were delivered to `loss()`.
        """
        batch = self._batch_of(ids)
        if len(targets) != len(batch.ids) or targets.dim() != 1:
            raise LossError(
                f"relabelled() was given {tuple(targets.shape)} targets for {len(batch.ids)} samples; pass them all."
            )
        if self._suspects is None or self._suspects[0] != batch.window:
            self._suspects = batch.window, judge(self._ledger, before=self._noise).suspects
        wrong = torch.from_numpy(self._suspects[1][batch.ids] & (self._ledger.guess[batch.ids] >= 0)).to(targets.device)
        guess = torch.from_numpy(self._ledger.guess[batch.ids]).to(targets)
        return torch.where(wrong, guess, targets)

    def _make_steering(self, baseline: Paths | None) -> Steering | None:
        assert self._pipeline is not None
        assert self.epochs is not None
        if self._pipeline.curve.name != "auto":
            return None
        share = self._pipeline.keep(Clock(window=self.epochs // 2, windows=self.epochs))
        if baseline is None or self.rank > 0:  # rank 0 decides, so it alone reads
            return Steering(share, ())
        return Steering(share, read_histories(baseline))

    @property
    def _steered(self) -> float | None:
        return None if self._steering is None else self._steering.share

    def _in_the_middle(self, window: int) -> bool:
        """Whether the share that is steered counts in this window."""
        assert self._pipeline is not None
        assert self.epochs is not None
        return self._pipeline.keep(Clock(window=window, windows=self.epochs, steered=NOTCHES[-1])) < 1

    def _steer(self) -> None:
        """Act on the last validation result; with several ranks, on rank 0's."""
        if self._steering is None or not self._in_the_middle(self.epoch):
            return
        moved = self._steering.move()
        if moved is not None:
            self.events.emit("steered", window=self.epoch, **moved)
        if self._group is not None:
            share, inside = self._group.first(self._steering.numbers)
            self._steering.numbers = (share, inside)

    def _make_search(self, embeddings: npt.ArrayLike | None) -> CopySearch | None:
        """A search for copies, where a filter asks for it or, when only observing, vectors are given."""
        uses = [] if self._pipeline is None else [p for p in self._pipeline.filters if p.call is redundancy]
        if not uses:
            if embeddings is None:
                return None
            if self._pipeline is not None:
                raise ConfigError(
                    "embeddings= are for the filter 'redundancy', which this select does not use; add it."
                )
        return CopySearch(self.n, given=embeddings, **(uses[0].options if uses else {}))

    def _look_for_copies(self) -> None:
        """Look again where there is more to go by; with several ranks, rank 0 looks and tells."""
        if self._copies is None:
            return
        with self.watch("copies"):
            if self._group is not None:
                self._group.largest(self._copies.prints)
            changed = self.rank == 0 and self._copies.look(self._ledger.label)
            if self._group is not None and (changed := bool(self._group.first([float(changed)])[0])):
                found = self._copies.found or Copies(
                    group=np.empty(self.n, dtype=np.int32), similarity=np.empty(self.n, dtype=np.float32)
                )
                self._group.share(found.group)
                self._group.share(found.similarity)
                self._copies.found = found
        if changed and self._copies.found is not None:
            group = self._copies.found.group
            self.events.emit(
                "copies", window=self.epoch, samples=int((group >= 0).sum()), groups=len(np.unique(group[group >= 0]))
            )

    def attach(
        self, model: nn.Module, *, grad_norm: Extent | None = None, every: int = 1, features: bool = False
    ) -> None:
        """Enable scores that need the model, by hooks on its layers; once more after a resume, since no state has them.

        Norms of per-sample gradients go into the ledger (`grad_norm`) when a plug-in reads them or `grad_norm` says
        how: "all" is exact over every Linear and Conv2d; "auto" takes them from the last one backwards within a tenth
        of the step's operations; "last" takes the last one, which bounds the others up to a factor; a model that has
        neither is judged by its output's gradient. Other layers (norms, embeddings, packed attention weights) are not
        in it; the `signals` event names them. `every` = k makes norms in one of k steps. `features` keeps what the last
        Linear was given.
        """
        needed: set[str] = set()
        if self._pipeline is not None:
            needed = {need for _, need in self._pipeline.needs()}
        self.detach()
        self._attached = Attached(
            model,
            grad_norm=grad_norm or ("auto" if "grad_norm" in needed else None),
            every=every,
            features=features or self._copies is not None,
        )
        if features and self._copies is None and self._pipeline is None:
            self._copies = CopySearch(self.n)  # observing: near-copies are found for the report
        if self._copies is not None and self.rank == 0:
            self._copies.embeddings = self._copies.embeddings or Embeddings(self.n, WIDTH)
            self._recorder.embeddings = self._copies.embeddings if self._copies.embeddings.width == WIDTH else None

    def detach(self) -> None:
        """Take the hooks of `attach` off the model again."""
        self._take_signals()
        attached, self._attached = self._attached, None
        if attached is not None:
            attached.detach()

    def _take_signals(self) -> None:
        """Hand over what the backward passes since the last call brought."""
        for step in [] if self._attached is None else self._attached.take():
            with self.watch("signals"):
                squares = step.finish()
            self.watch.add("signals", step.seconds)
            if step.trouble is not None:
                text = f"Gradient norms failed and are off: {step.trouble!r}."
                self.detach()
                if self._strict:
                    raise PluginError(text) from step.trouble
                self._warn(text)
            elif squares is None or step.scale is None or step.ids is None:
                self._warn_once(
                    "No gradient norms: no layer of the attached model ran, with the batch as its first axis, between the "
                    "batch's delivery and loss(). Attach the model that makes the losses, not compiled by torch.compile."
                )
            else:
                self._recorder.norms(step.ids, squares, step.scale, step.kept, window=step.window)

    def summary(self) -> dict[str, Any]:
        """What the run taught us so far: per-class statistics, hardest and never-learnt samples, what could be saved."""
        self._flush()
        config = self._config if isinstance(self._config, SelectConfig) else preset("default")
        windows = self.epochs or max(10, self.epoch)
        return summarise(self._ledger, config, windows=windows, seed=self.seed, reference=self._reference)

    def report(self) -> str:
        """The summary as text, also written to the event log, as are the findings behind it."""
        from salience.report.observed import render

        self._flush()
        self._emit_findings()
        return render(self.events.emit("observed", summary=self.summary())["summary"])

    # ---------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on as if never stopped. With several ranks, every rank must call it."""
        self._flush()
        recent = self._recent.values
        return {
            "version": STATE_VERSION,
            "population": self.n,
            "world": self.world,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "select": self._describe(),
            "reference": checksum(self._reference),
            "steering": None if self._steering is None else self._steering.state_dict(),
            "noise": self._noise,
            "copies": None if self._copies is None else _tensors(self._copies.state_dict()),
            "epoch": self.epoch,
            "span": list(self._span),
            "visited": self._visited,
            "visits_expected": self.visits_expected,
            "delivered": sorted(self._delivered),
            "plan": None if not self._open or self._shard is None else _tensors(self._shard.plan.arrays()),
            "ledger": _tensors(self._ledger.state_dict()),
            "shuffle": (self._generator.get_state() if not self._open else self._shuffle_state).clone(),
            "drew_worker_seed": self._drew_worker_seed,
            "started": self._started,
            "recent_losses": None if recent is None else recent.detach().cpu().clone(),
            "switched_off": sorted(self._pipeline.off) if self._pipeline else [],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict()` was taken: the next iteration delivers the rest of that window."""
        if state.get("version") != STATE_VERSION:
            raise StateError(
                f"This state has version {state.get('version')!r}; this salience reads version {STATE_VERSION}."
            )
        for key, mine, advice in (
            ("population", self.n, "resume with the data set it was made from"),
            ("world", self.world, "resume with as many ranks"),
            ("batch_size", self.batch_size, "resume with the same batch_size"),
            ("seed", self.seed, "resume with the same seed"),
            ("select", self._describe(), "resume with the same select"),
            ("reference", checksum(self._reference), "resume with the same reference= (these are checksums)"),
        ):
            if state.get(key) != mine:
                raise StateError(f"The state was saved with {key} {state.get(key)!r}, this run has {mine!r}; {advice}.")
        if self._group is None or self._group.leads_node:
            self._ledger.load_state_dict(_arrays(state["ledger"]))
        if self._group is not None:
            self._group.barrier()
        self.epoch = int(state["epoch"])
        self._visited, self.visits_expected = int(state["visited"]), state["visits_expected"]
        self._started = bool(state["started"])
        self._generator.set_state(state["shuffle"])
        self._recent.values = state["recent_losses"]
        if self._pipeline is not None:
            self._pipeline.off = set(state["switched_off"])
        if self._steering is not None:
            self._steering.load_state_dict(state["steering"])
        self._noise = float(state.get("noise", 0.0))
        if self._copies is not None and state.get("copies") is not None:
            self._copies.load_state_dict(_arrays(state["copies"]))
            if self._recorder.embeddings is not None:
                self._recorder.embeddings = self._copies.embeddings
        self._shard, self._open, self._delivered, self._resumed = None, False, set(), False
        if state["plan"] is not None:
            plan = Plan.from_arrays(_arrays(state["plan"]))
            if self._config is None:
                self._plain_order(bool(state["drew_worker_seed"]))  # bring the generator to where this window left it
            self._adopt(plan, set(state["delivered"]))
            self._resumed = True
        start, end = state["span"]
        self._span = (float(start), float(end))

    def _describe(self) -> str:
        if self._config is None:
            return "observe"
        if isinstance(self._config, Trace):
            return "trace"
        return json.dumps(self._config.to_dict(), sort_keys=True)

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

    # ---------------------------------------------------------------- events

    def _emit_run(self) -> None:
        self.events.emit(
            "run", salience=__version__, torch=torch.__version__, population=self.n, batch_size=self.batch_size,
            epochs=self.epochs, seed=self.seed, world=self.world, drop_last=self.drop_last,
            select=self._config.to_dict() if isinstance(self._config, SelectConfig) else self._describe(),
        )  # fmt: skip

    def _emit_plan(self, plan: Plan) -> None:
        self.events.emit(
            "plan", window=plan.window, picked=len(plan), population=plan.population, progress=self.progress,
            seconds=self.watch.seconds.get("plan", 0.0),
            filters=[{"name": n.name, "dropped": n.dropped, "forced": n.forced, "reason": n.reason} for n in plan.notes],
        )  # fmt: skip

    def _emit_findings(self) -> None:
        with self.watch("findings"):
            found = asdict(
                findings(self._ledger, None if self.copies is None else (self.copies.group, self.copies.similarity))
            )
        self.events.emit("findings", **found)

    def _warn(self, text: str) -> None:
        warn(self.events, text)

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            self._warn(text)


def warn(events: EventLog, text: str) -> None:
    """Say it in the event log and to whoever reads the logs; a free function, so that plug-ins do not hold the run."""
    logging.getLogger("salience").warning(text)
    events.emit("warning", text=text)


def _check_losses(where: str, losses: Tensor, count: int) -> None:
    if losses.dim() == 0:
        raise LossError(f"{where}() was given a single number; it needs one loss a sample: use reduction='none'.")
    if losses.dim() > 1:
        axes = tuple(range(1, losses.dim()))
        raise LossError(
            f"{where}() was given losses of shape {tuple(losses.shape)}; it needs one a sample: reduce the rest first, "
            f"e.g. losses.mean(dim={axes})."
        )
    if len(losses) != count:
        raise LossError(
            f"{where}() was given {len(losses)} losses for a batch of {count} samples; pass one a sample. "
            "A loop that fetches ahead must use with_ids=True and pass ids= to loss()."
        )


def _tensors(arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """Arrays as tensors that torch.load(weights_only=True) takes; unsigned ones travel under a signed type."""
    return {
        name: torch.from_numpy(np.array(a.view(f"i{a.itemsize}") if a.dtype.kind == "u" and a.itemsize > 1 else a))
        for name, a in arrays.items()
    }


def _arrays(tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = {name: tensor.numpy() for name, tensor in tensors.items()}
    for name, array in arrays.items():
        dtype = np.dtype(COLUMNS[name].dtype) if name in COLUMNS else array.dtype
        if dtype != array.dtype:
            arrays[name] = array.view(dtype)
    return arrays
