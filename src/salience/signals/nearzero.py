"""The share of each sample's gradient that is near zero, layer by layer, and the loss above which it is not.

For every sample i of a probe, g_i = d loss_i / d parameters is computed separately (torch.func), and counted:

    share[i, layer] = entries of g_i in that layer with |g| < tiny / entries of that layer

A sample whose gradient is near zero everywhere teaches nothing; the loss that separates such samples from others is
`learnt_loss`.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

TINY = 1e-4
"""Entries of a gradient below this count as near zero."""
LEARNT = 0.9
"""A sample counts as learnt if at least this share of its entries is near zero."""
NUMBERS_AT_ONCE = 1 << 26
"""Maximum number of entries of per-sample gradients in memory at once."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class NearZero:
    """The result of a probe over B samples."""

    losses: Floats
    """Loss of each sample, float64 [B]."""
    shares: dict[str, Floats]
    """Layer -> share of its entries near zero, float64 [B] each."""
    sizes: dict[str, int]
    """Layer -> number of its parameters."""

    @property
    def overall(self) -> Floats:
        """Share of all entries near zero, float64 [B]."""
        total = sum(self.sizes.values())
        return np.sum([share * (self.sizes[name] / total) for name, share in self.shares.items()], axis=0)


def near_zero(model: nn.Module, inputs: Tensor, targets: Tensor, *, tiny: float = TINY) -> NearZero:
    """Probe a copy of the model in eval mode by the cross-entropy of `targets`; the model itself is not touched."""
    probed = copy.deepcopy(model).eval()
    parameters = {name: p.detach() for name, p in probed.named_parameters() if p.requires_grad}
    fixed = {name: p.detach() for name, p in probed.named_parameters() if not p.requires_grad}
    fixed |= {name: b.detach() for name, b in probed.named_buffers()}
    layers: dict[str, list[str]] = {}
    for name in parameters:
        layers.setdefault(name.rpartition(".")[0], []).append(name)
    sizes = {layer: sum(parameters[name].numel() for name in names) for layer, names in layers.items()}

    def loss(theta: dict[str, Tensor], x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = torch.func.functional_call(probed, (theta, fixed), (x.unsqueeze(0),))
        value = F.cross_entropy(logits, y.unsqueeze(0))
        return value, value

    gradient: Any = torch.func.grad(loss, has_aux=True)

    def shares_of(x: Tensor, y: Tensor) -> tuple[Tensor, list[Tensor]]:
        found, value = gradient(parameters, x, y)
        few = [[found[name].abs() < tiny for name in names] for names in layers.values()]
        return value, [torch.stack([part.sum() for part in parts]).sum() for parts in few]

    device = next(iter(parameters.values())).device
    chunk = max(1, NUMBERS_AT_ONCE // max(1, sum(sizes.values())))
    losses, counts = torch.func.vmap(shares_of, chunk_size=chunk)(inputs.to(device), targets.to(device))
    return NearZero(
        losses=losses.double().cpu().numpy(),
        shares={
            name: count.double().cpu().numpy() / sizes[name] for name, count in zip(layers, counts, strict=True)
        },
        sizes=sizes,
    )  # fmt: skip


def learnt_loss(losses: Floats, shares: Floats) -> float | None:
    """The largest loss at which a share of LEARNT or more of the gradient is near zero; None if there is none.

    Shares fall with the loss except for chance, so they are replaced by the closest falling sequence (isotonic regression):
    fit_i = min over s <= i of max over t >= i of mean(share_s .. share_t), samples in the order of their losses.
    """
    order = np.argsort(losses, kind="stable")
    total = np.concatenate(([0.0], np.cumsum(shares[order])))
    n = len(order)
    first, last = np.arange(n)[:, None], np.arange(n)[None, :]
    means = (total[1:][None, :] - total[:-1][:, None]) / np.maximum(last - first + 1, 1)
    means[last < first] = -np.inf
    best = np.maximum.accumulate(means[:, ::-1], axis=1)[:, ::-1]
    fit = np.diagonal(np.minimum.accumulate(np.where(last < first, np.inf, best), axis=0))
    flat = np.flatnonzero(fit >= LEARNT)
    return float(losses[order[flat[-1]]]) if len(flat) else None


def by_loss(losses: Floats, shares: Floats, bins: int = 8) -> tuple[list[float], list[float]]:
    """Mean loss and mean share of `bins` groups of equal size, in the order of their losses."""
    groups = [part for part in np.array_split(np.argsort(losses, kind="stable"), bins) if len(part)]
    return [float(losses[part].mean()) for part in groups], [float(shares[part].mean()) for part in groups]
