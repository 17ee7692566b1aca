"""Which class each sample has, from the targets that people pass to loss()."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor

from salience.batches import INTEGERS
from salience.errors import LossError

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


def class_labels(count: int, logits: Tensor | None, targets: Targets | None) -> Labels:
    """Classes of a batch of `count` samples, with logits in two dimensions that go with them. Waits for no device."""
    if targets is None:
        return Labels()
    if (
        isinstance(targets, Tensor)
        and logits is not None
        and targets.dtype is torch.int64
        and targets.shape == (count,)
    ):
        shape = logits.shape
        if len(shape) == 2 and shape[0] == count and shape[1] > 1:  # what most loops pass, at every step: first
            return Labels(logits, targets, True)
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
    if logits is not None and (logits.dim() not in (1, 2) or len(logits) != count):
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
