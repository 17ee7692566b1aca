"""A run watches: the attached model, copies among the samples, validation results."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import nn

from salience.errors import ConfigError, PluginError
from salience.ledger.copies import Copies
from salience.ledger.embeddings import Embeddings
from salience.run.base import Base
from salience.select import Clock
from salience.select.redundancy import CopySearch, redundancy
from salience.select.steering import NOTCHES, Paths, Steering, read_histories
from salience.signals import Attached
from salience.signals.features import WIDTH
from salience.signals.ghost import Extent


class Watching(Base):
    """Signals that come from beside the losses, taken up at the edges of windows and batches."""

    _attached: Attached | None
    _steering: Steering | None

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

    def _flush(self) -> None:
        """Enter what was recorded into the ledger; collective where there are several ranks."""
        self._take_signals()
        with self.watch("flush"):
            self._recorder.flush()
        bad, self._recorder.bad = self._recorder.bad, 0
        if bad:
            self._warn(f"{bad} losses were NaN or infinite (window {self.epoch}); they were counted and not stored.")

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

    def evaluated(self, metric: float, **more: float) -> None:
        """Report a validation result, higher is better; it goes into the event log and steers keep = "auto"."""
        self.events.emit("evaluated", metric=float(metric), progress=self.progress, window=self.epoch, **more)
        if self._steering is not None and self.plan is not None and self._in_the_middle(self.plan.window):
            self._steering.hear(float(metric), self.progress)

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
