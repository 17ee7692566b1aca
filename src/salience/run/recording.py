"""Recording: per-sample losses go into the ledger, and come back as one weighted mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from salience import ledger as ledgers
from salience.errors import ConfigError, LossError, StateError
from salience.ledger import Ledger, Recorder
from salience.ledger.exchange import shared_ledger
from salience.plan import Shard
from salience.run.arrays import arrays, tensors
from salience.run.part import Batch, Part, Setup, Voice
from salience.run.robust import early_learning, strength
from salience.seeds import PICK, torch_generator
from salience.select.noise import judge
from salience.select.pick import RecentLosses, pick_positions

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)


class Recording(Part):
    """Knows the batch delivered last and its weights, and enters its losses into the ledger."""

    name = "recording"

    def __init__(self, setup: Setup, voice: Voice, ledger: Any = None) -> None:
        self._setup, self._voice = setup, voice
        self.ledger = shared_ledger(setup.ranks, setup.n) if setup.ranks else Ledger(setup.n)
        if ledger is not None:
            self._warm_start(ledger if isinstance(ledger, Ledger) else ledgers.load(ledger))
        self.recorder = Recorder(self.ledger, setup.ranks)
        self.batch: Batch | None = None
        """The batch delivered last."""
        self._shard: Shard | None = None
        self._stand_ins: dict[int, list[int]] = {}
        self._without_loss = 0
        """Batches of this window that came and went without a loss since the last one that had its own."""
        self._weights: dict[torch.device, Tensor] = {}
        self._all_ones, self._no_doubles = True, False
        self._recent = RecentLosses()
        self._suspects: tuple[int, npt.NDArray[np.bool_]] | None = None
        """Number of a window, and the labels that looked wrong at its start; None if they were not asked for."""

    def _warm_start(self, known: Ledger) -> None:
        """Start from the ledger of another run, whose window numbers mean nothing here."""
        if known.n != self._setup.n:
            raise StateError(
                f"The ledger to start from has {known.n} samples, the data set {self._setup.n}; they must be the same."
            )
        self._load(known.state_dict())
        if self._leads_node:
            self.ledger.last_seen[:] = -1

    @property
    def _leads_node(self) -> bool:
        return self._setup.ranks is None or self._setup.ranks.leads_node

    def _load(self, columns: Mapping[str, np.ndarray]) -> None:
        if self._leads_node:
            self.ledger.load_state_dict(columns)
        if self._setup.ranks is not None:
            self._setup.ranks.barrier()

    # --- a window ---

    def open(self, shard: Shard, done: frozenset[int]) -> None:
        plan = shard.plan
        self._shard, self.batch, self._weights, self._stand_ins = shard, None, {}, {}
        self._without_loss = 0
        self._all_ones = bool((plan.weights == 1).all())
        visited = np.zeros(self._setup.n, dtype=bool)
        visited[plan.ids] = True
        self._no_doubles = int(np.count_nonzero(visited)) == len(plan)

    def hand_over(self, batch: Batch) -> None:
        if self.batch is not None:
            self._without_loss = 0 if self.batch.recorded else self._without_loss + 1
        self.batch = batch
        if batch.broken:
            self._stand_ins[batch.number] = list(batch.broken)

    def flush(self, window: int) -> None:
        """Enter what was recorded into the ledger; collective where there are several ranks."""
        self.recorder.flush()
        bad, self.recorder.bad = self.recorder.bad, 0
        if bad:
            self._voice.warn(f"{bad} losses were NaN or infinite (window {window}); they were counted and not stored.")

    # --- a loss ---

    def skip(self) -> None:
        """The batch delivered last gets no loss, on purpose."""
        if self.batch is not None:
            self.batch.recorded = True

    def batch_for_loss(self, ids: Tensor | None, *, again: bool) -> Batch:
        """The batch that losses belong to: one loss per batch, in the order of delivery, unless `ids` say otherwise."""
        batch = self.batch_of(ids)
        if ids is not None or again:
            return batch
        if batch.recorded:
            raise LossError(
                "loss() was called twice for one batch. A loop that fetches ahead must use with_ids=True and pass ids= to "
                "loss(); for a second loss on purpose pass again=True."
            )
        if self._without_loss:
            raise LossError(
                f"loss() was called for this batch and not for the {self._without_loss} before it, so it cannot be told whose "
                "losses these are. A loop that fetches ahead must use with_ids=True and pass ids= to loss(); one that leaves "
                "a batch out on purpose calls loader.skip() for it."
            )
        return batch

    def batch_of(self, ids: Tensor | None) -> Batch:
        """The batch that `ids` belong to; None = the one delivered last."""
        if ids is None:
            if self.batch is None:
                raise LossError("loss() was called before a batch was delivered; iterate first, or pass ids=.")
            return self.batch
        if ids.dtype not in (torch.int64, torch.int32) or ids.dim() != 1:
            raise LossError(
                f"ids are {ids.dtype} of shape {tuple(ids.shape)}; pass the int64 ids that came with the batch."
            )
        array = ids.detach().cpu().numpy().astype(np.int64)
        if self.batch is not None and np.array_equal(array, self.batch.ids):
            return self.batch
        if self._shard is None or not len(array):
            raise LossError("These ids belong to no batch of this window.")
        spots = np.flatnonzero(self._shard.plan.ids == array[0])
        for number in (np.searchsorted(self._shard.start, spots, side="right") - 1).tolist():
            if number >= 0 and np.array_equal(self._shard.ids(number), array):
                return Batch(self._shard.plan.window, number, array)
        raise LossError("These ids are not a batch of this window, in its order; pass them on as they were delivered.")

    def usable(
        self, losses: Tensor, logits: Tensor | None, targets: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Logits and targets from which class statistics can be computed; others are ignored, with one warning."""
        if targets is None:
            return None, None
        if targets.dtype not in INTEGERS or targets.dim() != 1:
            self._voice.warn_once(
                f"targets are {targets.dtype} with {targets.dim()} dimensions, not one integer class per sample: "
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

    def pick(
        self,
        caller: str,
        batch: Batch,
        losses: Tensor,
        logits: Tensor | None,
        targets: Tensor | None,
        *,
        share: float,
        power: float | None = None,
    ) -> Tensor:
        """Record a whole batch as seen, and choose positions of round(share * B) samples of it to train on."""
        if not 0 < share <= 1:
            raise ConfigError(f"pick: share is {share}; it must be above 0 and at most 1.")
        check_losses(caller, losses, len(batch.ids))
        logits, targets = self.usable(losses, logits, targets)
        self._record(batch, losses, logits, targets, trained=False)
        generator = torch_generator(self._setup.seed, PICK, batch.window, batch.number, self._setup.rank)
        count, power = max(1, round(share * len(losses))), 1 / share - 1 if power is None else power
        return pick_positions(self._recent.percentile(losses), count, power, generator)

    def record(
        self, batch: Batch, losses: Tensor, logits: Tensor | None, targets: Tensor | None, kept: Tensor | None
    ) -> None:
        """Enter a batch into the ledger; for a picked batch, only which samples were trained on."""
        batch.recorded = True
        if kept is None:
            self._record(batch, losses, logits, targets, number=batch.number if self._no_doubles else None)
        else:
            self.recorder.trained(batch.ids, kept, window=batch.window)

    def _record(self, batch: Batch, losses: Tensor, logits: Tensor | None, targets: Tensor | None, **more: Any) -> None:
        """Record only the first of several views of a sample, so that they count as one sample."""
        ids, hint = batch.ids, batch.hint
        if self._shard is not None and not self._no_doubles and batch.window == self._shard.plan.window:
            first = np.flatnonzero(self._shard.plan.views[self._shard.span(batch.number)] == 0)
            if not len(first):
                return
            if len(first) < len(ids):
                ids, positions = ids[first], torch.from_numpy(first)
                losses = losses[positions.to(losses.device)]
                logits, targets, hint = (
                    None if part is None else part[positions.to(part.device)] for part in (logits, targets, hint)
                )
        self.recorder.record(ids, losses, logits, targets, window=batch.window, hint=hint, **more)

    def weighted_mean(
        self, batch: Batch, losses: Tensor, logits: Tensor | None, kept: Tensor | None, robust: float | str
    ) -> Tensor:
        """sum(w * l) / B; over several ranks sum(w * l) * world / B_global, so that DDP's mean is the batch's gradient."""
        weights = self._weights_of(batch, losses.device)
        if weights is not None and kept is not None:
            weights = weights[kept.to(weights.device)]
        share = len(losses)
        if kept is None and self._shard is not None:
            how_much = strength(robust, self._shard.plan.noise) if logits is not None else 0.0
            if how_much > 0 and logits is not None:  # what is learnt from, not what is recorded
                losses = losses + how_much * early_learning(logits, batch.ids, self.ledger)
            if self._setup.world > 1:
                share = int(self._shard.global_sizes[batch.number]) / self._setup.world
        if weights is None and share == len(losses):
            return losses.mean()
        weighted = losses if weights is None else losses.float() * weights
        return weighted.sum() / share

    def mean_weights(self, batch: Batch, losses: Tensor, robust: float | str) -> Tensor:
        """Weights [B] that sum the losses of a whole batch to what `weighted_mean` gives."""
        if self._shard is not None and strength(robust, self._shard.plan.noise) > 0:
            self._voice.warn_once(
                "Early-learning regularisation is off inside a compiled step; compile the model alone."
            )
        share = len(losses)
        if self._shard is not None and self._setup.world > 1:
            share = int(self._shard.global_sizes[batch.number]) / self._setup.world
        weights = self._weights_of(batch, losses.device)
        return torch.full_like(losses, 1 / share, dtype=torch.float32) if weights is None else weights / share

    def _weights_of(self, batch: Batch, device: torch.device) -> Tensor | None:
        """Loss weights of a batch, float32 [B]; None = all are 1."""
        stand_ins = self._stand_ins.get(batch.number)
        if self._shard is None or (self._all_ones and not stand_ins):
            return None
        if device not in self._weights:
            self._weights[device] = torch.from_numpy(self._shard.plan.weights.copy()).to(device)
        weights = self._weights[device][self._shard.span(batch.number)]
        if stand_ins:
            weights = weights.clone()
            weights[stand_ins] = 0
        return weights

    def relabelled(self, targets: Tensor, ids: Tensor | None) -> Tensor:
        """The batch's targets with suspected ones replaced by the class the model gives."""
        batch = self.batch_of(ids)
        if len(targets) != len(batch.ids) or targets.dim() != 1:
            raise LossError(
                f"relabelled() was given {tuple(targets.shape)} targets for {len(batch.ids)} samples; pass them all."
            )
        if self._suspects is None or self._suspects[0] != batch.window:
            self._suspects = batch.window, judge(self.ledger).suspects()
        wrong = torch.from_numpy(self._suspects[1][batch.ids]).to(targets.device)
        guess = torch.from_numpy(self.ledger.vote[batch.ids, 0]).to(targets)
        return torch.where(wrong, guess, targets)

    # --- saved ---

    def state_dict(self) -> dict[str, Any]:
        recent, suspects = self._recent.values, self._suspects
        return {
            "ledger": tensors(self.ledger.state_dict()),
            "recent_losses": None if recent is None else recent.detach().cpu().clone(),
            "suspects": None if suspects is None else (suspects[0], torch.from_numpy(suspects[1].copy())),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._load(arrays(state["ledger"]))
        self._recent.values = state["recent_losses"]
        suspects = state["suspects"]
        self._suspects = None if suspects is None else (int(suspects[0]), suspects[1].numpy())
        self.batch, self._shard = None, None


def check_losses(caller: str, losses: Tensor, count: int) -> None:
    """Raise LossError unless there is one loss per sample."""
    if losses.dim() == 0:
        raise LossError(f"{caller}() was given a single number; it needs one loss per sample: use reduction='none'.")
    if losses.dim() > 1:
        axes = tuple(range(1, losses.dim()))
        raise LossError(
            f"{caller}() was given losses of shape {tuple(losses.shape)}; it needs one per sample: reduce the rest first, "
            f"e.g. losses.mean(dim={axes})."
        )
    if len(losses) != count:
        raise LossError(
            f"{caller}() was given {len(losses)} losses for a batch of {count} samples; pass one per sample. "
            "A loop that fetches ahead must use with_ids=True and pass ids= to loss()."
        )
