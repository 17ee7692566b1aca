"""From per-sample losses to one weighted mean, and into the ledger."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from salience.config import SelectConfig
from salience.errors import ConfigError, LossError
from salience.ledger import COLUMNS
from salience.run.base import Batch
from salience.run.robust import early_learning, strength
from salience.run.watching import Watching
from salience.seeds import PICK, torch_generator
from salience.select.noise import judge
from salience.select.pick import RecentLosses, pick_positions


class Losses(Watching):
    """`loss` and what belongs to it."""

    _batch: Batch | None
    _recent: RecentLosses
    _weights: dict[torch.device, Tensor]
    _plain_weights: bool
    _no_doubles: bool
    _checked_needs: bool
    _suspects: tuple[int, npt.NDArray[np.bool_]] | None
    """Labels that looked wrong at the start of the window of that number, where somebody asked."""

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
        self.steps.lost(losses.device)
        batch = self._batch_of(ids)
        if self._copies is not None:
            self._copies.begin()
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
            wanted = self._copies is not None and self._copies.wants(batch.window)
            features = self._attached.take_features() if wanted else None
            if features is not None and len(features) in (len(batch.ids), count):
                of = kept if len(features) < len(batch.ids) else None
                self._recorder.features(batch.ids, features, of, window=batch.window)
            elif wanted and self._recorder.embeddings is not None:
                self._warn_once(
                    "The attached model gives no features (what its last Linear is given): no near-copies by them."
                )
        if kept is None:
            self._record(batch, losses, logits, targets, number=self._number(batch))
        else:
            self._recorder.trained(batch.ids, kept, window=batch.window)
        weights = None if self._plain_weights else self._weights_of(batch, losses.device)
        self.watch.add("record", time.perf_counter() - begin)
        if self._proxy is not None:
            self._train_proxy(self._proxy, batch, kept, targets)
        if weights is not None and kept is not None:
            weights = weights[kept.to(weights.device)]
        if kept is None:
            losses = self._regularised(batch, losses, logits)
        share = count
        if self._shard is not None and self.world > 1 and kept is None:
            share = int(self._shard.global_sizes[batch.number]) / self.world
        if weights is None and share == count:
            return losses.mean()
        weighted = losses if weights is None else losses.float() * weights
        return weighted.sum() / share

    def _regularised(self, batch: Batch, losses: Tensor, logits: Tensor | None) -> Tensor:
        """The losses with the term of `robust`, where it is on: what is learnt from, not what is recorded."""
        if not isinstance(self._config, SelectConfig) or logits is None or self._shard is None:
            return losses
        how_much = strength(self._config.robust, self._shard.plan.noise)
        return losses + how_much * early_learning(logits, batch.ids, self._ledger) if how_much > 0 else losses

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
            self._suspects = batch.window, judge(self._ledger).suspects()
        wrong = torch.from_numpy(self._suspects[1][batch.ids]).to(targets.device)
        guess = torch.from_numpy(self._ledger.vote[batch.ids, 0]).to(targets)
        return torch.where(wrong, guess, targets)

    @property
    def _picks(self) -> float:
        """Share of a batch that `loss` itself picks."""
        return self._config.pick if isinstance(self._config, SelectConfig) else 1.0

    def _pick(
        self,
        where: str,
        batch: Batch,
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
        self._record(batch, losses, logits, targets, trained=False)
        generator = torch_generator(self.seed, PICK, batch.window, batch.number, self.rank)
        count, power = max(1, round(share * len(losses))), 1 / share - 1 if power is None else power
        return pick_positions(self._recent.percentile(losses), count, power, generator)

    def _record(self, batch: Batch, losses: Tensor, logits: Tensor | None, targets: Tensor | None, **more: Any) -> None:
        """Enter a batch into the ledger; of several views of a sample the first alone, so that they count as one sample."""
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
        self._recorder.record(ids, losses, logits, targets, window=batch.window, hint=hint, **more)

    def _number(self, batch: Batch) -> int | None:
        return batch.number if self._no_doubles else None

    def _batch_of(self, ids: Tensor | None) -> Batch:
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
        for number in (np.searchsorted(self._shard.start, spots, side="right") - 1).tolist():
            if number >= 0 and np.array_equal(self._shard.ids(number), array):
                return Batch(self._shard.plan.window, number, array)
        raise LossError("These ids are not a batch of this window, in its order; pass them on as they were delivered.")

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

    def _weights_of(self, batch: Batch, device: torch.device) -> Tensor:
        assert self._shard is not None
        if device not in self._weights:
            self._weights[device] = torch.from_numpy(self._shard.plan.weights.copy()).to(device)
        return self._weights[device][self._shard.span(batch.number)]


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
