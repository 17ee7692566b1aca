"""Scores: how much a sample matters, in any range; the framework ranks them. NaN means nothing is known yet."""

from __future__ import annotations

import numpy as np

from salience.select.view import Floats, View


def loss(view: View) -> Floats:
    """Loss at the last visit: the hardest samples matter most."""
    return view.last_loss


def ema_loss(view: View) -> Floats:
    """Exponential mean of the loss: hard over the last few visits, not by one unlucky augmentation."""
    return view.mean_loss


def staleness(view: View) -> Floats:
    """Windows since the last visit: what we know least about now."""
    return view.age.astype(np.float32)
