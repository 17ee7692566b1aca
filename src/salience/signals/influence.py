"""Influence: would training on this sample have lowered or raised the loss of validation samples? (TracIn)

The gradient of cross-entropy in the last Linear is (p - y) h^T, with the prediction p, the label y and the layer's input h.
TracIn (Pruthi et al. 2020) adds up the inner products of a sample's gradient with those of validation samples, over several
checkpoints of one run; over all validation samples v that is one product with their mean G:

    influence_i = mean_v <r_i h_i^T, r_v h_v^T> = r_i^T G h_i,   r = p - y,   G = mean_v r_v h_v^T

Taken literally it cannot find wrong labels (benchmarks/criteria_influence.py: AUROC .42 to .49). Three changes make it do so:

    every vector has norm 1          a few large gradients no longer decide (Barshan et al. 2020, RelatIF)
    h minus its mean over v          features after a ReLU all point the same way, so that classes cancel each other
    r_v = 1/C - y_v                  a validation sample counts the same whether or not it is learnt: at a trained model's own
                                     prediction it is nearly 0 for right ones, and what is left is noise
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from salience.errors import ConfigError, DataError
from salience.signals.scorer import LastLinear

Ids = npt.NDArray[np.int64]
MIN_VALIDATION_PER_CLASS = 5
"""Minimum number of validation samples per class; influence by fewer would be arbitrary."""


def validation_direction(h: Tensor, targets: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """G = mean_v r_v h_v^T, [C, D], and the mean of h that was subtracted, [D]; r_v = 1/C - y_v, all vectors with norm 1."""
    centre = h.mean(0)
    r = F.normalize(1 / classes - F.one_hot(targets, classes).to(h.dtype))
    return r.T @ F.normalize(h - centre) / len(h), centre


def influence_on(direction: Tensor, centre: Tensor, h: Tensor, logits: Tensor, targets: Tensor) -> Tensor:
    """How much a step on each sample would help the validation samples, from -1 to 1, [B]; negative values harm."""
    r = F.normalize(logits.softmax(1) - F.one_hot(targets, logits.shape[1]))
    return ((r @ direction) * F.normalize(h - centre)).sum(1)


class Influence:
    """Adds up the influence of `n` samples over checkpoints of one run: `add` once per checkpoint, then `score`."""

    def __init__(self, n: int) -> None:
        self._total = np.zeros(n, dtype=np.float64)
        self._times = np.zeros(n, dtype=np.int64)

    @torch.no_grad()
    def add(
        self,
        model: nn.Module,
        batches: Iterable[tuple[Ids, Tensor, Tensor]],
        validation: Iterable[tuple[Tensor, Tensor]],
        *,
        device: torch.device | str = "cpu",
    ) -> None:
        """Add one checkpoint: `batches` yields (ids, inputs, integer targets), `validation` inputs and trusted targets.

        The model is run in evaluation mode, and returned to its previous mode.
        """
        last, training = LastLinear(model), model.training
        ask = _asker(model.eval(), last, torch.device(device))
        try:
            known = [ask(x, y) for x, y in validation]
            if not known:
                raise DataError("influence needs validation samples, and was given none.")
            h, z, y = (torch.cat(parts) for parts in zip(*known, strict=True))
            if int(y.max()) >= z.shape[1]:
                raise ConfigError(f"influence: class {int(y.max())} is not among the model's {z.shape[1]} classes.")
            fewest = int(torch.bincount(y, minlength=z.shape[1]).min())
            if fewest < MIN_VALIDATION_PER_CLASS:
                raise ConfigError(
                    f"influence: a class has {fewest} validation samples; give at least {MIN_VALIDATION_PER_CLASS} of each."
                )
            direction, centre = validation_direction(h, y, z.shape[1])
            for ids, x, targets in batches:
                found = influence_on(direction, centre, *ask(x, targets))
                self._total[ids] += found.double().cpu().numpy()
                self._times[ids] += 1
        finally:
            last.remove()
            model.train(training)

    @property
    def score(self) -> npt.NDArray[np.float32]:
        """Harm first: minus the mean influence over the checkpoints, float32 [n], from -1 to 1; NaN where not computed.

        Pass it as `reference=` for the scores `proxy` and `cscore`; the largest values are suspected labels.
        """
        times = np.where(self._times > 0, self._times, np.nan)
        return (-self._total / times).astype(np.float32)


def _asker(
    model: nn.Module, last: LastLinear, device: torch.device
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """A function from inputs and targets to the input of the last Linear, logits and targets."""

    def ask(x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = model(x.to(device)).float()
        given = last.given
        if given is None or given.dim() != 2 or len(given) != len(logits) or last.width != logits.shape[1]:
            raise ConfigError("influence needs a model whose logits come from one nn.Linear, one vector per sample.")
        return given.float(), logits, targets.to(device)

    return ask
