"""Choosing after the forward pass (selective backprop): a fixed number per batch, hard samples with higher probability."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from salience.errors import ConfigError


class RecentLosses:
    """The last `capacity` losses, on their own device, to rank a new loss among them."""

    def __init__(self, capacity: int = 4096) -> None:
        self.capacity = capacity
        self.values: Tensor | None = None

    def percentile(self, losses: Tensor) -> Tensor:
        """Enter `losses` and return the share of recent losses at or below each of them, float32 [B]."""
        losses = losses.detach().float()
        held = losses if self.values is None else torch.cat((self.values.to(losses.device), losses))
        self.values = held[-self.capacity :]
        return torch.searchsorted(self.values.sort().values, losses, right=True).float() / len(self.values)

    def load(self, values: Tensor) -> None:
        """Continue with these losses, the latest last."""
        self.values = values[-self.capacity :] if len(values) else None


def latest_last(parts: Sequence[Tensor]) -> Tensor:
    """The recent losses of several ranks as one series, with the latest of each rank at the end."""
    age = torch.cat([torch.arange(len(part), 0, -1) for part in parts])
    return torch.cat(list(parts))[age.argsort(descending=True, stable=True)]


def pick_positions(percentile: Tensor, count: int, power: float, generator: torch.Generator) -> Tensor:
    """`count` positions drawn without replacement with probability ~ percentile^power, int64 [count], ascending.

    Selective backprop (Jiang et al. 2019) keeps each sample independently with that probability; here the number
    is fixed, by the largest keys log(u) / p (Efraimidis and Spirakis 2006), so that batch shapes stay constant.
    """
    if not 0 < count <= len(percentile):
        raise ConfigError(f"pick: {count} of {len(percentile)} samples; share must leave at least one and at most all.")
    u = torch.rand(len(percentile), generator=generator).to(percentile.device)
    keys = u.clamp_min(1e-12).log() / percentile.nan_to_num(1.0).clamp_min(1e-6) ** power
    return keys.topk(count).indices.sort().values
