"""The rules as functions on tensors: what is large enough to travel, what stays in residuals, and how often to average."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

SAMPLE = 4096
"""Number of scores used to guess the threshold of a long list."""
AIM = 1.5
"""The guessed threshold aims at this many times the wanted number, so that too few hardly ever pass it."""
SPREAD = 4.0
"""The share of a layer that travels is at most this many times below or above the mean share."""


def largest(scores: Tensor, k: int, offset: int = 0) -> Tensor:
    """Positions of the k largest of `scores` [n], exactly k, in no particular order.

    Long lists are thinned first by a threshold guessed from every m-th score, starting at `offset` (Lin et al. 2018, Deep
    Gradient Compression). If at least k pass it, the k largest are among them, so the result is exact.
    """
    n = len(scores)
    stride = n // SAMPLE
    if stride < 4 or scores.is_cuda:  # on a GPU the detour would have to wait for the device
        return scores.topk(k, sorted=False).indices
    sample = scores[offset % stride :: stride]
    threshold = sample.topk(min(len(sample), math.ceil(AIM * k * len(sample) / n) + 1)).values[-1]
    above = (scores >= threshold).nonzero().squeeze(1)
    if len(above) < k:
        return scores.topk(k, sorted=False).indices
    return above[scores[above].topk(k, sorted=False).indices]


def unit_scores(values: Tensor, unit: int) -> Tensor:
    """Importance of each unit of `unit` neighbouring values: its Euclidean norm."""
    return values.abs() if unit == 1 else values.view(-1, unit).norm(dim=1)


def take(pool: Tensor, positions: Tensor, unit: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The units at `positions` as `dtype` [k * unit]; rounding errors stay in `pool`, with everything not taken.

    Error feedback: what travels plus what is left in `pool` afterwards is what was in `pool` before.
    """
    table = pool.view(-1, unit)
    whole = table[positions]
    sent = whole.to(dtype)
    table[positions] = whole - sent.to(pool.dtype)
    return sent.flatten()


def correct_momentum(velocity: Tensor, gradient: Tensor, momentum: float) -> Tensor:
    """u <- m * u + g, in place: momentum is applied before values are chosen, so that late ones lose none of it."""
    return velocity.mul_(momentum).add_(gradient)


def warm_rate(rate: float, step: int, warmup: int) -> float:
    """Share that travels: from 1/4 down to `rate` over `warmup` steps, by a constant factor per step."""
    if step >= warmup or rate >= 0.25:
        return rate
    return 0.25 * (rate / 0.25) ** (step / warmup)


def layer_counts(rate: float, units: Sequence[int], norms: Sequence[float]) -> list[int]:
    """How many units of each layer travel: `rate` of all, shared out by sqrt(units) * norm of the gradient.

    The square root gives small layers a larger share, the norm those with large gradients. Each share stays within a factor
    of `SPREAD` of `rate`, and every layer sends at least one unit.
    """
    wishes = [math.sqrt(n) * norm if math.isfinite(norm) else 0.0 for n, norm in zip(units, norms, strict=True)]
    total, budget = sum(wishes), rate * sum(units)
    counts: list[int] = []
    for n, wish in zip(units, wishes, strict=True):
        wanted = budget * wish / total if total > 0 else rate * n
        bounded = min(max(wanted, rate / SPREAD * n), min(1.0, rate * SPREAD) * n)
        counts.append(max(1, round(bounded)))
    return counts


def matrix_shape(shape: Sequence[int], rank: int) -> tuple[int, int] | None:
    """(rows, columns) of a weight as a matrix, or None if `rank` columns on either side would not halve it."""
    if len(shape) < 2:
        return None
    rows, columns = shape[0], math.prod(shape[1:])
    return (rows, columns) if 2 * rank * (rows + columns) <= rows * columns else None


def orthonormal(matrix: Tensor) -> Tensor:
    """Orthonormal columns that span those of `matrix` [n, r]; columns of zeros stay zeros."""
    basis = matrix.clone()
    for i in range(basis.shape[1]):
        column = basis[:, i]
        norm = column.norm()
        column.div_(norm.clamp_min(torch.finfo(basis.dtype).tiny))
        if i + 1 < basis.shape[1]:
            rest = basis[:, i + 1 :]
            rest -= torch.outer(column, column @ rest)
    return basis


def travels(gathered: float, usual: float, age: int, *, threshold: float, tau: int) -> bool:
    """True if a layer must not wait: |gathered gradient| >= threshold * |usual gradient|, or `tau` steps have passed.

    The comparison is written so that a layer whose norm is NaN travels at once.
    """
    return age >= tau or not gathered < threshold * usual


def local_steps(base: int, alpha: float | None, lr: float, most: int) -> int:
    """H = max(base, floor((alpha / lr)^2)), at most `most`: the quadratic rule (Gu et al. 2024, arXiv 2310.14423)."""
    if alpha is None:
        return min(base, most)
    if lr <= 0 or (alpha / lr) ** 2 >= most:
        return most
    return max(min(base, most), math.floor((alpha / lr) ** 2))
