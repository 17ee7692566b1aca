"""Losses of tokens (or pixels): one mean per sample for the ledger, with how much each sample weighs in the mean of all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from salience.errors import LossError

NO_CLASS_PER_TOKEN = (
    "targets are one class per token, which says nothing of the class of a sample: losses are recorded, class statistics "
    "(margin, guess, class floor) are off."
)


def token_means(losses: Any, mask: Any, counts: Any = None) -> tuple[Tensor, Tensor]:
    """The mean loss of every sample over its tokens, [B], and the sum of its mask, [B].

    With l the losses and m the mask, both [B, T], the mean is sum_t m l / sum_t m. What the mask leaves out has no effect,
    NaN included. A sample without any token has mean NaN, which the ledger counts and does not store, and counts 0, with
    which it has no part in the gradient.
    """
    _check(losses, mask, counts)
    _check_signs(mask)
    weights = mask.to(losses.device).flatten(1)
    within = torch.where(weights != 0, losses.reshape(weights.shape).float(), 0)  # 0 * NaN would be NaN
    sums = (within if weights.dtype is torch.bool else within * weights).sum(1)
    counts = weights.sum(1)
    means = sums / torch.where(counts > 0, counts, 1)
    return torch.where(counts > 0, means, torch.nan), counts


def packed_means(losses: Any, segments: Any, mask: Any, counts: Any, *, count: int) -> tuple[Tensor, Tensor]:
    """The same for `count` samples that lie in rows one behind another, [R, T]; both results are [count].

    `segments` [R, T] has the position of each token's sample in the batch, and -1 where there is none; `mask` may leave out
    more.
    """
    _check(losses, segments if mask is None else mask, counts)
    _check_segments(segments, losses, count)
    if mask is not None:
        _check_signs(mask)
    segments = segments.to(losses.device).flatten()
    weights = segments >= 0 if mask is None else mask.to(losses.device).flatten() * (segments >= 0)
    within = torch.where(weights != 0, losses.flatten().float() * weights, 0)
    place, nothing = segments.clamp(min=0).to(torch.int64), torch.zeros(count, device=losses.device)
    sums, counts = nothing.index_add(0, place, within), nothing.index_add(0, place, weights.float())
    means = sums / torch.where(counts > 0, counts, 1)
    return torch.where(counts > 0, means, torch.nan), counts


def _check_segments(segments: Any, losses: Tensor, count: int) -> None:
    """Raise LossError unless segments name samples of the batch."""
    if not isinstance(segments, Tensor) or segments.is_floating_point() or segments.numel() != losses.numel():
        given = f"{segments.dtype} {tuple(segments.shape)}" if isinstance(segments, Tensor) else type(segments).__name__
        raise LossError(f"segments are {given}; pass integers of the shape of the losses, {tuple(losses.shape)}.")
    if segments.device.type == "cpu" and segments.numel() and int(segments.max()) >= count:
        raise LossError(
            f"segments name sample {int(segments.max())} of a batch of {count}; they are positions from 0 to {count - 1} in "
            "the batch as the collate function was given it, and -1 for padding."
        )


def one_per_token(targets: Any, mask: Tensor | None) -> bool:
    """True for targets [B, T], which name no class per sample."""
    return mask is not None and isinstance(targets, Tensor) and targets.dim() > 1 and targets.shape == mask.shape


def _check(losses: Any, mask: Any, counts: Any) -> None:
    """Raise LossError unless there is one entry of the mask per loss."""
    if counts is not None:
        raise LossError("mask= counts the tokens of every sample itself; leave out counts=.")
    for name, part in (("losses", losses), ("mask", mask)):
        if not isinstance(part, Tensor) or part.is_complex() or part.is_nested:
            kind = f"a {type(part).__name__}" if not isinstance(part, Tensor) else f"{part.dtype}, maybe nested"
            raise LossError(f"{name} of tokens are {kind}; pass a tensor with one entry per token, [B, T].")
    if not losses.is_floating_point():
        raise LossError(f"loss() was given {losses.dtype}; pass the losses of tokens as a floating-point tensor.")
    if mask.dim() < 2:
        raise LossError(f"mask has shape {tuple(mask.shape)}; it must have one entry per token, [B, T].")
    if losses.shape != mask.shape and not (losses.dim() == 1 and losses.numel() == mask.numel()):
        raise LossError(
            f"losses have shape {tuple(losses.shape)}, mask {tuple(mask.shape)}; they must be equal. Where the targets are "
            "the tokens after the first, the mask is mask[:, 1:]."
        )


def _check_signs(mask: Tensor) -> None:
    """Raise LossError for weights of tokens below 0, where looking costs no synchronisation."""
    if mask.dtype is not torch.bool and mask.device.type == "cpu" and mask.numel() and not bool((mask >= 0).all()):
        raise LossError(f"mask has entries such as {float(mask.min())}; they must be weights of at least 0.")
