"""Smaller images for a part of the run: whole batches of one size, by progress (progressive resizing; FixRes, Touvron et al.
2019).

A convolution costs as much as it has pixels: at half the side a step costs a quarter. What a small image cannot show is learnt
in the rest of the run, and the last window is always at full size, so that batch norm's statistics are those of full size.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from salience.errors import ConfigError, did_you_mean

FEWEST_CELLS = 7
"""Sides are multiples of the largest power of two (at most 32) of which the full side has at least this many."""
Curve = Callable[[float], float]


def rise(low: float, until: float) -> Curve:
    """`low` until that progress, then full size."""
    return lambda progress: low if progress < until else 1.0


def valley(low: float, until: float) -> Curve:
    """Full size for the first tenth of the run, `low` until that progress, then full size again."""
    return lambda progress: low if 0.1 <= progress < until else 1.0


def ramp(low: float, until: float) -> Curve:
    """From `low` in a straight line to full size at that progress."""
    return lambda progress: min(1.0, low + (1 - low) * progress / until)


RESOLUTION_CURVES: dict[str, Callable[[float, float], Curve]] = {"rise": rise, "valley": valley, "ramp": ramp}


def curve_of(curve: str | Curve, low: float, until: float) -> Curve:
    """The curve of that name, or the function itself."""
    if callable(curve):
        return curve
    if curve not in RESOLUTION_CURVES:
        raise ConfigError(
            f"treat: there is no curve of sizes {curve!r}.{did_you_mean(curve, RESOLUTION_CURVES)} Or pass a function."
        )
    return RESOLUTION_CURVES[curve](low, until)


def share_at(curve: Curve, window: int, windows: int) -> float:
    """Share of the full side in a window; 1 in the last one, whatever the curve says."""
    if window >= windows - 1:
        return 1.0
    share = float(curve(window / windows))
    if not 0 < share <= 1 or not math.isfinite(share):
        raise ConfigError(
            f"The curve of sizes gave {share} at progress {window / windows:.3g}; it must give a share of the side, "
            "above 0 and at most 1."
        )
    return share


def multiple_of(full: int) -> int:
    """What sides are multiples of: 32 for 224 pixels, 4 for 32 and 28."""
    return max(m for m in (1, 2, 4, 8, 16, 32) if m == 1 or full >= FEWEST_CELLS * m)


def side_of(full: int, share: float) -> int:
    """The side nearest to that share which is a multiple that keeps kernels fast, at least one of them."""
    step = multiple_of(full)
    return full if share >= 1 else min(full, max(step, step * round(full * share / step)))


def resized(images: Tensor, share: float) -> Tensor:
    """A batch of images [B, C, H, W] at that share of both sides, filtered against aliasing."""
    size = side_of(images.shape[2], share), side_of(images.shape[3], share)
    if size == tuple(images.shape[2:]):
        return images
    given = images if images.is_floating_point() else images.float()
    out = F.interpolate(given, size=size, mode="bilinear", antialias=True, align_corners=False)
    return out if images.is_floating_point() else out.round().clamp(0, 255).to(images.dtype)
