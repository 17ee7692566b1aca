"""Penultimate features: the input of the last Linear, as a short vector of norm 1 per sample."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

FEATURE_WIDTH = 128


def features_of(given: Tensor) -> Tensor:
    """float32 [B, FEATURE_WIDTH] of norm 1, from the input [B, ..., D] of a layer: the mean over its middle axes.

    Wider ones are projected by a fixed Gaussian matrix, which keeps angles up to about 1 / sqrt(FEATURE_WIDTH) (Johnson
    and Lindenstrauss 1984); narrower ones are padded with zeros.
    """
    with torch.no_grad(), torch.autocast(given.device.type, enabled=False):
        x = torch.atleast_2d(given.detach().float())
        if x.dim() > 2:
            x = x.flatten(1, -2).mean(1)
        width = x.shape[1]
        x = F.pad(x, (0, FEATURE_WIDTH - width)) if width <= FEATURE_WIDTH else x @ _projection(width, x.device)
        return F.normalize(x, dim=1)


@functools.lru_cache(maxsize=8)
def _projection(width: int, device: torch.device) -> Tensor:
    """The projection matrix, the same for every run, rank and device."""
    generator = torch.Generator().manual_seed(width)
    return (torch.randn(width, FEATURE_WIDTH, generator=generator) / FEATURE_WIDTH**0.5).to(device)
