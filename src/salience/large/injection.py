"""Gradient noise injection: noise that a large batch lacks, fading over the run (Neelakantan et al. 2015).

variance of step t   eta / (1 + t)^gamma
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from salience.errors import ConfigError


class GradientNoise:
    """Adds Gaussian noise to gradients; call it between the backward pass and `optimizer.step()`.

        noise = salience.large.GradientNoise(model.parameters(), eta=0.01, seed=0)
        loss.backward(); noise(); optimizer.step()

    With several ranks, the same seed on all of them gives the same noise, so that they stay equal.
    """

    def __init__(self, params: Iterable[Tensor], *, eta: float = 0.01, gamma: float = 0.55, seed: int = 0) -> None:
        if eta < 0 or gamma < 0:
            raise ConfigError(f"eta is {eta} and gamma is {gamma}; both must be at least 0.")
        self._params = list(params)
        self.eta, self.gamma, self.steps = eta, gamma, 0
        self._generators = {p.device: torch.Generator(p.device).manual_seed(seed) for p in self._params}

    @property
    def deviation(self) -> float:
        """Standard deviation of the noise of the next step."""
        return (self.eta / (1 + self.steps) ** self.gamma) ** 0.5

    @torch.no_grad()
    def __call__(self) -> None:
        """Add the noise of one step."""
        size = self.deviation
        for p in self._params:
            if p.grad is not None:
                draws = torch.empty_like(p.grad).normal_(0.0, 1.0, generator=self._generators[p.device])
                p.grad.add_(draws, alpha=size)
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "generators": {str(d): g.get_state() for d, g in self._generators.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = int(state["steps"])
        for device, generator in self._generators.items():
            generator.set_state(state["generators"][str(device)])
