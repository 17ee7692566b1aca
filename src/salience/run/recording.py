"""Recording: per-sample losses go into the ledger, and come back as one weighted mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from salience import ledger as ledgers
from salience.batches import comparable, integer_targets
from salience.errors import ConfigError, LossError, StateError
from salience.ledger import Ledger, Recorder
from salience.ledger.exchange import shared_ledger
from salience.ledger.history import History
from salience.ledger.keys import Keys
from salience.plan import Shard
from salience.run.losses import OFF, Labels, Targets, class_labels, early_learning
from salience.run.moving import tensors_of
from salience.run.part import Batch, Part, Setup, Voice
from salience.run.state import arrays, tensors
from salience.run.visits import Visits
from salience.seeds import PICK, torch_generator
from salience.select.noise import judge
from salience.select.pick import RecentLosses, latest_last, pick_positions

TINY = 1e-30
"""Divisor of a batch that has nothing to learn from, whose loss is 0."""


class Recording(Part):
    """Knows the batch delivered last and its weights, and enters its losses into the ledger."""

    name = "recording"

    def __init__(self, setup: Setup, voice: Voice, ledger: Any = None, keys: Keys | None = None) -> None:
        self._setup, self._voice = setup, voice
        self.ledger = shared_ledger(setup.ranks, setup.n) if setup.ranks else Ledger(setup.n)
        self.ledger.keys = keys
        if ledger is not None:
            self._warm_start(ledger if isinstance(ledger, Ledger) else ledgers.load(ledger))
        self.recorder = Recorder(self.ledger, setup.ranks)
        self.history = History(setup.n, setup.seed)
        """What the ledger said of a few samples after each window; the same on every rank."""
        self.batch: Batch | None = None
        """The batch delivered last."""
        self.peeked = False
        """True if an iterator that does not count has delivered since."""
        self._now: Visits | None = None
        self._before: Visits | None = None
        """The previous window: a loop that fetches ahead hands in its losses late."""
        self._without_loss = 0
        """Batches of this window that were delivered since the last one that got its loss."""
        self._recent = RecentLosses()
        self._suspects: tuple[int, npt.NDArray[np.bool_]] | None = None
        """Number of a window, and the labels that looked wrong at its start; None until somebody asks."""

    def _warm_start(self, known: Ledger) -> None:
        """Start from the ledger of another run, whose window numbers mean nothing here. Rows are found by their keys."""
        mine = self.ledger.keys
        if (known.keys is None) != (mine is None):
            whose, other = ("The ledger", "this run has none") if mine is None else ("This run", "the ledger has none")
            raise StateError(
                f"{whose} has keys and {other}, so rows cannot be matched; pass the same keys= to both runs."
            )
        if known.keys is not None and mine is not None and self._setup.stream:
            mine.replace(known.keys)
            self.ledger.extend(known.n)
            self._setup.grow(known.n)
        elif known.keys is not None and mine is not None:
            rows = known.keys.find(mine)
            found = int(np.count_nonzero(rows >= 0))
            self._voice.events.emit("keys", known=found, new=len(rows) - found, gone=len(known.keys) - found)
            known = known.taken(rows)
        if known.n != self._setup.n:
            raise StateError(
                f"The ledger to start from has {known.n} samples, the data set {self._setup.n}; they must be the same."
            )
        self._load(known.state_dict())
        self.ledger.trial = self.ledger.trial[:0]
        if self._leads_node:
            self.ledger.last_seen[:] = -1

    @property
    def _leads_node(self) -> bool:
        return self._setup.ranks is None or self._setup.ranks.leads_node

    def _load(self, columns: Mapping[str, np.ndarray]) -> None:
        self.ledger.load_state_dict(columns, columns=self._leads_node)
        if self._setup.ranks is not None:
            self._setup.ranks.barrier()

    # --- a window ---

    def prepare(self, window: int, ledger: Ledger) -> None:
        self.remember(window - 1)

    def remember(self, window: int) -> None:
        """Keep what the ledger says after `window` in the history, unless nothing was recorded yet."""
        new = window >= 0 and (not len(self.history) or self.history.windows[-1] < window)
        if new and self.ledger.seen.any():
            self.history.note(self.ledger, window)

    def open(self, shard: Shard, done: frozenset[int]) -> None:
        if self._now is not None and self._now.shard.plan.window != shard.plan.window:
            self._before = self._now
        self._now = Visits(shard, set(done))
        self.batch, self._without_loss = None, 0

    def hand_over(self, batch: Batch) -> None:
        assert self._now is not None
        if self.batch is not None:
            answered = self.batch.number in self._now.recorded or self.batch.kept is not None
            self._without_loss = 0 if answered else self._without_loss + 1
        self.batch, self.peeked = batch, False
        batch.visits = self._now
        self._now.deliver(batch)

    def flush(self, window: int) -> None:
        self.recorder.flush()
        bad, self.recorder.bad = self.recorder.bad, 0
        if bad:
            self._voice.warn(
                f"{bad} losses were NaN or infinite, or of samples without a token under their mask (window {window}); they "
                "were counted and not stored."
            )
        if self.recorder.without_class:
            self._voice.warn_once(
                f"Some targets name no class (ignore_index, or probabilities that are not one-hot): of these samples {OFF}"
            )
        if self.recorder.redrawn is not None:
            self._voice.warn_once(
                f"Targets are drawn anew at each visit (sample {self.recorder.redrawn} had two), so no class belongs to a "
                f"sample: {OFF}"
            )

    # --- a loss ---

    def skip(self) -> None:
        """The batch delivered last gets no loss, on purpose."""
        if self.batch is not None:
            self.batch.visits.recorded.add(self.batch.number)

    def batch_for_loss(self, ids: Tensor | None, *, again: bool) -> Batch:
        """The batch that losses belong to: one loss per batch, in the order of delivery, unless `ids` say otherwise."""
        batch = self.batch
        if ids is not None or batch is None or batch.visits.reordered:
            batch = self.batch_of(ids)
        if again:
            return batch
        recorded = batch.number in batch.visits.recorded
        if recorded and self.peeked and ids is None:
            raise LossError(
                "These losses seem to be of a batch that does not count: its iterator was taken while another one is in "
                "the middle of its epoch. Let go of that one first (del it), or pass ids= (with_ids=True)."
            )
        if recorded:
            raise LossError(
                "loss() was called twice for one batch. A loop that fetches ahead must use with_ids=True and pass ids= to "
                "loss(); for a second loss on purpose pass again=True."
            )
        if self._without_loss and ids is None:
            raise LossError(
                f"This batch is given losses and the {self._without_loss} before it got none, so it cannot be told whose "
                "losses these are. A loop that fetches ahead must use with_ids=True and pass ids= to loss(); one that leaves "
                "a batch out on purpose calls loader.skip() for it."
            )
        return batch

    def batch_of(self, ids: Tensor | None) -> Batch:
        """The batch that `ids` belong to; None = the one delivered last."""
        if self._now is not None and self._now.reordered:
            raise LossError(
                "The collate function returned its samples in another order, so that losses would go to the wrong ones. Have "
                "it return salience.Collated(batch, positions), with the position of each row's sample."
            )
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
        for visits in (self._now, self._before):
            number = None if visits is None else visits.find(array)
            if visits is not None and number is not None:
                return Batch(visits.shard.plan.window, number, array, visits.rows.get(number), visits=visits)
        raise LossError(
            "These ids are not a batch that was delivered in this window or the one before, in its order; pass them on as they "
            "were delivered."
        )

    def labels(self, batch: Batch, count: int, logits: Tensor | None, targets: Targets | None) -> Labels:
        """What class statistics can be computed from. Targets that name no classes are ignored, with one warning."""
        found = class_labels(count, logits, targets)
        if found.remark:
            self._voice.warn_once(found.remark)
        batch.as_delivered = found.delivered
        return found

    def pick(
        self,
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
        self._enter(batch, losses, logits, targets, trained=False)
        batch.picks = share
        generator = torch_generator(self._setup.seed, PICK, batch.window, batch.number, self._setup.rank)
        count, power = max(1, round(share * len(losses))), 1 / share - 1 if power is None else power
        return pick_positions(self._recent.percentile(losses), count, power, generator)

    def record(
        self, batch: Batch, losses: Tensor, logits: Tensor | None, targets: Tensor | None, kept: Tensor | None
    ) -> None:
        """Enter a batch into the ledger; if samples of it were picked, only which ones were trained on."""
        batch.visits.recorded.add(batch.number)
        if kept is None:
            self._enter(batch, losses, logits, targets)
            return
        stand_ins = batch.visits.stand_ins.get(batch.number)
        if stand_ins:
            kept = kept[~torch.isin(kept, torch.tensor(stand_ins, device=kept.device))]
        self.recorder.trained(batch.ids, kept, window=batch.window)

    def _enter(
        self, batch: Batch, losses: Tensor, logits: Tensor | None, targets: Tensor | None, *, trained: bool = True
    ) -> None:
        ids, visits = batch.ids, batch.visits
        number = batch.number if visits.no_doubles and batch.rows is None else None
        hint, columns = (None, ()) if targets is None or not batch.columns else _delivered(batch, targets)
        first = None if visits.no_doubles and not visits.stand_ins else visits.first_views(batch)
        if first is not None:
            if not len(first):
                return
            ids, rows, same = ids[first], torch.from_numpy(first), hint is targets
            losses = losses[rows.to(losses.device)]
            logits, targets = (None if part is None else part[rows.to(part.device)] for part in (logits, targets))
            hint = targets if same else None if hint is None else hint[rows]
            columns = [part[rows] for part in columns]
        self.recorder.record(
            ids,
            losses,
            logits,
            targets,
            window=batch.window,
            trained=trained,
            hint=hint,
            columns=columns,
            number=number,
        )

    def weights(self, ids: Tensor | None) -> Tensor:
        """Loss weights of a delivered batch, float32 [B]."""
        batch = self.batch_of(ids)
        device = torch.device("cpu") if ids is None else ids.device
        weights = batch.visits.weights(batch, device)
        return torch.ones(len(batch.ids), device=device) if weights is None else weights.clone()

    def weighted_mean(
        self,
        batch: Batch,
        losses: Tensor,
        logits: Tensor | None,
        kept: Tensor | None,
        counts: Tensor | None = None,
        total: Tensor | float | None = None,
    ) -> Tensor:
        """sum(w * l) / B; over several ranks sum(w * l) * world / B_global, so that DDP's mean is the batch's gradient.

        With `counts` c it is sum(w * l * c) / sum(c); with the `total` of a step of several batches, the sum * world / total.
        """
        visits = batch.visits
        if visits.plain_mean and counts is None and total is None and not visits.stand_ins:
            return losses.mean()
        weights = visits.weights(batch, losses.device)
        robust = visits.shard.plan.robust
        if robust > 0 and kept is None and logits is not None:  # what is learnt from, not what is recorded
            losses = losses + robust * early_learning(logits, batch.ids, self.ledger)
        fill = batch.visits.shard.fill
        if counts is None and total is None and weights is None and self._setup.world == 1 and fill is None:
            return losses.mean()
        if kept is not None:
            weights, counts = (None if part is None else part[kept.to(part.device)] for part in (weights, counts))
        if total is not None:
            divisor = total / self._setup.world * (1 if kept is None else len(kept) / len(batch.ids))
        else:
            divisor = batch.visits.divisor(batch, len(losses)) if counts is None else counts.sum().clamp(min=TINY)
            if counts is not None and fill is not None:  # a token counts alike in every batch
                divisor = divisor / fill.item(batch.number)
        if counts is not None:  # in single precision, since half would overflow
            losses = torch.where(counts > 0, losses * counts.float(), 0)
        weighted = losses if weights is None else losses.float() * weights
        return weighted.sum() / divisor

    def mean_weights(self, batch: Batch, losses: Tensor) -> Tensor:
        """Weights [B] that sum the losses of a whole batch to what `weighted_mean` gives."""
        if batch.visits.shard.plan.robust > 0:
            self._voice.warn_once(
                "Early-learning regularisation is off inside a compiled step; compile the model alone."
            )
        divisor, weights = batch.visits.divisor(batch, len(losses)), batch.visits.weights(batch, losses.device)
        return torch.full_like(losses, 1 / divisor, dtype=torch.float32) if weights is None else weights / divisor

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
        recent, suspects, ranks = self._recent.values, self._suspects, self._setup.ranks
        recent = torch.empty(0) if recent is None else recent.detach().cpu().clone()
        return {
            "ledger": tensors(self.ledger.state_dict()),
            "history": tensors(self.history.state_dict()),
            "recent_losses": [recent] if ranks is None else ranks.all_gather_ragged(recent, name="state_dict"),
            "suspects": None if suspects is None else (suspects[0], torch.from_numpy(suspects[1].copy())),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._load(arrays(state["ledger"]))
        self.history.load_state_dict({name: column.numpy() for name, column in state["history"].items()})
        recent = state["recent_losses"]
        same = len(recent) == self._setup.world
        self._recent.load(recent[self._setup.rank] if same else latest_last(recent))
        suspects = state["suspects"]
        self._suspects = None if suspects is None else (int(suspects[0]), suspects[1].numpy())
        self.recorder.forget()
        self.batch, self._now, self._before = None, None, None


def _delivered(batch: Batch, targets: Tensor) -> tuple[Tensor | None, Sequence[Tensor]]:
    """What `targets` are to be compared with, as `Recorder.record` takes it; themselves if they are what was delivered."""
    if batch.columns[-1] is targets or any(part is targets for part in batch.columns):
        return targets, ()
    if not targets.is_cpu and any(part is targets for part in tensors_of(batch.content)):
        return targets, ()
    found = comparable(batch.columns, len(batch.ids))
    return integer_targets(found) if batch.as_delivered else None, found
