"""Planning: which samples the next window visits, how many visits later windows will make, and steering of the share kept."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from salience.config import SelectConfig
from salience.errors import ConfigError
from salience.large.growth import Growth
from salience.ledger import COLUMNS, Ledger, merge
from salience.ledger.copies import Copies
from salience.plan import Plan, Shard, Trace
from salience.run.grading import Quality, graded
from salience.run.order import Drawn, PlainOrder
from salience.run.part import Part, Setup, Voice
from salience.run.selection import (
    Fixed,
    Select,
    at_mean_share,
    check_growth,
    check_length,
    described,
    of_steps,
    pace_over_steps,
    resolve,
)
from salience.seeds import EVEN, PEEK, WORKERS, generator, torch_seed
from salience.select import Clock, Pipeline
from salience.select.batching import members
from salience.select.fetching import Stock, resident_first
from salience.select.noise import contradictions
from salience.select.steering import KEEP_SHARES, Paths, Steering, read_histories
from salience.select.trial import advance
from salience.select.view import Reference


class Expected(NamedTuple):
    """What is known about a window before it is planned."""

    visits: int
    """Over all ranks."""
    steps: int
    """Batches on each rank."""
    lr_scale: float = 1.0
    """Factor on the learning rate that goes with its batch size."""


class Planning(Part):
    """Makes each window's Plan: selected, replayed from a trace, or the plain shuffle when only observing."""

    name = "planning"

    def __init__(
        self,
        setup: Setup,
        select: Select,
        voice: Voice,
        *,
        baseline: Paths | None = None,
        order: PlainOrder | None = None,
        even: bool = False,
        quality: Quality | None = None,
        knows: bool = False,
        grow: Growth | None = None,
    ) -> None:
        """`knows`: the ledger starts with what other jobs learnt about these samples, so that there is no warm-up."""
        self.grow = grow
        self.config, self._even = graded(resolve(select), quality), even
        if even and isinstance(self.config, SelectConfig):
            self.config = at_mean_share(self.config, setup.epochs or 1)
        elif even and self.config is not None:
            raise ConfigError("even=True cannot change the plans of a trace; leave one of them out.")
        check_length(setup, self.config, even=even)
        if grow is not None:
            check_growth(setup, self.config, even=even)
        self._setup, self._voice, self._has_baseline = setup, voice, baseline is not None
        self.picks = self.config.pick if isinstance(self.config, SelectConfig) else 1.0
        """Share of a batch that `loss` itself picks."""
        self.fixed: Fixed | None = None
        """The subset of a static selection."""
        self.order = order or PlainOrder(setup.n, seed=setup.seed)
        self.pipeline: Pipeline | None = None
        self._offered: tuple[SelectConfig, Pipeline] | None = None
        self._steering: Steering | None = None
        self.needs_checked = False
        """True once the first loss has shown whether plug-ins have what they need."""
        self._left_out = 0.0
        """Share of the samples that the last plan left out for their labels."""
        self._peeks = 0
        self._in_window, self._piece = False, 0
        """True if a window is open; and the place in the epoch of that window, or of the next one."""
        self._shuffled = np.empty(0, dtype=np.int64)
        """The plain order of the epoch in progress."""
        if isinstance(self.config, SelectConfig):
            self.pipeline = self._pipeline(self.config)
            self.pipeline.quality = quality
            self.pipeline.set_warmup(not knows or even)
            pace_over_steps(setup, lambda window: self.expected(window).steps)
            self.fixed = Fixed(self.config, setup, even=even) if self.config.mode == "static" else None
            self._steering = self._make_steering(baseline)
        elif isinstance(self.config, Trace):
            self.config.check(setup.n, setup.windows)

    # --- one window ---

    def plan(
        self,
        ledger: Ledger,
        window: int,
        *,
        reference: Reference | None = None,
        copies: Copies | None = None,
        stock: Stock | None = None,
        worker_seed: bool = True,
        learnt_loss: float | None = None,
        jury: tuple[Ledger, Ledger] | None = None,
    ) -> Plan:
        """The plan of `window`, the same on every rank."""
        setup = self._setup
        if self.pipeline is not None:
            self.pipeline.reference = reference
            plan = None if self.fixed is None else self.fixed.plan(window)
            if plan is None:
                known = {"copies": copies, "stock": stock, "learnt_loss": learnt_loss, "jury": jury}
                plan = self._chosen(self.pipeline, ledger, window, known)
            if stock is not None:
                plan = resident_first(plan, stock.resident)
        elif isinstance(self.config, Trace):
            plan = self.config.read(window)
        else:
            piece, size = window % setup.pieces, setup.piece_size
            if piece == 0:
                self._shuffled = self.order.draw(worker_seed=worker_seed)
            ids = self._shuffled[piece * size : (piece + 1) * size]
            ones = np.ones(len(ids), dtype=np.float32)
            plan = Plan(
                window=window, population=setup.n, batch_size=self._batch(window), drop_last=setup.drop_last,
                ids=ids, weights=ones, importance=ones.copy(), level=np.zeros(len(ids), dtype=np.uint8),
            )  # fmt: skip
        if self.grow is not None:
            plan = replace(plan, lr_scale=plan.lr_scale * self._growth_of_rate(window))
        self._left_out = sum(note.dropped for note in plan.notes if note.name == "noise") / setup.n
        return plan

    def _chosen(self, pipeline: Pipeline, ledger: Ledger, window: int, known: Mapping[str, Any]) -> Plan:
        """What the pipeline selects for `window`, given what is `known`; a static selection keeps it from then on."""
        setup = self._setup
        epoch, piece = divmod(window, setup.pieces)
        opinions = () if self.fixed is None else self.fixed.opinions
        plan = pipeline.plan(
            merge(opinions) if opinions else ledger, window=epoch, windows=setup.epochs or 1, piece=piece, pieces=setup.pieces,
            batch_size=self._batch(window), world=setup.plan_world, seed=setup.seed, drop_last=setup.drop_last,
            steered=self._share, opinions=opinions, **known,
        )  # fmt: skip
        self._check_known(ledger, plan)
        if self.fixed is not None:
            self.fixed.choose(plan, scored=bool(pipeline.scores))
        short = setup.drop_last and len(plan) < plan.batch_size  # nothing would be left of it
        if self._even or short:
            return of_steps(plan, 1 if short else self.expected(window).steps, generator(setup.seed, EVEN, window))
        return plan

    def report(self) -> str:
        if self.pipeline is None:
            return ""
        visits = self.total_visits if self.pipeline.exact and self._setup.steps is None else None
        return described(self.fixed, visits, self._setup.n * (self._setup.epochs or 0))

    def _check_known(self, ledger: Ledger, plan: Plan) -> None:
        """Raise ConfigError where a window after the first would be selected by scores that know nothing."""
        if plan.window == 0 or self.pipeline is None or not self.pipeline.scores or self._offered is not None:
            return
        selects = self._granted(plan.window) < self._size(plan.window)
        if selects and not (ledger.seen.any() or ledger.bad.any()) and plan.all_alike:
            raise ConfigError(
                f"Window {plan.window} selects {len(plan):,} samples by their losses, and none was recorded: call "
                "loss(losses, logits, targets) for every batch and train on what it returns, or leave out select."
            )

    def prepare(self, window: int, ledger: Ledger) -> None:
        """Note how often predictions contradict labels by now, continue the trial of hard samples, and act on the last
        validation result."""
        with self._voice.watch("plan"):
            self.note_course(ledger)
            if self.pipeline is not None and self.pipeline.tries and self._setup.pieces == 1 and not self._setup.stream:
                advance(ledger, window, self._setup.seed)
        if self._steering is not None and self._in_the_middle(window):
            self._steer(self._steering, window)

    def note_course(self, ledger: Ledger) -> None:
        """Note how often predictions contradict labels: that falls for hard samples, but not for wrong labels."""
        if ledger.vote_p[:, 0].any():
            found = contradictions(ledger)
            ledger.course.append((found.differs, found.rate, float(len(found.k)), self._left_out))

    def open(self, shard: Shard, done: frozenset[int]) -> None:
        self._in_window, self._piece = True, shard.plan.window % self._setup.pieces

    def close(self, *, finished: bool) -> None:
        self._in_window, self._piece = False, (self._piece + 1) % self._setup.pieces
        self.order.delivered = finished

    def peek(self, before: Drawn | None, *, workers: bool) -> Drawn:
        """The order of an iterator that does not count; `before` is the one it drew at iter()."""
        setup = self._setup
        self._peeks += 1
        if self.config is None and setup.ranks is None:  # ranks must draw alike, and one may peek alone
            return self.order.peek(before, workers=workers)
        ids = generator(setup.seed, PEEK, self._peeks, setup.rank).permutation(setup.n)
        seeds = torch.Generator().manual_seed(torch_seed(setup.seed, PEEK, self._peeks, setup.rank))
        return Drawn(ids=ids, state=seeds.get_state(), worker_seed=False)

    def seed_workers(self, workers: torch.Generator, window: int) -> None:
        """Bring the generator of the DataLoader inside to where a plain one would be, or to the window's own seed."""
        if self.config is None and window % self._setup.pieces == 0:
            workers.set_state(self.order.drawn.state)
        else:
            workers.manual_seed(torch_seed(self._setup.seed, WORKERS, window, self._setup.rank))

    def check_needs(self, *, logits: bool, model: bool) -> None:
        """At the first loss, stop if a configured score lacks what it reads, and switch off filters that do."""
        self.needs_checked = True
        for part, column in [] if self.pipeline is None else self.pipeline.needs():
            if column == "grad_norm" and not model:
                missing = "the model: call loader.attach(model) before the first step"
            elif COLUMNS[column].needs_logits and not logits:
                missing = "logits and integer targets: call loader.loss(losses, logits, targets)"
            else:
                continue
            lack = f"{part.kind[:-1]} {part.name!r} reads {column!r}, which needs {missing}"
            if part.kind != "filters":
                raise ConfigError(f"{lack}.")
            assert self.pipeline is not None
            self.pipeline.off.add(part.key)
            self._voice.warn(f"{lack}. Without that this filter is off.")

    def reads(self, column: str) -> bool:
        """True if a configured plug-in reads that column of the ledger."""
        return self.pipeline is not None and any(need == column for _, need in self.pipeline.needs())

    # --- the windows to come ---

    def expected(self, window: int) -> Expected:
        """Visits, steps and learning-rate factor of a window; past the end of the run, those of the last epoch."""
        setup = self._setup
        if setup.windows is not None:
            window = min(window, setup.windows - setup.pieces + window % setup.pieces)
        if isinstance(self.config, Trace):
            plan = self.config.read(window)
            return Expected(len(plan), len(plan.shard(setup.rank, setup.world)), plan.lr_scale)
        window = window % setup.pieces if self._even else window
        size = self._size(window)
        if self.pipeline is None:
            steps = setup.in_steps(size, setup.steps_in(size, self._batch(window)))
            return Expected(size, steps, self._growth_of_rate(window))
        batching = self.pipeline.batching(self._batch(window), setup.plan_world, setup.drop_last)
        granted, last = self._granted(window), window + 1 == setup.windows
        shrunk = batching.batch(granted, size) / self._batch(window) if batching.constant else 1.0
        visits = batching.visits(granted, size, last=last)
        steps = setup.in_steps(visits, batching.steps(granted, size, last=last))
        return Expected(visits, steps, shrunk**self.pipeline.config.lr_power * self._growth_of_rate(window))

    def _batch(self, window: int) -> int:
        """Samples per step over all ranks in a window."""
        base, windows = self._setup.global_batch, self._setup.windows
        grow = self.grow if windows else None
        return base if grow is None else grow.batch(base, window, windows or 1, self._size(window))

    def _growth_of_rate(self, window: int) -> float:
        """Factor on the learning rate that goes with batches that have grown."""
        return 1.0 if self.grow is None else self.grow.lr_scale(self._setup.global_batch, self._batch(window))

    def _size(self, window: int) -> int:
        """Samples among which a window chooses."""
        n, pieces, size = self._setup.n, self._setup.pieces, self._setup.piece_size
        if self.pipeline is not None:
            return len(members(n, *divmod(window, pieces), pieces))
        return min(size, n - window % pieces * size)

    def _granted(self, window: int) -> int:
        """Visits the curve grants a window."""
        assert self.pipeline is not None
        assert self._setup.epochs is not None
        return self.pipeline.budget(window // self._setup.pieces, self._setup.epochs, self._size(window), self._share)

    @property
    def total_steps(self) -> int | None:
        """Batches of the whole run on each rank, or None where a plug-in decides as it goes."""
        if self._setup.steps is not None:
            return self._setup.steps
        exact = self.pipeline is None or self.pipeline.exact or self._even
        if self._setup.windows is None or not exact or self._setup.mean_batch is not None:
            return None
        return sum(self.expected(window).steps for window in range(self._setup.windows))

    @property
    def total_visits(self) -> int | None:
        """Visits of the whole run before its first window is planned; None without `epochs`."""
        if self._setup.steps is not None:
            return self._setup.steps * self._setup.global_batch
        return None if self._setup.windows is None else sum(self._visits_from(0))

    def visits_after(self, window: int, visits: int, steps: int | None = None) -> int | None:
        """Visits to expect after `window`, which makes `visits`; None without `epochs`. `steps` are left if these are counted.

        They are what the curve grants, at least `visits` per window if this one made more, at most `visits` if it made fewer:
        a sampler or filter that departs from the curve in one window will do so in the next.
        """
        if steps is not None:
            return max(0, steps) * self._setup.global_batch
        if self._setup.windows is None:
            return None
        granted, later = self.expected(window).visits, self._visits_from(window + 1)
        if visits > granted:
            later = [max(expected, visits) for expected in later]
        elif visits < granted:
            later = [min(expected, visits) for expected in later]
        return sum(later)

    def _visits_from(self, first: int) -> list[int]:
        return [self.expected(window).visits for window in range(first, self._setup.windows or 0)]

    # --- a share that follows validation results ---

    @property
    def _share(self) -> float | None:
        return None if self._steering is None else self._steering.share

    @property
    def lacks_baseline(self) -> bool:
        """True if the share kept should follow validation results, and there is nothing to compare them with."""
        return self._steering is not None and not self._has_baseline

    def _make_steering(self, baseline: Paths | None) -> Steering | None:
        assert self.pipeline is not None
        if self.pipeline.curve.name != "auto" or self._setup.stream:
            return None
        assert self._setup.epochs is not None
        share = self.pipeline.keep(Clock(window=self._setup.epochs // 2, windows=self._setup.epochs))
        reads = baseline is not None and self._setup.rank == 0  # rank 0 decides, so it alone reads
        return Steering(share, read_histories(baseline) if reads and baseline is not None else ())

    def _in_the_middle(self, window: int) -> bool:
        """True if the steered share counts in this window."""
        assert self.pipeline is not None
        assert self._setup.epochs is not None
        epoch = window // self._setup.pieces
        return self.pipeline.keep(Clock(window=epoch, windows=self._setup.epochs, steered=KEEP_SHARES[-1])) < 1

    def evaluated(self, metric: float, progress: float, window: int) -> None:
        """A validation result of `window`."""
        if self._steering is not None and self._in_the_middle(window):
            self._steering.evaluated(metric, progress)

    def _steer(self, steering: Steering, window: int) -> None:
        """Act on the last validation result; with several ranks, on rank 0's."""
        moved = steering.move()
        if moved is not None:
            self._voice.events.emit("steered", window=window, **moved)
        if self._setup.ranks is not None:
            share, inside = self._setup.ranks.broadcast(steering.numbers)
            steering.numbers = (share, inside)

    # --- a selection that `auto` may switch on ---

    def offer(self, select: Select) -> Pipeline:
        """Have a selection ready that can be switched on between two windows."""
        if self._even:
            raise ConfigError("even=True fixes the number of batches, which auto may change; leave one of them out.")
        config = resolve(select)
        assert isinstance(config, SelectConfig)
        self._offered = config, self._pipeline(config)
        return self._offered[1]

    def switch(self, on: bool) -> None:
        """Switch the offered selection on or off."""
        assert self._offered is not None
        self.config, self.pipeline = self._offered if on else (None, None)
        self.needs_checked, self.picks = False, self._offered[0].pick if on else 1.0
        self.order.mark()

    @property
    def offered_shares(self) -> list[float]:
        """Share of the samples that the selection on offer would visit, by window."""
        epochs, n = self._setup.epochs, self._setup.n
        if self._offered is None or epochs is None:
            return []
        return [self._offered[1].budget(w, epochs, n) / n for w in range(epochs)]

    def _pipeline(self, config: SelectConfig) -> Pipeline:
        # The Voice and not the run: plug-ins must not keep a run alive.
        return Pipeline(config, strict=self._voice.strict, warn=functools.partial(Voice.warn, self._voice))

    @property
    def _known_pipeline(self) -> Pipeline | None:
        """The selection of this run: the one on offer, whether or not it is switched on, or the configured one."""
        return self.pipeline if self._offered is None else self._offered[1]

    # --- in words, and saved ---

    @property
    def described(self) -> str:
        """The selection in one line, the same for equal selections."""
        if self.config is None or self._offered is not None:
            return "observe"
        if isinstance(self.config, Trace):
            return "trace"
        return json.dumps(self.config.to_dict(), sort_keys=True)

    def state_dict(self) -> dict[str, Any]:
        known = self._known_pipeline
        return {
            "shuffle": self.order.state_dict(in_window=self._in_window or self._piece > 0),
            "in_window": self._in_window,
            "piece": self._piece,
            "steering": None if self._steering is None else self._steering.state_dict(),
            "switched_off": sorted(known.off) if known else [],
            "left_out": self._left_out,
            "warmup": known is None or known.warmup,
            "subset": None if self.fixed is None else self.fixed.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._in_window, self._piece = bool(state["in_window"]), int(state["piece"])
        inside = self.config is None and (self._in_window or self._piece > 0)
        self._shuffled = self.order.load_state_dict(state["shuffle"], in_window=inside)
        if (known := self._known_pipeline) is not None:
            known.off = set(state["switched_off"])
            known.set_warmup(bool(state.get("warmup", True)))
        if self._steering is not None:
            self._steering.load_state_dict(state["steering"])
        self._left_out = float(state["left_out"])
        if self.fixed is not None:
            self.fixed.load_state_dict(state.get("subset"))
