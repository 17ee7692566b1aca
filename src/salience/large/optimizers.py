"""Rates per layer: LARS, LAMB and NovoGrad of `pytorch_optimizer`, and LARC around any optimizer.

LARC   rate of a layer = min(trust * |w| / (|g| + decay * |w|), lr)        (You et al. 2017, with clipping)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from salience.errors import ConfigError, MissingExtra, did_you_mean

NAMES = {"lars": "LARS", "lamb": "Lamb", "novograd": "NovoGrad"}


def optimizer(name: str, params: Any, **options: Any) -> Optimizer:
    """LARS, LAMB or NovoGrad by name, as `pytorch_optimizer` has them, with its own options and defaults.

    Its `Lamb` clips the norm of all gradients at 1 by default: pass `max_grad_norm=0.0` for none. Its `LARS` has a trust
    coefficient of 0.001, so that it wants rates tens of times those of SGD.
    """
    if name not in NAMES:
        raise ConfigError(f"There is no optimizer {name!r} here.{did_you_mean(name, NAMES)}")
    try:
        import pytorch_optimizer
    except ImportError as cause:
        raise MissingExtra.of("pytorch_optimizer", "large", f"salience.large.optimizer({name!r})") from cause
    return getattr(pytorch_optimizer, NAMES[name])(params, **options)


class LARC:
    """An optimizer whose layers have rates of their own; each step scales gradients and leaves the rest to the optimizer.

        optimizer = salience.large.LARC(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, weight_decay=5e-4))

    Weight decay goes into the gradient before it is scaled, so that decoupled decay (AdamW) is refused. Biases and norms
    (parameters with one dimension) are left alone. Schedulers take `optimizer.inner`.
    """

    def __init__(self, inner: Optimizer, *, trust: float = 0.02, clip: bool = True, eps: float = 1e-8) -> None:
        """`clip=False`: the layer's rate is lr * trust * |w| / (...), not limited by lr."""
        if trust <= 0:
            raise ConfigError(f"trust is {trust}; it must be above 0.")
        if type(inner).__name__ == "AdamW":
            raise ConfigError("LARC scales decay with the gradient, and AdamW keeps them apart; use Adam or SGD.")
        self.inner, self.trust, self.clip, self.eps = inner, trust, clip, eps

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    @property
    def state(self) -> Any:
        return self.inner.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Scale every layer's gradient, then make a step of the optimizer without its weight decay."""
        decays = [group.get("weight_decay", 0.0) for group in self.inner.param_groups]
        try:
            for group, decay in zip(self.inner.param_groups, decays, strict=True):
                for p in group["params"]:
                    if p.grad is None:
                        continue
                    if p.dim() > 1:
                        factor = self.factor(p.norm(), p.grad.norm(), decay, group["lr"])
                        p.grad.add_(p, alpha=decay).mul_(factor)
                    elif decay:
                        p.grad.add_(p, alpha=decay)
                group["weight_decay"] = 0.0
            return self.inner.step(closure)  # pyright: ignore[reportArgumentType]
        finally:
            for group, decay in zip(self.inner.param_groups, decays, strict=True):
                group["weight_decay"] = decay

    def factor(self, weight: torch.Tensor, gradient: torch.Tensor, decay: float, lr: float) -> torch.Tensor:
        """What a layer's gradient is multiplied by: its rate / lr; 1 where weight or gradient is zero."""
        rate = self.trust * weight / (gradient + decay * weight + self.eps)
        rate = torch.clamp(rate / lr, max=1.0) if self.clip else rate
        return torch.where((weight > 0) & (gradient > 0), rate, torch.ones_like(rate))

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)
