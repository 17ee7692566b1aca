"""A run watches: the attached model, copies among the samples, validation results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from salience.errors import ConfigError, Misattributed, PluginError
from salience.ledger.copies import Copies
from salience.ledger.embeddings import Embeddings
from salience.ledger.statistics import LOGIT_ROWS, finish
from salience.report.sinks import Sink, guarded, sink
from salience.run.base import Base, Batch
from salience.select import Clock
from salience.select.redundancy import CopySearch, redundancy
from salience.select.reference import reference_of
from salience.select.steering import NOTCHES, Paths, Steering, read_histories
from salience.select.view import Reference
from salience.signals import Attached
from salience.signals.features import WIDTH
from salience.signals.ghost import Extent
from salience.signals.proxy import Proxy
from salience.signals.scorer import Scorer, stalest


class Watching(Base):
    """Signals that come from beside the losses, taken up at the edges of windows and batches."""

    _attached: Attached | None
    _steering: Steering | None
    _evaluations: list[tuple[float, float]]
    """Progress and metric of every validation result."""
    _reference: Reference | None
    """As it was given."""
    _proxy: Proxy | None
    _proxy_state: Mapping[str, Any] | None
    """Of a resumed run whose proxy was not attached yet."""
    _scorer: Scorer | None

    def attach(
        self,
        model: nn.Module,
        *,
        grad_norm: Extent | None = None,
        every: int = 1,
        features: bool = False,
        proxy: nn.Module | None = None,
        proxy_optimizer: torch.optim.Optimizer | None = None,
        background: torch.device | str | bool = False,
    ) -> None:
        """Enable scores that need the model, by hooks on its layers; once more after a resume, since no state has them.

        Norms of per-sample gradients go into the ledger (`grad_norm`) when a plug-in reads them or `grad_norm` says
        how: "all" is exact over every Linear and Conv2d; "auto" takes them from the last one backwards within a tenth
        of the step's operations; "last" takes the last one, which bounds the others up to a factor; a model that has
        neither is judged by its output's gradient. Other layers (norms, embeddings, packed attention weights) are not
        in it; the `signals` event names them. `every` = k makes norms in one of k steps. `features` keeps what the last
        Linear was given.

        `proxy` is a small model that `loss(losses, logits, targets)` trains on the same inputs (the first tensor `model` is
        given) and targets, by `proxy_optimizer` (else SGD, learning rate 0.01, momentum 0.9); where no `reference=` was
        given, its losses are it. `background` (True, or a device instead of the CPU) scores samples that are not picked in a
        process beside the training, so that what is known of them does not age.
        """
        if self.world > 1 and (proxy is not None or background):
            raise ConfigError(
                f"attach: proxy= and background= work in one process, and this run has {self.world} ranks; leave them out."
            )
        if proxy is None and proxy_optimizer is not None:
            raise ConfigError("attach: proxy_optimizer= came without proxy=, the model it trains.")
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
        if proxy is not None:
            self._proxy = Proxy(model, proxy, proxy_optimizer, self.n)
            self._resume_proxy(self._proxy_state)
        if background is not False:
            try:
                self._scorer = self._make_scorer(model, "cpu" if background is True else background)
            except ConfigError:
                raise
            except Exception as cause:
                self._drop_scorer(f"could not be started: {type(cause).__name__}: {cause}", cause)
        if features and self._copies is None and self._pipeline is None:
            self._copies = CopySearch(self.n)  # observing: near-copies are found for the report
        if self._copies is not None and self.rank == 0:
            self._copies.embeddings = self._copies.embeddings or Embeddings(self.n, WIDTH)
            self._recorder.embeddings = self._copies.embeddings if self._copies.given is None else None

    def detach(self) -> None:
        """Take the hooks of `attach` off the model again, and let go of the proxy and the background scorer."""
        self._take_signals()
        self._close_scorer()
        proxy, self._proxy = self._proxy, None
        if proxy is not None:
            proxy.close()
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
            if self._proxy is not None:
                self._proxy.enter()
        bad, self._recorder.bad = self._recorder.bad, 0
        if bad:
            self._warn(f"{bad} losses were NaN or infinite (window {self.epoch}); they were counted and not stored.")

    def _train_proxy(self, proxy: Proxy, batch: Batch, kept: Tensor | None, targets: Tensor | None) -> None:
        """One step of the proxy; where it fails it is off, and its losses stay as they are."""
        if not proxy.close.alive:
            return
        if targets is None:
            raise ConfigError(
                "The proxy needs integer targets, one class a sample: call loader.loss(losses, logits, targets)."
            )
        try:
            with self.watch("proxy"):
                trained = proxy.train(targets, batch.ids, kept)
        except Exception as cause:
            proxy.close()
            text = f"The proxy failed and is off: {type(cause).__name__}: {cause}"
            if self._strict:
                raise PluginError(text) from cause
            self._warn(text)
            return
        if not trained:
            self._warn_once(
                "The proxy has no input: the attached model did not run, with the batch as the first axis of its first "
                "tensor, between the batch's delivery and loss(). Attach the model that makes the losses."
            )

    def _resume_proxy(self, state: Mapping[str, Any] | None) -> None:
        """Load the proxy's state, now or when it is attached."""
        self._proxy_state = state
        if state is not None and self._proxy is not None:
            self._proxy.load_state_dict(state)
            self._proxy_state = None

    def _opinion(self) -> Reference | None:
        """What another model thinks of the samples: the reference that was given, else the proxy's losses so far."""
        if self._reference is not None or self._proxy is None:
            return self._reference
        losses = self._proxy.losses.copy()
        return Reference(loss=losses, hardness=losses) if np.isnan(losses).all() else reference_of(losses, self.n)

    def _make_scorer(self, model: nn.Module, device: torch.device | str) -> Scorer:
        raise ConfigError("attach: background= needs the data set, which only salience.Loader has; leave it out.")

    def _take_scores(self) -> None:
        """Enter what the background scorer has found by now: seen, not trained."""
        if self._scorer is None:
            return
        try:
            with self.watch("scorer"):
                ids, values, window = self._scorer.take()
                waited = self._ledger.last_seen[ids] < window
                ids, rows = ids[waited], finish(dict(zip(LOGIT_ROWS, values[:, waited], strict=True)))
                if (self._ledger.label >= 0).any():
                    self._ledger.check_labels(ids, rows["target"].astype(np.int32))
                if not (self._ledger.guess >= 0).any():  # loss() is given no logits: then scores go by the loss
                    rows = {"loss": rows["loss"]}
                self._recorder.bad += self._ledger.record(ids, rows, window=window, trained=False, unique=True)
        except (PluginError, Misattributed) as cause:
            self._drop_scorer(f"was lost: {cause}", cause)
        else:
            self.events.emit("scored", window=window, samples=len(ids))

    def _ask_scores(self, picked: npt.NDArray[np.int64]) -> None:
        """Have the stalest of the samples this window does not visit scored, with the weights as they are now."""
        if self._scorer is None:
            return
        try:
            with self.watch("scorer"):
                self._scorer.ask(stalest(picked, self._ledger.last_seen), window=self.epoch)
        except PluginError as cause:
            self._drop_scorer(f"was lost: {cause}", cause)

    def _drop_scorer(self, why: str, cause: Exception) -> None:
        self._close_scorer()
        text = f"The background scorer {why}. Training goes on without it."
        if self._strict:
            raise PluginError(text) from cause
        self._warn(text)

    def _close_scorer(self) -> None:
        scorer, self._scorer = self._scorer, None
        if scorer is not None:
            scorer.close()

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
        options = dict(uses[0].options) if uses else {}
        options.pop("full", None)  # about what is left out, not about what is a copy
        return CopySearch(self.n, given=embeddings, **options)

    def _look_for_copies(self, *, last: bool = False) -> None:
        """Look again where there is more to go by; with several ranks, rank 0 looks and tells."""
        if self._copies is None:
            return
        with self.watch("copies"):
            if self._group is not None:
                self._group.all_max(self._copies.prints)
            changed = self.rank == 0 and self._copies.look(self._ledger.label, last=last)
            if self._group is not None and (changed := bool(self._group.broadcast([float(changed)])[0])):
                found = self._copies.found or Copies(
                    group=np.empty(self.n, dtype=np.int32), similarity=np.empty(self.n, dtype=np.float32)
                )
                self._group.broadcast_array(found.group)
                self._group.broadcast_array(found.similarity)
                self._copies.found = found
        if changed and self._copies.found is not None:
            group = self._copies.found.group
            self.events.emit(
                "copies", window=self.epoch, samples=int((group >= 0).sum()), groups=len(np.unique(group[group >= 0]))
            )

    def _open_sinks(self, sinks: Sequence[str | Sink], strict: bool) -> None:
        """On rank 0; one that cannot be opened stops all ranks."""
        trouble: Exception | None = None
        try:
            for given in sinks if self.rank == 0 else ():
                self.events.listen(guarded(sink(given), self._warn, strict=strict))
        except Exception as error:
            if self._group is None:
                raise
            trouble = error
        if sinks and self._group is not None:
            self._group.agree(trouble, ConfigError("A sink cannot be opened on rank 0; its message says why."))

    def evaluated(self, metric: float, **more: float) -> None:
        """Report a validation result, higher is better; it goes into the event log and steers keep = "auto"."""
        self.events.emit(
            "evaluated", metric=float(metric), progress=self.progress, window=self.epoch, visited=self.visits, **more
        )
        self._evaluations.append((self.progress, float(metric)))
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
            share, inside = self._group.broadcast(self._steering.numbers)
            self._steering.numbers = (share, inside)
