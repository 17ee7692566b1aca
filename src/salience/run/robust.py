"""Early-learning regularisation: a term in the loss that keeps a model from learning wrong labels by heart."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from salience.ledger.columns import VOTE_DECAY
from salience.ledger.ledger import Ledger

MAX_HARMLESS_NOISE, MIN_FULL_NOISE, MAX_STRENGTH = 0.15, 0.35, 2.0
"""The automatic strength is 0 up to the first estimated share of wrong labels, and the third number from the second one on."""


def strength(setting: float | str, noise: float) -> float:
    """lambda: the number given, or for "auto" one that follows the estimated share of wrong labels (NaN: not known, 0)."""
    if not isinstance(setting, str):
        return float(setting)
    share = (noise - MAX_HARMLESS_NOISE) / (MIN_FULL_NOISE - MAX_HARMLESS_NOISE)
    return MAX_STRENGTH * min(1.0, max(0.0, share)) if share == share else 0.0


def early_learning(logits: Tensor, ids: npt.NDArray[np.int64], ledger: Ledger) -> Tensor:
    """log(1 - <t, p>) per sample, [B], to be multiplied by lambda and added to the loss (Liu et al. 2020, ELR).

    p is the prediction, t its average over the sample's visits, this one included (`Ledger.vote`, the VOTES strongest
    classes): t <- b t + (1 - b) p. Its gradient pulls the prediction to what the model said before it learnt the label.
    """
    p = torch.softmax(logits.float(), dim=1)
    classes = torch.from_numpy(ledger.vote[ids].astype(np.int64)).to(p.device, non_blocking=True)
    before = torch.from_numpy(ledger.vote_p[ids].astype(np.float32)).to(p.device, non_blocking=True)
    now = p.gather(1, classes.clamp_(max=p.shape[1] - 1)) * (before > 0)
    average = VOTE_DECAY * before + (1 - VOTE_DECAY) * now.detach()
    return torch.log((1 - (average * now).sum(dim=1)).clamp_min(1e-4))
