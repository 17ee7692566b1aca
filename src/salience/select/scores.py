"""Scores: how much a sample matters, in any range; the framework ranks them. NaN means nothing is known yet."""

from __future__ import annotations

import numpy as np

from salience.registry import card
from salience.select.view import Floats, View


def loss(view: View) -> Floats:
    """Loss at the last visit: the hardest samples matter most."""
    return view.last_loss


def ema_loss(view: View) -> Floats:
    """Exponential mean of the loss: hard over the last few visits, not because of one unlucky augmentation."""
    return view.mean_loss


def difficulty(view: View) -> Floats:
    """EL2N if `loss()` is given logits, otherwise the exponential mean of the loss: works with any loss."""
    return view.mean_loss if np.isnan(view.el2n).all() else view.el2n


def unsureness(view: View) -> Floats:
    """1 - the exponential mean of p(label), from 0 to 1; without logits 1 - exp(-mean loss), which is the same for
    cross-entropy."""
    if np.isnan(view.confidence).all():
        return 1 - np.exp(-np.maximum(view.mean_loss, 0))
    return 1 - view.confidence.astype(np.float32)


def staleness(view: View) -> Floats:
    """Windows since the last visit: samples we know least about now come first."""
    return view.age.astype(np.float32)


@card(needs=("el2n",))
def el2n(view: View) -> Floats:
    """EL2N: |softmax - one-hot| at the last visit (Paul et al. 2021); bounded, so outliers count less than by loss."""
    return view.el2n


@card(needs=("grad_norm",))
def grand(view: View) -> Floats:
    """GraNd: norm of the gradient of the loss at the last visit (Paul et al. 2021), from the model passed to `attach`."""
    return view.grad_norm


@card(needs=("margin",))
def margin(view: View) -> Floats:
    """Small recent margins first: -(z_label - max other z), as an exponential mean."""
    return -view.margin


@card(needs=("margin_sum",))
def aum(view: View) -> Floats:
    """Area under the margin, small first: -sum of margins / visits (Pleiss et al. 2020); slower than `margin`."""
    area = -view.margin_sum / np.maximum(view.seen, 1).astype(np.float32)
    return np.where(view.guess < 0, np.float32(np.nan), area)


@card(needs=("forgotten",))
def forgetting(view: View) -> Floats:
    """How often a sample went from right to wrong (Toneva et al. 2019); one never learnt counts as forgotten at every visit."""
    events = np.where(view.right > 0, view.forgotten, view.seen).astype(np.float32)
    return np.where(view.guess < 0, np.float32(np.nan), events)


def variance(view: View) -> Floats:
    """Exponential variance of the loss: samples whose loss still fluctuates."""
    return view.var_loss


@card(needs=("entropy",))
def entropy(view: View) -> Floats:
    """Entropy of the prediction at the last visit: how unsure the model is, whatever the label says."""
    return view.entropy


@card(needs=("confidence",))
def confidence(view: View) -> Floats:
    """Low mean p(label) first: 1 - exponential mean of the label's probability (data maps, Swayamdipta et al. 2020)."""
    return 1 - view.confidence.astype(np.float32)


def ucb(view: View, *, bonus: float = 1.0) -> Floats:
    """Upper confidence bound: mean loss + bonus * sqrt(log(windows) / visits) (Raju et al. 2021)."""
    seen = np.maximum(view.seen, 1).astype(np.float32)
    return view.mean_loss + np.float32(bonus) * np.sqrt(np.float32(np.log(view.clock.window + 2)) / seen)


def uncertainty(view: View) -> Floats:
    """How uncertain a sample's rank is: the standard deviation of its loss, growing with the windows since its last visit."""
    return np.sqrt(view.var_loss) * np.sqrt(np.maximum(view.age, 1).astype(np.float32))


@card(needs=("reference",))
def rho(view: View) -> Floats:
    """RHO-LOSS: last loss - the loss of another model (Mindermann et al. 2022): samples that are hard but can be learnt.

    The published rule computes the loss on a batch ten times as large; here it is that of the last visit. A wrong label is
    hard for the other model too, and cancels out.
    """
    return view.last_loss - view.reference


@card(needs=("reference",))
def proxy(view: View) -> Floats:
    """Selection via proxy: the loss of another, smaller model (Coleman et al. 2020); the same samples in every window."""
    return view.reference


@card(needs=("reference",))
def cscore(view: View) -> Floats:
    """C-score proxy: how rarely other models were right on a sample, as their mean rank (Jiang et al. 2021)."""
    return view.hardness
