"""What people pass to loss(): checks, the class of each sample, and the term that keeps wrong labels from being learnt."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from salience.batches import INTEGERS
from salience.errors import LossError
from salience.ledger import Ledger
from salience.ledger.columns import VOTE_DECAY
from salience.run.moving import tensors_of
from salience.run.part import Batch

Targets = Tensor | tuple[Tensor, Tensor, "float | Tensor"]
"""One class per sample [B], a table of probabilities [B, C], or mixed ones: (targets, targets of the partners, share)."""

ONE_HOT = 0.999
"""A row of probabilities is a class if one of them is above this."""
OFF = "losses are recorded, class statistics (margin, guess, class floor) are off."


class Labels(NamedTuple):
    """What class statistics can be computed from."""

    logits: Tensor | None = None
    """[B, C]; None if predictions say nothing about these classes."""
    classes: Tensor | None = None
    """Integers [B]; below 0 or from C on where a sample has none."""
    delivered: bool = False
    """True if `classes` should be those in the batch as it was delivered."""
    hard: bool = True
    """False if the inputs were mixed, so that `classes` are only a part of what they show."""
    remark: str = ""


def check_losses(caller: str, losses: Any, batch: Batch, kept: Tensor | None = None) -> None:
    """Raise LossError unless there is one loss per sample of the batch, or of those that were picked."""
    count = len(batch.ids) if kept is None else len(kept)
    if not isinstance(losses, Tensor) or not losses.is_floating_point():
        kind = losses.dtype if isinstance(losses, Tensor) else f"a {type(losses).__name__}"
        raise LossError(f"{caller}() was given {kind}; pass the losses as a floating-point tensor, one per sample.")
    if losses.shape == (count,):
        return
    if losses.dim() == 0:
        raise LossError(f"{caller}() was given a single number; it needs one loss per sample: use reduction='none'.")
    if losses.dim() > 1:
        axes = tuple(range(1, losses.dim()))
        raise LossError(
            f"{caller}() was given losses of shape {tuple(losses.shape)}; it needs one per sample: reduce the rest first, "
            f"e.g. losses.mean(dim={axes}), or pass mask= of the same shape."
        )
    leading = {len(part) for part in tensors_of(batch.content) if not part.is_nested and part.dim()}
    if kept is None and len(losses) in leading:
        raise LossError(
            f"The collate function was given {count} samples and returned a batch of {len(losses)}, so it cannot be told whose "
            "losses these are. Have it return salience.Collated(batch, positions), with the position of each row's sample."
        )
    raise LossError(
        f"{caller}() was given {len(losses)} losses for a batch of {count} samples; pass one per sample. "
        "A loop that fetches ahead must use with_ids=True and pass ids= to loss()."
    )


def check_counts(counts: Any, total: Tensor | float | None, batch: Batch, world: int) -> None:
    """Raise LossError unless there is one count per sample of the batch."""
    if not isinstance(counts, Tensor) or counts.shape != (len(batch.ids),):
        given = f"have shape {tuple(counts.shape)}" if isinstance(counts, Tensor) else f"are a {type(counts).__name__}"
        raise LossError(f"counts {given}; pass a tensor with one number per sample, [{len(batch.ids)}].")
    if total is None and world > 1:
        raise LossError("counts= and mask= need total= with several ranks: the items of the whole step over all ranks.")


def class_labels(count: int, logits: Tensor | None, targets: Targets | None) -> Labels:
    """Classes of a batch of `count` samples, with logits in two dimensions that go with them. Waits for no device."""
    if targets is None:
        return Labels()
    if isinstance(targets, Tensor) and isinstance(logits, Tensor) and targets.dtype is torch.int64:  # as in most loops
        dense = logits.layout is targets.layout is torch.strided and not logits.is_nested
        shape = logits.shape if dense and targets.shape == (count,) else ()
        if len(shape) == 2 and shape[0] == count and shape[1] > 1:
            return Labels(logits, targets, True)
    if not isinstance(targets, tuple):
        _check_dense(
            "targets", targets, "of one class per sample, [B]; or (targets, targets of the partners, share) after mixup"
        )
    if logits is not None:
        _check_dense("logits", logits, "that the model returned for these samples, [B, classes]")
    if not isinstance(targets, Tensor):
        return _mixed(count, logits, targets)
    binary = logits is not None and (logits.dim() == 1 or (logits.dim() == 2 and logits.shape[1] == 1))
    if targets.dim() == 2 and targets.shape[1] == 1:
        targets = targets[:, 0]
    whole = targets.dtype in INTEGERS or targets.dtype == torch.bool
    if targets.dim() not in (1, 2) or (targets.dim() == 1 and not whole and not binary):
        remark = f"targets are {targets.dtype} with {targets.dim()} dimensions, not one integer class per sample: {OFF}"
        return Labels(remark=remark)
    if len(targets) != count:
        raise LossError(f"There are {len(targets)} targets for {count} losses; pass those of the same batch.")
    if logits is not None and (logits.dim() not in (1, 2) or len(logits) != count or not logits.numel()):
        raise LossError(
            f"logits have shape {tuple(logits.shape)}; with {count} losses they must be [{count}, classes]."
        )
    if logits is not None and binary:  # sigmoid(z) is the second of softmax(0, z)
        z = logits.reshape(count, 1)
        logits = torch.cat((torch.zeros_like(z), z), 1)
    if targets.dim() == 2:
        return _table(logits, targets)
    if targets.dtype in INTEGERS:
        return Labels(logits, targets, delivered=True)
    return Labels(logits, torch.where((targets == 0) | (targets == 1), targets, -1).to(torch.int64))


def _check_dense(name: str, given: object, wanted: str) -> None:
    if isinstance(given, Tensor) and given.layout is torch.strided and not given.is_nested:
        return
    kind = f"a tensor of layout {given.layout}" if isinstance(given, Tensor) else f"a {type(given).__name__}"
    if isinstance(given, Tensor) and given.layout is torch.strided:
        kind = "a nested tensor"
    raise LossError(f"{name} are {kind}; pass the tensor {wanted}.")


def _table(logits: Tensor | None, table: Tensor) -> Labels:
    """Rows with a single 1 are classes; others (smoothed, mixed, distilled) are recorded by their losses alone."""
    if logits is not None and logits.shape != table.shape:
        return Labels(
            remark=f"targets have {table.shape[1]} columns, logits {logits.shape[1]}, one for each class: {OFF}"
        )
    if table.device.type == "cpu" and bool(((table.sum(1) - 1).abs() > 1 - ONE_HOT).any()):
        return Labels(remark=f"targets are a table whose rows do not add up to 1, such as several labels: {OFF}")
    top, place = table.max(1)
    one = (top > ONE_HOT) & ((table.sum(1) - 1).abs() <= 1 - ONE_HOT)
    return Labels(logits, torch.where(one, place, -1))


def _mixed(count: int, logits: Tensor | None, targets: tuple[Tensor, Tensor, float | Tensor]) -> Labels:
    """Mixup and CutMix. A sample keeps its own class; what the model says about the mixture says nothing about it."""
    if len(targets) != 3 or not all(isinstance(part, Tensor) for part in cast("tuple[object, ...]", targets)[:2]):
        kinds = ", ".join(type(part).__name__ for part in cast("tuple[object, ...]", targets))
        raise LossError(
            f"targets are ({kinds}); pass a tensor, or (targets, targets of the partners, share) where samples were mixed."
        )
    own, partner, share = targets
    if len(own) != count or len(partner) != count:
        raise LossError(
            f"There are {len(own)} and {len(partner)} mixed targets for {count} losses; pass one per sample."
        )
    found = class_labels(count, None, own)
    if isinstance(share, (int, float)) and share >= 1:  # nothing was mixed into this batch
        return class_labels(count, logits, own)
    return Labels(None, found.classes, delivered=found.delivered, hard=False)


def early_learning(logits: Tensor, ids: npt.NDArray[np.int64], ledger: Ledger) -> Tensor:
    """log(1 - <t, p>) per sample, [B], to be multiplied by lambda and added to the loss (Liu et al. 2020, ELR).

    p is the prediction, t its average over the sample's visits, this one included (`Ledger.vote`, the VOTES strongest
    classes): t <- b t + (1 - b) p. Its gradient pulls the prediction to what the model said before it learnt the label.
    """
    p = torch.softmax(logits.float(), dim=1)
    classes = torch.from_numpy(ledger.vote[ids].astype(np.int64)).to(p.device, non_blocking=True)
    before = torch.from_numpy(ledger.vote_p[ids].astype(np.float32)).to(p.device, non_blocking=True)
    now = p.gather(1, classes.clamp_(max=p.shape[1] - 1)) * (before > 0)
    average = VOTE_DECAY * before + (1 - VOTE_DECAY) * now.detach()
    return torch.log((1 - (average * now).sum(dim=1)).clamp_min(1e-4))
