"""`topk` and `kernels`: the largest values, or whole important kernels, travel; the rest accumulates until it matters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from salience.gradients.exchange import Exchange
from salience.gradients.link import Link
from salience.gradients.rules import correct_momentum, largest, layer_counts, take, unit_scores, warm_rate

ROW = 16
"""Number of neighbouring values that travel together in layers without kernels, in the mode `kernels`."""


class Sparse(Exchange):
    """Top-k with error feedback, in one collective per step.

    A layer of at most `small` values travels whole. `rate` is the share of the other units (single values, or kernels) that
    travels on average; layers get more or less of it by size and gradient norm. With `momentum`, the optimizer's must be 0.
    """

    lossy = True
    counters, residuals = ("step", "norms"), ("pools", "velocities")

    def __init__(self, link: Link, *, kernels: bool, rate: float, momentum: float, warmup: int, small: int) -> None:
        self.link, self.kernels, self.rate, self.momentum = link, kernels, rate, momentum
        self.warmup, self.small = warmup, small
        self.step = 0
        self.pools: list[Tensor | None] = []
        """Residuals so far, flat; None for layers that travel whole."""
        self.velocities: list[Tensor | None] = []
        self.norms: list[float] = []
        """Mean gradient norm of each pooled layer in the previous step, the same on every rank."""

    def finish(self, gradients: Sequence[Tensor]) -> None:
        if not self.pools:
            self._allocate(gradients)
        pooled = [i for i, pool in enumerate(self.pools) if pool is not None]
        whole = [i for i, pool in enumerate(self.pools) if pool is None]
        units = [self._unit(gradients[i]) for i in pooled]
        sizes = [gradients[i].numel() // unit for i, unit in zip(pooled, units, strict=True)]
        counts = layer_counts(warm_rate(self.rate, self.step, self.warmup), sizes, self.norms or [0.0] * len(sizes))
        norms = torch.stack([gradients[i].float().norm() for i in pooled]) if pooled else torch.zeros(0)
        fine = bool(norms.isfinite().all())  # else nothing is pooled: the step is lost, not the run
        chosen: list[Tensor] = []
        values: list[Tensor] = []
        for i, unit, count in zip(pooled, units, counts, strict=True):
            if fine:
                positions, sent = self._choose(i, gradients[i], unit, count)
            else:
                positions = torch.zeros(count, dtype=torch.int64, device=gradients[i].device)
                sent = torch.zeros(count * unit, dtype=torch.bfloat16, device=gradients[i].device)
            chosen.append(positions.to(torch.int32))
            values.append(sent)
        taken = dict(zip(pooled, zip(chosen, values, strict=True), strict=True))
        parts = [norms, *(gradients[i].reshape(-1).float() for i in whole), *chosen, *values]
        came = self.link.gather(torch.cat([part.view(torch.uint8) for part in parts]))
        columns = iter(came.split([part.nbytes for part in parts], dim=1))
        found = _typed(next(columns), torch.float32).double().cpu()
        for i in whole:
            gradients[i].copy_(_typed(next(columns), torch.float32).mean(0).view(gradients[i].shape))
        places = [_typed(next(columns), torch.int32) for _ in pooled]
        for i, unit, where in zip(pooled, units, places, strict=True):
            what = _typed(next(columns), torch.bfloat16).float().view(-1, unit)
            mean = torch.zeros(gradients[i].numel() // unit, unit, device=what.device)
            mean.index_add_(0, where.reshape(-1).long(), what, alpha=1 / self.link.world)
            gradients[i].copy_(mean.view(gradients[i].shape))
        for i in (i for i, silent in zip(pooled, (found == 0).all(0).tolist(), strict=True) if silent):
            self._put_back(i, units[pooled.index(i)], *taken[i])
            gradients[i].zero_()
        if not bool(found.isfinite().all()):  # as all-reduce would have it, so that gradient scalers notice
            for i in pooled:
                gradients[i].fill_(torch.nan)
        else:
            self.norms = found.mean(0).tolist()
        self.step += 1

    def _choose(self, i: int, gradient: Tensor, unit: int, count: int) -> tuple[Tensor, Tensor]:
        pool, flat = self.pools[i], gradient.reshape(-1).float()
        assert pool is not None
        velocity = self.velocities[i]
        pool.add_(flat if velocity is None else correct_momentum(velocity, flat, self.momentum))
        positions = largest(unit_scores(pool, unit), count, self.step)
        if velocity is not None:
            velocity.view(-1, unit)[positions] = 0.0  # masked, so that old momentum does not push twice
        return positions, take(pool, positions, unit)

    def _put_back(self, i: int, unit: int, positions: Tensor, sent: Tensor) -> None:
        """Restore a layer for which no rank had a gradient: the optimizer may skip it, so nothing may be lost there."""
        pool = self.pools[i]
        assert pool is not None
        pool.view(-1, unit).index_add_(0, positions.long(), sent.to(pool.dtype).view(-1, unit))

    def _unit(self, gradient: Tensor) -> int:
        """Number of values that travel together: a kernel of a convolution, or a few neighbours in a row."""
        if not self.kernels:
            return 1
        size = gradient[0, 0].numel() if gradient.dim() > 2 else 1
        return size if size > 1 else next(n for n in (ROW, 8, 4, 2, 1) if gradient.numel() % n == 0)

    def _allocate(self, gradients: Sequence[Tensor]) -> None:
        for one in gradients:
            pooled = one.numel() > self.small and one.dim() > 1
            self.pools.append(torch.zeros(one.numel(), device=one.device) if pooled else None)
            self.velocities.append(
                torch.zeros_like(pool) if (pool := self.pools[-1]) is not None and self.momentum else None
            )


def _typed(columns: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes [world, n] as numbers; copied, since they need not begin at a multiple of a number's size."""
    size = columns.shape[1] // dtype.itemsize
    return columns.reshape(-1).clone().view(dtype).view(len(columns), size)
