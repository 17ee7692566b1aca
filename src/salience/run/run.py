"""A run and its parts: which part is called when."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from salience.errors import ConfigError, LossError, PluginError
from salience.ledger import Ledger
from salience.plan import Shard
from salience.ranks import started_late
from salience.run import telling
from salience.run.agreeing import check_equal
from salience.run.course import Course
from salience.run.deciding import Deciding
from salience.run.feeding import Feeding
from salience.run.losses import Targets, check_counts, check_losses
from salience.run.order import Drawn
from salience.run.part import Batch, BatchSource, Part
from salience.run.parts import Parts
from salience.run.resizing import Resizing
from salience.run.selection import first_batches
from salience.run.staging import Staging
from salience.run.streaming import Streaming
from salience.select.findings import Study

if TYPE_CHECKING:
    from salience.run.iterating import BatchIterator

MOMENTS = ("flush", "prepare", "open", "hand_over", "on_loss", "take_back", "close")
"""Methods of `Part` that a run calls, each at the moment of that name."""


class Run:
    """One training run over `n` samples: its parts, and the story of a window.

    open:      flush the ledger -> every part prepares -> plan -> this rank's shard -> every part opens the window
    deliver:   every part may look at the batch or change it -> the training loop -> loss -> ledger
    close:     every part closes the window and says what happened, as events
    """

    def __init__(
        self,
        parts: Parts,
        source: BatchSource,
        *,
        feeding: Feeding | None = None,
        staging: Staging | None = None,
        deciding: Deciding | None = None,
        streaming: Streaming | None = None,
        resizing: Resizing | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        """`options` are those of the DataLoader inside, for the rehearsal of stages."""
        self.setup, self.voice, self.events, self.source = parts.setup, parts.voice, parts.voice.events, source
        self.recording, self.planning, self.copying = parts.recording, parts.planning, parts.copying
        self.sensing, self.watching, self.probing = parts.sensing, parts.watching, parts.probing
        self.balancing, self.feeding, self.staging, self.deciding = parts.balancing, feeding, staging, deciding
        self.by_length, self.streaming, self.sharing, self.resizing = (
            parts.by_length,
            streaming,
            parts.sharing,
            resizing,
        )
        named = (
            deciding, feeding, staging, resizing, self.sensing, self.recording, self.copying, self.probing, self.planning,
            self.watching, parts.waits, self.balancing, self.by_length, self.streaming, self.sharing,
        )  # fmt: skip
        self.all_parts: tuple[Part, ...] = tuple(part for part in named if part is not None)
        self.course = Course(self.setup.steps)
        self.course.visits_expected = self.planning.total_visits
        self.evaluations: list[tuple[float, float]] = []
        """Progress and metric of every validation result."""
        self.study: Study | None = None
        """Findings of the last time the ledger was examined; None before that."""
        self.trace = parts.trace
        """Where plans are recorded; None = nowhere."""
        self.iterator: Callable[[], BatchIterator | None] = lambda: None
        """Returns the iterator whose batches count, for as long as somebody holds it."""
        self.resumes = 0
        """How often a state was loaded; iterators taken before the last load are stale."""
        self.lock = threading.RLock()
        """Held while an iterator is asked for a batch: several threads may iterate."""
        self._said_length = -1, 0
        """Window, and the number of its batches that len() gave before it was planned."""
        self._options = options or {}
        self.choose_parts()
        self.events.emit(telling.run_started(self))

    def choose_parts(self) -> None:
        """Choose which parts are called from now on: those in use, at the moments for which they have a method of their own."""
        self.parts = [part for part in self.all_parts if part.in_use]
        """Parts in use, in the order in which they are called."""
        self._of_parts: dict[str, list[Callable[..., None]]] = {
            moment: [getattr(part, moment) for part in self.parts if _answers(part, moment)] for moment in MOMENTS
        }

    # --- the story of a window ---

    def open(self, *, goes_on: bool = False, drawn: Drawn | None = None) -> Iterator[Batch]:
        """Plan the next window and begin to make its batches; a window of which no batch was taken yet is opened again.

        `goes_on` = continue an epoch that is planned in pieces; otherwise the pieces left of an unfinished epoch are skipped.
        `drawn` is the plain order that the iterator already drew, at iter() or when it opened this window before.
        """
        course, source, ranks = self.course, self.source, self.setup.ranks
        # A DataLoader draws a seed for workers that it starts.
        worker_seed = not (course.started and source.keeps_workers)
        if started_late(ranks):
            raise ConfigError(
                "This loader was made before init_process_group(), so that every rank would train on everything; make it "
                "afterwards."
            )
        if course.open and not course.pending:
            self.close()
        if not course.pending:
            if self.streaming is not None and not goes_on and not course.resumed:
                self.streaming.break_off()
            if not goes_on and not course.resumed:
                course.window += -course.window % self.setup.pieces
            self.flush()
            for prepare in self._of_parts["prepare"]:
                prepare(course.window, self.recording.ledger)
            if drawn is not None and not goes_on and self.plain:
                self.planning.order.take(drawn, workers=source.has_workers)
            shard = self._plan(worker_seed)
            left = course.steps_left and course.steps_left - len(shard)
            later = self.planning if self.streaming is None else self.streaming
            course.begin(shard, later.visits_after(course.window, len(shard.plan), left))
            telling.warn_of_plan(self, shard.plan)
            self.events.emit(telling.window_planned(self, shard.plan))
        elif self.redraws and (drawn is None or source.has_workers):
            self.planning.order.again(drawn)
            course.replace(self._plan(worker_seed if drawn is None else drawn.worker_seed))
        return self._start()

    def begin(self) -> Iterator[Batch] | None:
        """The first batch of the window is asked for. Its batches, if they are others than those that `open` returned."""
        if not (self.redraws and self.course.pending and self.planning.order.begin()):
            return None
        self.course.replace(self._plan(worker_seed=False))
        return self._start()

    def _start(self) -> Iterator[Batch]:
        """Every part opens the window, and its batches begin to be made."""
        shard, done = self.course.shard, frozenset(self.course.delivered)
        assert shard is not None
        if self.feeding is not None and self.staging is not None:
            self.feeding.unread = self.staging.treating.unread(shard.plan)
        for open_window in self._of_parts["open"]:
            open_window(shard, done)
        return self.source.start(shard, done)

    def go_on(self) -> Iterator[Batch] | None:
        """Inside a long window: let `auto` decide; the remaining batches made anew if it changed something, else None."""
        course, deciding = self.course, self.deciding
        if deciding is None or course.shard is None or not deciding.due(len(course.delivered), course.left):
            return None
        done = frozenset(course.delivered)
        return self.source.start(course.shard, done) if deciding.inside(course.shard, done) else None

    @property
    def plain(self) -> bool:
        """True if orders are those of a plain DataLoader, drawn when it would; a rank of several could do so alone."""
        alone = self.setup.ranks is None and not self.setup.stream
        return self.planning.config is None and self.staging is None and alone

    @property
    def ends_epoch(self) -> bool:
        """True if the open window is the last one of its epoch, of the run, or of its pass through a stream."""
        if self.streaming is not None:
            return not self.streaming.goes_on
        return (self.course.window + 1) % self.setup.pieces == 0 or self.course.left == self.course.steps_left

    @property
    def redraws(self) -> bool:
        """True if opening the pending window again draws a new order for it, as every iter() of a DataLoader does."""
        return self.plain and not self.course.resumed and self.course.window % self.setup.pieces == 0

    def deliver(self, batch: Batch) -> Any:
        """Pass a batch through the parts; returns what the loop receives."""
        for hand_over in self._of_parts["hand_over"]:
            hand_over(batch)
        self.course.deliver(batch.number)
        return batch.content

    def take_back(self, batch: Batch) -> None:
        """The loop asks for the next batch."""
        for take_back in self._of_parts["take_back"]:
            take_back(batch)

    def close(self) -> None:
        """Close the open window: delivered to its end, or broken off."""
        course, shard = self.course, self.course.shard
        assert shard is not None
        finished = course.complete
        if not finished and (course.window, len(course.delivered)) == self._said_length:
            self.voice.warn_once(
                f"The loop ended window {course.window} after {len(course.delivered)} of {len(shard)} batches, which is what "
                "len() said before the window was planned; ask for len(loader) after iter(loader), or pass even=True."
            )
        for close in self._of_parts["close"]:
            close(finished=finished)
        if self.setup.ranks is None:
            self.flush()
        self.events.emit(telling.window_closed(self, finished=finished))
        if course.end(self.setup.windows):
            self.sensing.end_scorer()
            if self.setup.ranks is None:  # several ranks look in report()
                self.copying.look(self.recording.ledger, course.window, last=True)
            telling.emit_findings(self)

    @property
    def cut(self) -> bool:
        """True if the run ends in the open window, before the end of its epoch."""
        course = self.course
        if course.left != course.steps_left:
            return False
        ends = (course.window + 1) % self.setup.pieces == 0
        return not ends or self.visits_of_window < self.planning.expected(course.window).visits

    def _plan(self, worker_seed: bool) -> Shard:
        """Plan the window that comes next; this rank's part of the plan."""
        with self.voice.watch("plan"):
            if self.streaming is not None:
                plan = self.streaming.plan(self.recording.ledger, self.course.window)
            else:
                plan = self.planning.plan(
                    self.recording.ledger, self.course.window, reference=self.sensing.reference, copies=self.copying.found,
                    stock=None if self.feeding is None else self.feeding.stock(), worker_seed=worker_seed,
                    learnt_loss=self.probing.learnt_loss, jury=self.sensing.jury_ledgers,
                )  # fmt: skip
            if self.resizing is not None:
                plan = self.resizing.plan(plan)
            left = self.course.steps_left
            if left is not None and 0 < left < len(plan.shard(self.setup.rank, self.setup.world)):
                plan = first_batches(plan, left)
            if self.staging is not None:
                plan, counts = self.staging.plan(plan, self._options, self.copying.found)
                if self.feeding is not None:
                    self.feeding.add_counts(counts)
        if not len(plan):
            raise PluginError(
                f"The plan of window {plan.window} is empty: select leaves nothing to train on; choose another."
            )
        setup, divider = self.setup, self.by_length or self.balancing
        shard = plan.shard(setup.rank, setup.world) if divider is None else divider.divide(plan)
        if setup.ranks is not None:
            check_equal(shard, setup.ranks)
        if self.trace is not None and setup.rank == 0:
            self.trace.write(shard.plan)
        return shard

    def flush(self) -> None:
        """Enter what was recorded into the ledger; collective where there are several ranks."""
        with self.voice.watch("flush"):
            for flush in self._of_parts["flush"]:
                flush(self.course.window)

    # --- a loss ---

    def loss(
        self,
        losses: Tensor,
        logits: Tensor | None,
        targets: Targets | None,
        ids: Tensor | None,
        *,
        again: bool,
        counts: Tensor | None = None,
        total: Tensor | float | None = None,
    ) -> Tensor:
        """Record the losses of a batch and return their weighted mean."""
        begin, recording, planning = time.perf_counter(), self.recording, self.planning
        batch = recording.batch_for_loss(ids, again=again)
        kept = batch.kept
        check_losses("loss", losses, batch, kept)
        self.watching.steps.on_loss(losses)
        if counts is not None:
            check_counts(counts, total, batch, self.setup.world)
        count = losses.shape[0]
        if not count:  # nothing was left of the batch
            recording.record(batch, losses, None, None, None)
            return losses.sum()
        labels = recording.labels(batch, count, logits, targets)
        logits, classes = labels.logits, labels.classes
        if kept is None and planning.picks < 1:
            kept = recording.pick(batch, losses, logits, classes, share=planning.picks)
            losses = losses[kept]
            logits, classes = (None if part is None else part[kept] for part in (logits, classes))
        if not planning.needs_checked:
            planning.check_needs(logits=logits is not None, model=self.sensing.attached is not None)
        recording.record(batch, losses, logits, classes, kept)
        self.voice.watch.add("record", time.perf_counter() - begin)
        for on_loss in self._of_parts["on_loss"]:
            on_loss(batch, losses, kept, classes if labels.hard else None)
        return recording.weighted_mean(batch, losses, logits, kept, counts=counts, total=total)

    def pick(
        self,
        losses: Tensor,
        logits: Tensor | None,
        targets: Targets | None,
        *,
        share: float | None,
        power: float | None,
    ) -> Tensor:
        """Record a whole batch as seen, and choose the samples of it to train on."""
        batch, picks = self.recording.batch_for_loss(None, again=False), self.planning.picks
        check_losses("pick", losses, batch)
        if not len(losses):
            return torch.empty(0, dtype=torch.int64, device=losses.device)
        labels = self.recording.labels(batch, len(losses), logits, targets)
        share = (picks if picks < 1 else 0.5) if share is None else share
        batch.kept = self.recording.pick(batch, losses, labels.logits, labels.classes, share=share, power=power)
        return batch.kept

    def weigh(self, losses: Tensor, logits: Tensor | None, targets: Tensor | None) -> Tensor:
        """`loss` inside a compiled step: record, and return the weights that sum the losses to their weighted mean."""
        begin = time.perf_counter()
        if self.planning.picks < 1:
            raise LossError(
                "select picks samples after the forward pass, which a compiled step cannot do; compile the model alone."
            )
        batch = self.recording.batch_for_loss(None, again=False)
        check_losses("loss", losses, batch)
        self.watching.steps.on_loss(losses)
        labels = self.recording.labels(batch, losses.shape[0], logits, targets)
        if not self.planning.needs_checked:
            self.planning.check_needs(logits=labels.logits is not None, model=self.sensing.attached is not None)
        self.sensing.say_compiled()
        self.recording.record(batch, losses, labels.logits, labels.classes, None)
        self.voice.watch.add("record", time.perf_counter() - begin)
        return self.recording.mean_weights(batch, losses)

    def evaluated(self, metric: float, more: Mapping[str, float]) -> None:
        """Take a validation result, for the event log and for the parts that decide by it."""
        course = self.course
        self.events.emit(
            "evaluated", metric=metric, progress=course.progress, window=course.window, visited=course.visits, **more
        )
        self.evaluations.append((course.progress, metric))
        self.probing.evaluated(metric, course.window)
        if course.shard is not None:
            self.planning.evaluated(metric, course.progress, course.shard.plan.window)
        if self.staging is not None:
            self.staging.evaluated(metric, course.window)
        if self.deciding is not None:
            self.deciding.evaluated(metric, course.progress)

    # --- what it knows ---

    @property
    def ledger(self) -> Ledger:
        """What is known about every sample, up to date; with several ranks, as of the end of the last window."""
        if self.setup.ranks is None:
            self.flush()
        return self.recording.ledger

    @property
    def lr_scale(self) -> float:
        """Factor on the learning rate of the next step that goes with its batch size."""
        course, shard = self.course, self.course.shard
        last, window = 1.0 if shard is None else shard.plan.lr_scale, course.window
        if course.open and shard is not None:
            if not course.complete:
                return last
            window += 1
        past = self.setup.windows is None or window >= self.setup.windows
        return last if past else self.planning.expected(window).lr_scale

    def __len__(self) -> int:
        """Batches of the epoch in progress, or of the next one; of a run counted in steps, at most what is left of it."""
        if self.streaming is not None:
            raise TypeError("A stream has no length, and so a Loader of it has none; iterate until it ends.")
        course, pieces = self.course, self.setup.pieces
        first = course.window // pieces * pieces
        steps = {window: self.planning.expected(window).steps for window in range(first, first + pieces)}
        if course.open and course.shard is not None:
            steps[course.window] = len(course.shard)
            if course.complete:  # a loop that stops at len() may ask for that of the next window
                self._said_length = course.window + 1, sum(steps.values())
        else:
            self._said_length = course.window, sum(steps.values())
        to_come = sum(steps[window] for window in steps if window >= course.window) - len(course.delivered)
        beyond = 0 if course.steps_left is None or course.steps_left <= 0 else max(0, to_come - course.steps_left)
        return sum(steps.values()) - beyond

    @property
    def epoch(self) -> int:
        """The epoch in progress, or the next one between two epochs."""
        return self.course.window // self.setup.pieces if self.streaming is None else self.streaming.passes

    def set_epoch(self, epoch: int) -> None:
        """Accept the epoch that a framework announces; the run counts its epochs itself."""
        if not isinstance(epoch, int) or isinstance(epoch, bool) or epoch < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"set_epoch() was given {epoch!r}; it must be an integer of at least 0.")
        mine = self.epoch
        if epoch != mine and not (
            self.course.open and epoch == mine + 1
        ):  # the one before may not have been told its end
            self.voice.warn_once(
                f"set_epoch({epoch}) was called and this run is in epoch {mine}, which it counts itself: nothing was changed. "
                "After a restart, load_state_dict() brings it to where it was."
            )

    @property
    def visits_of_window(self) -> int:
        """Visits of the window in progress, or of the next one as far as they are known, over all ranks."""
        course = self.course
        if course.open and course.shard is not None:
            return len(course.shard.plan)
        return self.planning.expected(course.window).visits


def _answers(part: Part, moment: str) -> bool:
    return getattr(type(part), moment) is not getattr(Part, moment)
