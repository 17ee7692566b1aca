"""`lowrank`: each weight's gradient travels as a product of two thin matrices (PowerSGD), all layers in two collectives.

    P = M Q,   P <- mean of P over ranks, orthonormal;   Q = M^T P,   Q <- mean of Q;   M is replaced by P Q^T

M is the gradient plus the residual of the last step, and M - P Q^T is the next residual (Vogels et al. 2019). PyTorch's hook
issues its collectives per bucket and out of order; here the number of buckets does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from salience.gradients.exchange import Exchange, join, split
from salience.gradients.link import Link
from salience.gradients.rules import matrix_shape, orthonormal
from salience.seeds import torch_generator


class LowRank(Exchange):
    """PowerSGD of rank `rank` with error feedback; what it would not halve travels whole, as does everything at first."""

    lossy = True
    counters, residuals = ("step", "factors"), ("errors",)

    def __init__(self, link: Link, *, rank: int, warmup: int, seed: int = 0) -> None:
        """`warmup` is the number of first steps in which everything travels whole."""
        self.link, self.rank, self.warmup, self.seed = link, rank, warmup, seed
        self.step = 0
        self.errors: dict[int, Tensor] = {}
        """Residual of each weight's gradient, [rows, columns]."""
        self.factors: dict[int, Tensor] = {}
        """Q of the previous step, [columns, rank], as a start: the better, the more similar two steps are."""

    def finish(self, gradients: Sequence[Tensor]) -> None:
        shapes = {i: shape for i, one in enumerate(gradients) if (shape := matrix_shape(one.shape, self.rank))}
        if self.step < self.warmup:
            shapes = {}
        whole = [one for i, one in enumerate(gradients) if i not in shapes]
        matrices: dict[int, Tensor] = {}
        for i, shape in shapes.items():
            matrix = gradients[i].detach().reshape(shape).float()
            matrices[i] = matrix + self.errors[i] if i in self.errors else matrix.clone()
            if i not in self.factors:
                made = torch_generator(self.seed, i)
                self.factors[i] = torch.randn(shape[1], self.rank, generator=made).to(matrix.device)
        left = [matrices[i] @ orthonormal(self.factors[i]) for i in shapes]
        norms = [gradients[i].detach().float().norm().view(1) for i in shapes]
        flat = self.link.mean(join([*left, *whole, *norms]))
        split(flat, [*left, *whole, *norms])
        left = [orthonormal(one) for one in left]
        right = [matrices[i].T @ p for i, p in zip(shapes, left, strict=True)]
        if shapes:
            split(self.link.mean(join(right)), right)
        known = torch.cat([flat.isfinite().all().float().view(1), *norms]).tolist()  # the same on every rank
        fine, silent = known[0] > 0, {i for i, norm in zip(shapes, known[1:], strict=True) if norm == 0}
        for i, p, q in zip(shapes, left, right, strict=True):
            if i in silent:  # no rank had a gradient: the optimizer may not look at it, so nothing may be lost there
                self.errors[i] = matrices[i]
                gradients[i].zero_()
                continue
            product = p @ q.T
            gradients[i].copy_(product.view(gradients[i].shape))
            if fine:
                self.errors[i] = matrices[i].sub_(product)
                self.factors[i] = q
        self.step += 1
