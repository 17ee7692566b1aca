"""Sensing: what the attached model says besides losses. Gradient norms, features, a proxy, a scorer in the background."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from salience.errors import ConfigError, Misattributed, PluginError, StateError
from salience.ledger import Ledger, Recorder
from salience.ledger.embeddings import Embeddings
from salience.ledger.statistics import finish
from salience.plan import Shard
from salience.ranks import Ranks
from salience.run.copying import Copying
from salience.run.part import Batch, Part, Setup, Voice
from salience.run.state import arrays, tensors
from salience.seeds import TIES, generator
from salience.select.reference import reference_of
from salience.select.view import Reference
from salience.signals import Attached
from salience.signals.ghost import Extent
from salience.signals.jury import Juror, Jury
from salience.signals.proxy import Proxy
from salience.signals.remote import RemoteScorer
from salience.signals.scorer import SCORE_ROWS, Found, Ids, Scorer, stalest

_NOTHING_FOUND: Found = (np.empty(0, dtype=np.int64), np.empty((len(SCORE_ROWS), 0), dtype=np.float32), 0)

MakeScorer = Callable[[nn.Module, torch.device | str], Scorer]


class Sensing(Part):
    """The model that is trained, and the small models and the scorer beside it, if they were attached."""

    name = "sensing"

    def __init__(self, setup: Setup, voice: Voice, recorder: Recorder, given: Reference | None = None) -> None:
        self._setup, self._voice, self._recorder, self._watch = setup, voice, recorder, voice.watch
        self.given = given
        """The reference as given by the user."""
        self.attached: Attached | None = None
        self.proxy: Proxy | None = None
        self.jury: Jury | None = None
        self.scorer: Scorer | RemoteScorer | None = None
        self._scores_come = False
        """True while the ranks exchange what their scorers found; still True on a rank that has lost its own."""
        self._ratio: Tensor | None = None
        """|gradient|^2 divided by |gradient of the last layer|^2 in the previous step; None if that is not known."""
        self._waiting: dict[str, Mapping[str, Any]] = {}
        """States of a resumed run's proxy and jury that have not been attached yet."""
        self._asked = -1
        """The window for which scores were asked last."""

    def attach(
        self,
        model: nn.Module,
        *,
        grad_norm: Extent | None,
        every: int,
        features: Embeddings | None,
        takes_features: bool,
        proxy: nn.Module | None,
        proxy_optimizer: torch.optim.Optimizer | None,
        background: torch.device | str | bool | Path,
        make_scorer: MakeScorer | None,
        jury: Sequence[Juror] | None = None,
    ) -> None:
        """Put hooks on the model; see `Loader.attach`."""
        world = self._setup.world
        if self._setup.stream and (proxy is not None or jury is not None or background is not False):
            raise ConfigError(
                "attach: proxy=, jury= and background= need samples that can be fetched by number, which a stream has not; "
                "leave them out."
            )
        if world > 1 and (proxy is not None or jury is not None):
            raise ConfigError(
                f"attach: proxy= and jury= work in one process, and this run has {world} ranks; leave them out."
            )
        if proxy is None and proxy_optimizer is not None:
            raise ConfigError("attach: proxy_optimizer= came without proxy=, the model it trains.")
        remote = isinstance(background, Path)
        if background is not False and make_scorer is None and not remote:
            raise ConfigError("attach: background= needs the data set, which only salience.Loader has; leave it out.")
        self.detach()
        self.attached = Attached(model, grad_norm=grad_norm, every=every, features=takes_features)
        self._recorder.embeddings = features
        if proxy is not None:
            self.proxy = Proxy(model, proxy, proxy_optimizer, self._setup.n)
        if jury is not None:
            self.jury = Jury(model, jury, self._setup.n, self._setup.seed)
        self._resume()
        if background is not False:
            self._scores_come = True
            try:
                if isinstance(background, Path):
                    first = self._setup.rank == 0  # it alone asks the scorer elsewhere, about all samples
                    self.scorer = RemoteScorer(model, background, n=self._setup.n) if first else None
                elif make_scorer is not None:
                    self.scorer = make_scorer(model, "cpu" if background is True else background)
            except ConfigError:
                raise
            except Exception as cause:
                self._drop_scorer(f"could not be started: {type(cause).__name__}: {cause}", cause)

    @property
    def in_use(self) -> bool:
        return bool(self._waiting or self.attached or self.proxy or self.jury or self.scorer)

    def regrow_features(self, copying: Copying) -> None:
        """The data set has grown: record features into an array of its size, if they were being recorded."""
        if self._recorder.embeddings is not None:
            self._recorder.embeddings = copying.want_features(observing=False)

    def resume_features(self, features: Embeddings | None) -> None:
        """Record features into the array that was loaded, if they were being recorded."""
        if self._recorder.embeddings is not None:
            self._recorder.embeddings = features

    def detach(self) -> None:
        """Remove the hooks from the model, and release the proxy, the jury and the background scorer."""
        self.take()
        self.end_scorer()
        self._scores_come, self._ratio = False, None
        for helper in (self.proxy, self.jury):
            if helper is not None:
                helper.close()
        self.proxy = self.jury = None
        attached, self.attached = self.attached, None
        if attached is not None:
            attached.detach()

    # --- a window ---

    def flush(self, window: int) -> None:
        self.take()
        if self.proxy is not None:
            self.proxy.enter()
        if self.jury is not None:
            with self._watch("jury"):
                self.jury.enter()

    def prepare(self, window: int, ledger: Ledger) -> None:
        if self.scorer is not None or (self._scores_come and self._setup.ranks is not None):
            self._take_scores()

    def open(self, shard: Shard, done: frozenset[int]) -> None:
        for name in self._waiting:
            raise StateError(f"The state has a {name}; call loader.attach(model, {name}=...) with it before going on.")
        if self.scorer is not None and self._asked != shard.plan.window:
            self._asked = shard.plan.window
            self._ask_scores(self.scorer, shard.plan.ids, shard.plan.window)

    def hand_over(self, batch: Batch) -> None:
        self.take()
        if self.attached is not None:
            self.attached.deliver(batch.number)
        for helper in (self.proxy, self.jury):
            if helper is not None:
                helper.deliver()

    def on_loss(self, batch: Batch, losses: Tensor, kept: Tensor | None, targets: Tensor | None) -> None:
        """Watch the backward pass of these losses, take the features of the forward pass, and teach the models beside it."""
        if self.attached is not None:
            self._watch_model(self.attached, batch, losses, kept)
        stand_ins = list(batch.broken)
        if (proxy := self.proxy) is not None:
            self._teach("proxy", proxy, targets, lambda labels: proxy.train(labels, batch.ids, kept, stand_ins))
        if (jury := self.jury) is not None:
            self._teach(
                "jury", jury, targets, lambda labels: jury.sit(labels, batch.ids, kept, stand_ins, window=batch.window)
            )

    def _watch_model(self, attached: Attached, batch: Batch, losses: Tensor, kept: Tensor | None) -> None:
        choice = attached.watch(losses, batch.ids, kept, window=batch.window)
        if choice is not None:
            self._voice.events.emit("signals", **asdict(choice), text=choice.text)
        if not batch.features:
            return
        features = attached.take_features()
        if batch.broken:  # a stand-in would look like a copy of the sample it stands in for
            return
        if features is not None and len(features) in (len(batch.ids), len(losses)):
            of = kept if len(features) < len(batch.ids) else None
            self._recorder.features(batch.ids, features, of, window=batch.window)
        elif self._recorder.embeddings is not None:
            self._voice.warn_once(
                "The attached model gives no features (what its last Linear is given): no near-copies by them."
            )

    def _teach(self, name: str, helper: Proxy | Jury, targets: Tensor | None, train: Callable[[Tensor], bool]) -> None:
        """One step of the proxy or of the jury; if it fails it is off, and what it found stays as it is."""
        if not helper.close.alive:
            return
        if targets is None:
            raise ConfigError(
                f"The {name} needs integer targets, one class per sample: call loader.loss(losses, logits, targets)."
            )
        try:
            with self._watch(name):
                heard = train(targets.where(targets >= 0, -100))  # -100 is ignored
        except Exception as cause:
            helper.close()
            self._voice.failed(f"The {name} failed and is off: {type(cause).__name__}: {cause}", cause)
            return
        if not heard:
            self._voice.warn_once(
                f"The {name} has no input: the attached model did not run, with the batch as the first axis of its first "
                "tensor, between the batch's delivery and loss(). Attach the model that makes the losses."
            )

    def say_compiled(self) -> None:
        """loss() was called inside a compiled step, where hooks on the model do not run."""
        if self.attached is not None:
            self._voice.warn_once(
                "loss() is part of a compiled step: gradient norms, features, proxy and jury of the attached model are off. "
                "Compile the model alone to have them."
            )

    def take(self) -> None:
        """Pass the gradient norms of the backward passes since the last call to the recorder."""
        for step in [] if self.attached is None else self.attached.take():
            with self._watch("signals"):
                squares = step.finish()
            self._watch.add("signals", step.seconds)
            if step.trouble is not None:
                self.detach()
                self._voice.failed(f"Gradient norms failed and are off: {step.trouble!r}.", step.trouble)
            elif squares is None or step.scale is None or step.ids is None:
                self._voice.warn_once(
                    "No gradient norms: no layer of the attached model ran, with the batch as its first axis, between the "
                    "batch's delivery and loss(). Attach the model that makes the losses, not compiled by torch.compile."
                )
            else:
                self._ratio = step.ratio
                self._recorder.norms(step.ids, squares, step.scale, step.kept, window=step.window)

    # --- models that learn beside it ---

    @property
    def jury_ledgers(self) -> tuple[Ledger, Ledger] | None:
        """What the jury knows about the samples: as seen by the network that trained on each, and by the one that did not."""
        return None if self.jury is None else (self.jury.trained, self.jury.held_out)

    @property
    def reference(self) -> Reference | None:
        """The opinion of another model on the samples: the reference that was given, otherwise the proxy's losses so far."""
        if self.given is not None or self.proxy is None:
            return self.given
        losses = self.proxy.losses.copy()
        return (
            Reference(loss=losses, hardness=losses) if np.isnan(losses).all() else reference_of(losses, self._setup.n)
        )

    def _resume(self) -> None:
        """Load the states of a resumed run's proxy and jury into those that are attached by now."""
        if self.proxy is not None and "proxy" in self._waiting:
            self.proxy.load_state_dict(self._waiting["proxy"])
            del self._waiting["proxy"]
        if self.jury is not None and "jury" in self._waiting:
            state = self._waiting["jury"]
            self.jury.load_state_dict(state)
            self.jury.trained.load_state_dict(arrays(state["trained"]))
            self.jury.held_out.load_state_dict(arrays(state["held_out"]))
            del self._waiting["jury"]

    # --- the background scorer ---

    def _take_scores(self) -> None:
        """Enter what the background scorers of all ranks have found by now: seen, not trained."""
        found = _NOTHING_FOUND
        try:
            with self._watch("scorer"):
                found = found if self.scorer is None else self.scorer.take()
        except PluginError as cause:
            self._drop_scorer(f"was lost: {cause}", cause)
        ratio = math.nan if self._ratio is None else float(self._ratio)
        of_all, ratios = [found], [ratio]
        if self._setup.ranks is not None:
            of_all, ratios = _gathered(self._setup.ranks, found, ratio)
        ratio = float(np.nanmedian(ratios)) if np.isfinite(ratios).any() else math.nan
        trouble: Exception | None = None
        if self._setup.ranks is None or self._setup.ranks.leads_node:
            try:
                for ids, values, window in of_all:
                    self._enter_scores(ids, values, window, math.sqrt(ratio))
            except Misattributed as cause:
                trouble = cause
        if self._setup.ranks is not None:  # nobody reads the ledger before it is entered
            self._setup.ranks.barrier()
        if trouble is not None:
            self._drop_scorer(f"was lost: {trouble}", trouble)
        elif self.scorer is not None:
            self._voice.events.emit("scored", window=of_all[0][2], samples=sum(len(ids) for ids, *_ in of_all))

    def _enter_scores(self, ids: Ids, values: npt.NDArray[np.float32], window: int, ratio: float) -> None:
        """Enter scores of `window`. `ratio` is |gradient| / |gradient of the last layer|; NaN = not known."""
        ledger = self._recorder.ledger
        waited = ledger.last_seen[ids] < window
        ids, rows = ids[waited], dict(zip(SCORE_ROWS, values[:, waited], strict=True))
        norms = rows.pop("forward_norm") * np.float32(ratio)
        rows = finish(rows)
        if (ledger.label >= 0).any():
            ledger.check_labels(ids, rows["target"].astype(np.int32))
        if not (ledger.guess >= 0).any():  # loss() is given no logits: then scores go by the loss
            rows = {"loss": rows["loss"]}
        self._recorder.bad += ledger.record(ids, rows, window=window, trained=False, unique=True)
        known = np.isfinite(norms)
        ledger.grad_norm[ids[known]] = norms[known]

    def _ask_scores(self, scorer: Scorer | RemoteScorer, picked: Ids, window: int) -> None:
        """Ask the background scorer for the stalest samples that this window does not visit, with the current weights."""
        try:
            with self._watch("scorer"):
                rng = generator(self._setup.seed, TIES, window)
                stale = stalest(picked, self._recorder.ledger.last_seen, rng)
                if isinstance(scorer, Scorer):  # each rank has its own
                    stale = stale[self._setup.rank :: self._setup.world]
                scorer.ask(stale, window=window)
        except PluginError as cause:
            self._drop_scorer(f"was lost: {cause}", cause)

    def end_scorer(self) -> None:
        """Stop the background scorer."""
        scorer, self.scorer = self.scorer, None
        if scorer is not None:
            with contextlib.suppress(PluginError):  # where the folder is gone, nobody listens
                scorer.close()

    def _drop_scorer(self, why: str, cause: Exception) -> None:
        self.end_scorer()
        self._voice.failed(f"The background scorer {why}. Training goes on without it.", cause)

    # --- saved ---

    def state_dict(self) -> dict[str, Any]:
        # With a background scorer, what is learnt by a window's edge depends on timing.
        proxy, jury = self._waiting.get("proxy"), self._waiting.get("jury")
        if self.proxy is not None:
            proxy = self.proxy.state_dict()
        if self.jury is not None:
            jury = {
                **self.jury.state_dict(),
                "trained": tensors(self.jury.trained.state_dict()),
                "held_out": tensors(self.jury.held_out.state_dict()),
            }
        return {"proxy": proxy, "jury": jury, "background": self.scorer is not None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.attached is not None:
            self.attached.take()  # of steps after the state was saved
        self._waiting = {name: state[name] for name in ("proxy", "jury") if state[name] is not None}
        self._resume()


def _gathered(ranks: Ranks, found: Found, ratio: float) -> tuple[list[Found], list[float]]:
    """What every rank found, and its ratio; ids and float32 travel exactly as float64."""
    ids, values, window = found
    mine = np.concatenate(([window, ratio], ids, values.ravel())).astype(np.float64)
    of_all: list[Found] = []
    ratios: list[float] = []
    for part in ranks.all_gather_ragged(torch.from_numpy(mine), name="scores"):
        row = part.numpy()
        count = (len(row) - 2) // (1 + len(SCORE_ROWS))
        theirs = row[2 + count :].astype(np.float32).reshape(len(SCORE_ROWS), count)
        of_all.append((row[2 : 2 + count].astype(np.int64), theirs, int(row[0])))
        ratios.append(float(row[1]))
    return of_all, ratios
