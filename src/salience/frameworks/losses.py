"""One loss per sample from a model's logits and labels, for the usual tasks of Hugging Face's models."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from salience.errors import LossError

IGNORED = -100
"""Label of positions that do not count."""

OwnLosses = Callable[[Any, Mapping[str, Any]], Tensor]
"""From a model's outputs and inputs to one loss per sample, [B]."""


class PerSample(NamedTuple):
    """Losses of a batch, and what the ledger can learn besides."""

    losses: Tensor
    """Mean over the items of each sample, [B]."""
    counts: Tensor | None = None
    """Number of items of each sample, [B]; None = one each."""
    logits: Tensor | None = None
    """Logits [B, C], if a sample has one class."""
    targets: Tensor | None = None


def per_sample_losses(
    outputs: Any, labels: Tensor | None, *, shift: bool = False, smoothing: float = 0.0, problem: str | None = None
) -> PerSample:
    """Classification, multi-label classification and regression of samples; classes of tokens, with `shift` of the next one.

    `problem` is the model's `config.problem_type`; without it the shapes and types decide, as in the models themselves.
    """
    logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]  # pyright: ignore[reportUnknownVariableType]
    if not isinstance(labels, Tensor) or not isinstance(logits, Tensor):
        raise LossError("The batch has no labels, or the model no logits; pass per_sample=, which returns losses [B].")
    logits, whole = logits.float(), not labels.is_floating_point()
    if whole and logits.dim() == 2 and labels.dim() == 1 and logits.shape[1] > 1:
        losses = F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
        return PerSample(losses, logits=logits.detach(), targets=labels)
    if whole and logits.dim() == 3 and labels.dim() == 2:
        if shift:
            logits, labels = logits[:, :-1], labels[:, 1:]
        each = F.cross_entropy(
            logits.transpose(1, 2), labels, reduction="none", ignore_index=IGNORED, label_smoothing=smoothing
        )
        counts = (labels != IGNORED).sum(dim=1)
        return PerSample(each.sum(dim=1) / counts.clamp(min=1), counts)
    several = logits.dim() == 2 and labels.shape == logits.shape and logits.shape[1] > 1
    if several and not whole and problem != "regression":
        return PerSample(F.binary_cross_entropy_with_logits(logits, labels.float(), reduction="none").mean(dim=1))
    if logits.dim() == 2 and labels.numel() == logits.numel() and not (several and whole):
        return PerSample((logits - labels.view_as(logits)).square().mean(dim=1))
    raise LossError(
        f"Logits of shape {tuple(logits.shape)} with labels {labels.dtype} of shape {tuple(labels.shape)}: how losses per "
        "sample are made of them is not known; pass per_sample=, which returns losses [B]."
    )


class TaskLosses:
    """Per-sample losses of one model's batches, and the items in them that have equal weight.

    `shift` = the logits of a decoder at position i are for the label at i + 1. `own(outputs, inputs)` returns losses [B];
    without it the mean of the first batch is compared with the loss that the model itself returns, which need not compute it
    from then on. `counts_first` = the first token of a sequence counts as an item though it is not predicted, which the
    Trainer does for models whose loss it does not know by name, as GPT-2.
    """

    def __init__(
        self, model: Any, *, shift: bool, smoothing: float, own: OwnLosses | None, counts_first: bool = False
    ) -> None:
        self._config, self._smoothing, self._own = getattr(model, "config", None), smoothing, own
        feeds_labels = getattr(self._config, "is_encoder_decoder", False)  # to its decoder, which needs no shift
        self._shift, self._needs_labels = shift and not feeds_labels, feeds_labels or own is not None
        self._agrees, self._counts_first = own is not None, counts_first

    def __call__(self, model: Any, inputs: dict[str, Any]) -> tuple[PerSample, Any]:
        """The losses of a batch, and the model's outputs."""
        drops = self._agrees and not self._needs_labels
        outputs = model(**{name: value for name, value in inputs.items() if not (drops and name == "labels")})
        if self._own is not None:
            return PerSample(self._own(outputs, inputs)), outputs
        problem = getattr(self._config, "problem_type", None)  # a model finds it out in its first forward pass
        find = functools.partial(per_sample_losses, outputs, inputs.get("labels"), shift=self._shift, problem=problem)
        if not self._agrees:
            check_against_model(find(), outputs)
            self._agrees = True
        return find(smoothing=self._smoothing), outputs

    def count_items(self, labels: Any, samples: int) -> int:
        """The number of tokens with a label if tokens have labels, otherwise of samples."""
        if self._own is None and isinstance(labels, Tensor) and labels.dim() == 2 and not labels.is_floating_point():
            return int(((labels[:, 1:] if self._shift and not self._counts_first else labels) != IGNORED).sum())
        return samples


def check_against_model(found: PerSample, outputs: Any) -> None:
    """Raise LossError if the mean of the losses is not the loss that the model itself returns, where it returns one."""
    own = outputs.get("loss") if isinstance(outputs, Mapping) else None
    if isinstance(own, Tensor):
        counts = torch.ones_like(found.losses) if found.counts is None else found.counts
        mean = float((found.losses.detach() * counts).sum() / counts.sum().clamp(min=1))
        if not math.isclose(mean, float(own.detach()), rel_tol=0.01, abs_tol=1e-4):
            raise LossError(
                f"The mean of the losses per sample is {mean:.6g} and the model's own loss {float(own.detach()):.6g}: it has "
                "terms that are not known here, or another task; pass per_sample=, which returns its losses [B]."
            )
