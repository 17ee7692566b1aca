"""Probing: at accuracy marks, which share of the gradient is near zero, and the loss below which samples count as learnt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from salience.errors import ConfigError
from salience.events import GradientsProbed, LayerNearZero
from salience.ledger import Ledger
from salience.run.part import Part, Setup, Voice
from salience.signals.nearzero import NearZero, by_loss, learnt_loss, near_zero

MARKS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98)
"""Accuracies at which a probe is made; each is passed once."""
MAX_SAMPLES = 256
"""Samples of the probe; more would cost more than they tell."""
MAX_LAYERS = 64
"""Layers in the event; of more, the largest."""


class Probing(Part):
    """A few samples whose gradients are examined one by one; rank 0 does so, and all ranks learn what it found."""

    name = "probing"

    def __init__(self, setup: Setup, voice: Voice) -> None:
        self._setup, self._voice = setup, voice
        self._model: nn.Module | None = None
        self._batch: tuple[Tensor, Tensor] | None = None
        self.learnt_loss: float | None = None
        """Loss under which nine tenths of a sample's gradient are near zero, by the last probe; None = not known."""
        self._found: float | None = None
        """The same on rank 0, until the next window begins."""
        self._passed = 0
        """Marks that were passed."""

    def attach(self, model: nn.Module, batch: Any) -> None:
        """Probe this model on `batch`: inputs [B, ...] and integer targets [B]."""
        pair = tuple(batch) if isinstance(batch, (tuple, list)) else ()
        if len(pair) != 2 or not all(isinstance(part, Tensor) for part in pair) or len(pair[0]) != len(pair[1]):
            raise ConfigError("probe must be (inputs, targets): two tensors with as many samples.")
        inputs, targets = pair
        if targets.dim() != 1 or targets.is_floating_point() or not len(targets):
            raise ConfigError(
                f"The targets of the probe are {targets.dtype} of shape {tuple(targets.shape)}; they must be integers, [B]."
            )
        self._model = model
        self._batch = inputs[:MAX_SAMPLES].detach(), targets[:MAX_SAMPLES].detach().to(torch.int64)

    def detach(self) -> None:
        self._model = self._batch = None

    @property
    def in_use(self) -> bool:
        return self._model is not None

    def evaluated(self, metric: float, window: int) -> None:
        """Take a validation result; where it passes a mark, probe."""
        if self._model is None or self._batch is None:
            return
        if not 0 <= metric <= 1:
            self._voice.warn_once(
                f"The probe of gradients waits for accuracies from 0 to 1, and evaluated() was given {metric:.4g}."
            )
            return
        passed = sum(metric >= mark for mark in MARKS)
        if passed <= self._passed:
            return
        self._passed = passed
        if self._setup.rank != 0:
            return
        try:
            found = near_zero(self._model, *self._batch)
        except Exception as cause:  # torch.func cannot transform every model
            self.detach()
            self._voice.failed(f"The probe of gradients failed and is off: {type(cause).__name__}: {cause}", cause)
            return
        self._found = learnt_loss(found.losses, found.overall)
        self._voice.events.emit(event_of(found, window=window, accuracy=metric, learnt=self._found))
        if self._setup.ranks is None:
            self.learnt_loss = self._found

    def prepare(self, window: int, ledger: Ledger) -> None:
        if self._setup.ranks is not None:
            self.learnt_loss = self._setup.ranks.broadcast(self._found)

    def state_dict(self) -> dict[str, Any]:
        return {"learnt_loss": self.learnt_loss, "found": self._found, "passed": self._passed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.learnt_loss, self._found, self._passed = state["learnt_loss"], state["found"], int(state["passed"])


def event_of(found: NearZero, *, window: int, accuracy: float, learnt: float | None) -> GradientsProbed:
    """What a probe found, as an event."""
    overall = found.overall
    losses, shares = by_loss(found.losses, overall)
    largest = sorted(found.sizes, key=lambda name: -found.sizes[name])[:MAX_LAYERS]
    layers: list[LayerNearZero] = []
    for name, share in found.shares.items():
        if name in largest:
            quarters = by_loss(found.losses, share, 4)[1]
            layers.append(
                LayerNearZero(name=name, entries=found.sizes[name], easiest=quarters[0], hardest=quarters[-1])
            )
    return GradientsProbed(
        window=window, accuracy=accuracy, samples=len(overall), mean_loss=float(found.losses.mean()),
        losses=tuple(losses), shares=tuple(shares), layers=tuple(layers), learnt_loss=learnt,
    )  # fmt: skip
