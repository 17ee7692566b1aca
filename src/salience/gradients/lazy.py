"""`lazy`: a layer waits while its accumulated gradient is small compared with its usual one, for at most `tau` steps.

Which layers travel in a step is decided from norms that all ranks exchanged in the step before, in the same collective as the
gradients, so the decision is the same everywhere and costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from salience.gradients.exchange import Exchange, join, split
from salience.gradients.link import Link
from salience.gradients.rules import travels

MEMORY = 0.9
"""Weight of the past in the usual norm of a layer."""


class Lazy(Exchange):
    """A layer travels once it has accumulated `threshold` times its usual gradient, or after `tau` steps; small ones always."""

    lossy = True
    residuals = ("pools", "usual", "ages", "due")  # what is due depends on what has been gathered

    def __init__(self, link: Link, *, threshold: float, tau: int, small: int) -> None:
        self.link, self.threshold, self.tau, self.small = link, threshold, tau, small
        self.pools: list[Tensor] = []
        """Accumulated gradients that have not travelled; empty for small layers."""
        self.usual: list[float] = []
        """Running mean of the norm of one step's gradient, by layer."""
        self.ages: list[int] = []
        self.due: list[bool] = []
        """Layers that travel in the next step."""

    def finish(self, gradients: Sequence[Tensor]) -> None:
        if not self.pools:
            large = [one.shape if one.numel() > self.small else (0,) for one in gradients]
            self.pools = [torch.zeros(shape, device=one.device) for one, shape in zip(gradients, large, strict=True)]
            self.usual, self.ages = [0.0] * len(gradients), [1] * len(gradients)
            self.due = [True] * len(gradients)
        single = torch.stack([one.float().norm() for one in gradients])
        fine = bool(single.isfinite().all())
        for gradient, pool in zip(gradients, self.pools, strict=True):
            if pool.numel() and fine:
                gradient.copy_(pool.add_(gradient))
        gathered = torch.stack([one.float().norm() for one in gradients])
        going = [one for one, due in zip(gradients, self.due, strict=True) if due]
        count = len(gradients)
        flat = self.link.mean(torch.cat([single, gathered, join(going).to(single.device)]))
        split(flat[2 * count :], going)
        norms: list[float] = flat[: 2 * count].double().tolist()
        if not all(map(math.isfinite, norms)):
            for one in gradients:  # as all-reduce would have it, so that gradient scalers notice
                one.fill_(torch.nan)
            return
        for i, due in enumerate(self.due):
            small = not self.pools[i].numel()
            # No rank had a gradient: the optimizer may not look at this layer, so its pool stays.
            absent = due and not small and not norms[i]
            if absent or not due:
                gradients[i].zero_()
            elif not small:
                self.pools[i].zero_()
            if absent:
                continue
            self.ages[i] = 1 if due else self.ages[i] + 1
            self.usual[i] = norms[i] if not self.usual[i] else MEMORY * self.usual[i] + (1 - MEMORY) * norms[i]
            # What will have been gathered by then: what waits now, and one more gradient in its direction.
            ahead = norms[i] + (0.0 if due else norms[count + i])
            self.due[i] = small or travels(ahead, self.usual[i], self.ages[i], threshold=self.threshold, tau=self.tau)
