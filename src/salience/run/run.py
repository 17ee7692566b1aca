"""A run and its parts: which part is called when."""

from __future__ import annotations

import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from salience._version import __version__
from salience.config import SelectConfig
from salience.errors import ConfigError, LossError, PluginError, StateError
from salience.ledger import Ledger
from salience.plan import Plan, Shard
from salience.ranks import Ranks, started_late
from salience.run import state, telling
from salience.run.balancing import Balancing
from salience.run.copying import Copying
from salience.run.course import Course
from salience.run.deciding import Deciding
from salience.run.feeding import Feeding
from salience.run.labels import Targets
from salience.run.order import Drawn
from salience.run.part import Batch, Part, Setup, Voice
from salience.run.planning import Planning
from salience.run.probing import Probing
from salience.run.recording import Recording, check_counts, check_losses, check_tensor
from salience.run.remembering import Remembering
from salience.run.sensing import Sensing
from salience.run.staging import Staging
from salience.run.watching import Watching
from salience.select.findings import Study


class Run:
    """One training run over `n` samples: its parts, and the story of a window.

    open:      flush the ledger -> every part prepares -> plan -> this rank's shard -> every part opens the window
    deliver:   every part may look at the batch or change it -> the training loop -> loss -> ledger
    close:     every part closes the window and says what happened, as events
    """

    def __init__(
        self,
        setup: Setup,
        voice: Voice,
        *,
        recording: Recording,
        planning: Planning,
        copying: Copying,
        sensing: Sensing,
        watching: Watching,
        probing: Probing,
        feeding: Feeding | None = None,
        staging: Staging | None = None,
        deciding: Deciding | None = None,
        balancing: Balancing | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        self.setup, self.voice, self.events = setup, voice, voice.events
        self.recording, self.planning, self.copying, self.sensing = recording, planning, copying, sensing
        self.watching, self.feeding, self.staging, self.deciding = watching, feeding, staging, deciding
        self.balancing, self.probing, self.remembering = balancing, probing, Remembering(setup, recording.ledger)
        named = (
            deciding, feeding, staging, copying, recording, sensing, probing, self.remembering, planning, watching, balancing,
        )  # fmt: skip
        self.all_parts: tuple[Part, ...] = tuple(part for part in named if part is not None)
        self.course = Course()
        self.course.visits_expected = planning.total_visits
        self.evaluations: list[tuple[float, float]] = []
        """Progress and metric of every validation result."""
        self.study: Study | None = None
        """What was found in the ledger when it was last looked at."""
        self._said_length = -1, 0
        """Window, and the number of its batches that len() gave before it was planned."""
        self._options = options or {}
        """Options of the DataLoader inside, for the rehearsal of stages."""
        self.choose_parts()
        config = planning.config
        self.events.emit(
            "run", salience=__version__, torch=torch.__version__, population=setup.n, batch_size=setup.batch_size,
            epochs=setup.epochs, seed=setup.seed, world=setup.world, drop_last=setup.drop_last,
            select=config.to_dict() if isinstance(config, SelectConfig) else planning.described,
        )  # fmt: skip

    def choose_parts(self) -> None:
        """Leave parts that have nothing to do out, until this is called again."""
        self.parts = [part for part in self.all_parts if part.in_use]
        """In the order in which they are asked."""
        self._on_hand_over, self._on_loss, self._on_take_back = (
            [getattr(part, name) for part in self.parts if getattr(type(part), name) is not getattr(Part, name)]
            for name in ("hand_over", "on_loss", "take_back")
        )

    # --- the story of a window ---

    def open(self, *, worker_seed: bool = True, workers: bool = False, goes_on: bool = False) -> Shard:
        """Plan the next window; the one that was planned, or resumed, and gave no batch yet is taken up again.

        `worker_seed` = a DataLoader would draw a seed for its workers now; `workers` = it has worker processes; `goes_on` = the
        epoch goes on, where it is planned in pieces; else what is left of an epoch that was broken off is passed over.
        """
        course = self.course
        if started_late(self.setup.ranks):
            raise ConfigError(
                "This loader was made before init_process_group(), so that every rank would train on everything; make it "
                "afterwards."
            )
        if course.open and not course.pending:
            self.close()
        if not course.pending:
            if not goes_on and not course.resumed:
                course.window += -course.window % self.setup.pieces
            self._prepare()
            shard = self._divide(self._plan(worker_seed))
            if self.setup.ranks is not None:
                self.check_equal(shard, self.setup.ranks)
            course.begin(shard, self.planning.later(course.window, len(shard.plan)))
            if not len(shard):
                self.voice.warn_once(
                    f"drop_last leaves no batch: there are {len(shard.plan)} samples and a batch has {shard.plan.batch_size}."
                )
            if course.window == self.setup.windows:
                self.voice.warn_once(
                    f"More epochs are made than epochs={self.setup.epochs}: they go on as the last one; progress stays at 1."
                )
            self.events.emit(telling.window_planned(self, shard.plan))
            self.planning.planned(shard.plan)
            if self.sensing.scorer is not None:
                self.sensing.ask_scores(shard.plan.ids, course.window)
        elif self.redraws:
            self.planning.order.unused(workers=workers)  # as a DataLoader, whose every iter() draws
            self._plan_again(worker_seed)
        return self._open_parts()

    def open_again(self, order: Drawn | None) -> Shard:
        """Take up the pending window for an iterator that had opened it before another one did, in its own `order`."""
        if order is not None:
            self.planning.order.put_back(order)
            self._plan_again(order.worker_seed)
        return self._open_parts()

    @property
    def redraws(self) -> bool:
        """True if taking up the pending window once more draws its order anew."""
        return self.planning.redraws and self.staging is None and not self.course.resumed

    def _plan_again(self, worker_seed: bool) -> None:
        shard = self._divide(self._plan(worker_seed))
        self.course.replace(shard)
        self.planning.planned(shard.plan)

    def _open_parts(self) -> Shard:
        self.choose_parts()
        shard = self.course.shard
        assert shard is not None
        if self.feeding is not None and self.staging is not None:
            self.feeding.unread = self.staging.treating.unread(shard.plan)
        for part in self.parts:
            part.open(shard, frozenset(self.course.delivered))
        return shard

    def deliver(self, batch: Batch) -> Any:
        """Pass a batch through the parts; returns what the loop receives."""
        for hand_over in self._on_hand_over:
            hand_over(batch)
        self.course.deliver(batch.number)
        return batch.content

    def take_back(self, batch: Batch) -> None:
        """The loop asks for the next batch."""
        for take_back in self._on_take_back:
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
        for part in self.parts:
            part.close(finished=finished)
        if self.setup.ranks is None:
            self.flush()
        self.events.emit(telling.window_closed(self, finished=finished))
        course.end()
        if course.window == self.setup.windows:
            self.sensing.end_scorer()
            if self.setup.ranks is None:  # several ranks look in report()
                self.look_for_copies(last=True)
            telling.emit_findings(self)

    def _prepare(self) -> None:
        """What the last window taught goes into the ledger, and every part gets ready."""
        self.choose_parts()
        self.flush()
        for part in self.parts:
            part.prepare(self.course.window)
        with self.watching.watch("plan"):
            self.planning.note_course(self.recording.ledger)
        self.look_for_copies()

    def _plan(self, worker_seed: bool) -> Plan:
        with self.watching.watch("plan"):
            plan = self.planning.plan(
                self.recording.ledger, self.course.window, reference=self.sensing.reference, copies=self.copying.found,
                stock=None if self.feeding is None else self.feeding.stock(), worker_seed=worker_seed,
                learnt_loss=self.probing.learnt_loss, jury=self.sensing.said,
            )  # fmt: skip
            if self.staging is not None:
                plan, counts = self.staging.plan(plan, self._options, self.copying.found)
                if self.feeding is not None:
                    self.feeding.add_counts(counts)
        if not len(plan):
            raise PluginError(
                f"The plan of window {plan.window} is empty: select leaves nothing to train on; choose another."
            )
        return plan

    def _divide(self, plan: Plan) -> Shard:
        """This rank's part of a plan."""
        if self.balancing is None:
            return plan.shard(self.setup.rank, self.setup.world)
        return self.balancing.divide(plan)

    def check_equal(self, shard: Shard, ranks: Ranks) -> None:
        """Every rank has made the plan for itself: stop all ranks if the plans, or how they are divided, differ."""
        plan, digest = shard.plan, 0
        for part in (plan.ids, plan.weights, shard.cuts):
            digest = zlib.crc32(np.ascontiguousarray(part).tobytes(), digest)
        found = [ours for (ours,) in ranks.gather_objects([digest])]
        if len(set(found)) > 1:
            raise StateError(
                f"The ranks made different plans for window {plan.window} (checksums {found}); give every rank the same data "
                "set, seed, select, salience version and, to resume from, state."
            )

    def flush(self) -> None:
        """Enter what was recorded into the ledger; collective where there are several ranks."""
        senses = self.sensing.in_use
        if senses:
            self.sensing.take()
        with self.watching.watch("flush"):
            self.recording.flush(self.course.window)
            if senses:
                self.sensing.flush()

    def look_for_copies(self, *, last: bool = False) -> None:
        """Search for near-copies if there is more to go by; `last` = with what there is."""
        if self.copying.search is not None:
            with self.watching.watch("copies"):
                self.copying.look(self.recording.ledger, self.course.window, last=last)

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
        check_tensor("loss", losses)
        begin = self.watching.steps.on_loss(losses.device)
        batch = self.recording.batch_for_loss(ids, again=again)
        kept = batch.kept
        check_losses("loss", losses, batch, kept)
        if counts is not None:
            check_counts(counts, total, batch, self.setup.world)
        if not losses.shape[0]:  # nothing was left of the batch
            self.recording.record(batch, losses, None, None, None)
            return losses.sum()
        logits, classes, hard = self.recording.usable(batch, losses, logits, targets)
        if kept is None and self.planning.picks < 1:
            kept = self.recording.pick(batch, losses, logits, classes, share=self.planning.picks)
            losses = losses[kept]
            logits, classes = (None if part is None else part[kept] for part in (logits, classes))
        self.planning.check_needs(logits=logits is not None, model=self.sensing.attached is not None)
        for on_loss in self._on_loss:
            on_loss(batch, losses, kept)
        self.recording.record(batch, losses, logits, classes, kept)
        self.watching.watch.add("record", time.perf_counter() - begin)
        if self.sensing.beside:
            self.sensing.train_beside(batch, kept, classes if hard else None)
        return self.recording.weighted_mean(
            batch, losses, logits, kept, self.planning.robust, counts=counts, total=total
        )

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
        check_tensor("pick", losses)
        batch, picks = self.recording.batch_of(None), self.planning.picks
        check_losses("pick", losses, batch, None)
        if not len(losses):
            return torch.empty(0, dtype=torch.int64, device=losses.device)
        logits, classes, _ = self.recording.usable(batch, losses, logits, targets)
        share = (picks if picks < 1 else 0.5) if share is None else share
        batch.kept = self.recording.pick(batch, losses, logits, classes, share=share, power=power)
        return batch.kept

    def weigh(self, losses: Tensor, logits: Tensor | None, targets: Tensor | None) -> Tensor:
        """`loss` inside a compiled step: record, and return the weights that sum the losses to their weighted mean."""
        begin = time.perf_counter()
        if self.planning.picks < 1:
            raise LossError(
                "select picks samples after the forward pass, which a compiled step cannot do; compile the model alone."
            )
        self.watching.steps.on_loss(losses.device)
        batch = self.recording.batch_for_loss(None, again=False)
        check_losses("loss", losses, batch, None)
        logits, targets, _ = self.recording.usable(batch, losses, logits, targets)
        self.planning.check_needs(logits=logits is not None, model=self.sensing.attached is not None)
        self.sensing.say_compiled()
        self.recording.record(batch, losses, logits, targets, None)
        self.watching.watch.add("record", time.perf_counter() - begin)
        return self.recording.mean_weights(batch, losses, self.planning.robust)

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
        """What is known of every sample, up to date; with several ranks, as of the last window's end."""
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
        following = self.planning.lr_scale(window)
        return last if following is None else following

    def __len__(self) -> int:
        """Batches of the epoch in progress, or of the next one."""
        course, pieces = self.course, self.setup.pieces
        first = course.window // pieces * pieces
        steps = {window: self.planning.steps(window) for window in range(first, first + pieces)}
        if course.open and course.shard is not None:
            steps[course.window] = len(course.shard)
        else:
            self._said_length = course.window, sum(steps.values())
        return sum(steps.values())

    @property
    def epoch(self) -> int:
        """The epoch in progress, or the next one between two epochs."""
        return self.course.window // self.setup.pieces

    @property
    def visits_of_window(self) -> int:
        """Visits of the window in progress, or of the next one as far as they are known, over all ranks."""
        course = self.course
        if course.open and course.shard is not None:
            return len(course.shard.plan)
        return self.planning.visits(course.window)

    @property
    def ends_epoch(self) -> bool:
        """True if the window in progress is the last one of its epoch."""
        return (self.course.window + 1) % self.setup.pieces == 0

    def summary(self, *, local: bool = False) -> dict[str, Any]:
        """What the run taught so far, as plain numbers; `local` = without asking other ranks."""
        return telling.summary(self, local=local)

    def report(self, classes: Sequence[str] | None = None, *, local: bool = False) -> str:
        """The summary as text, with what each part has to say; also written to the event log."""
        return telling.report(self, classes, local=local)

    # --- saved ---

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on as if never stopped. With several ranks, every rank must call it."""
        return state.saved(self)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on where `state_dict()` was taken: the next iteration delivers the rest of that window."""
        state.resume(self, saved)
