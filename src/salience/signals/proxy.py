"""A small model trained beside the attached one, on the same batches: its losses are a reference of the run's own.

deliver()                    a batch is on its way: what the attached model is given from here on is its input
train(targets, ids, kept)    a step of the small model on that input; the losses it had before the step are kept
enter()                      those losses go into `losses`
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from salience.errors import ConfigError, StateError
from salience.signals.attached import first_tensor

LEARNING_RATE = 0.01
MOMENTUM = 0.9
"""Settings of the SGD that trains a proxy given without an optimizer; the learning rate is not scheduled."""


class Proxy:
    """The small model, its optimizer and its last loss on every sample. The hook on the attached model holds it weakly."""

    def __init__(self, beside: nn.Module, model: nn.Module, optimizer: torch.optim.Optimizer | None, n: int) -> None:
        mine = list(model.parameters())
        if {id(p) for p in mine} & {id(p) for p in beside.parameters()}:
            raise ConfigError("The proxy shares parameters with the attached model; give it parameters of its own.")
        if not mine:
            raise ConfigError(f"The proxy ({type(model).__name__}) has no parameters; there is nothing to train.")
        self.model = model
        self.optimizer = optimizer or torch.optim.SGD(mine, lr=LEARNING_RATE, momentum=MOMENTUM)
        self.losses = np.full(n, np.nan, dtype=np.float32)
        """Loss at the sample's last visit, float32 [n]; NaN where unknown."""
        self._waiting = 0
        """Batches delivered whose losses have not come: more than one where a loop fetches ahead."""
        self._given: Tensor | None = None
        self._pending: list[tuple[npt.NDArray[np.int64], Tensor | None, Tensor]] = []
        hook = beside.register_forward_pre_hook(_Hook(self), with_kwargs=True)
        self.close = weakref.finalize(self, hook.remove)
        """Stop listening; `losses` stay as they are."""
        self.close.atexit = False

    def deliver(self) -> None:
        self._waiting += 1

    def listen(self, given: Tensor | None) -> None:
        """The attached model runs: its last call with gradients on before the losses is that of the batch."""
        if self._waiting and torch.is_grad_enabled():
            self._given = None if given is None else given.detach()

    def train(
        self, targets: Tensor, ids: npt.NDArray[np.int64], kept: Tensor | None = None, stand_ins: Sequence[int] = ()
    ) -> bool:
        """One step on the mean cross-entropy of the samples `ids` (or of the positions `kept` of them).

        Positions in `stand_ins` hold another sample than their id says; they are left out.
        Returns False where the attached model was not given as many samples. Nothing here waits for the device.
        """
        given, self._given = self._given, None
        self._waiting = max(0, self._waiting - 1)
        if given is None or given.dim() == 0 or len(given) not in (len(ids), len(targets)):
            return False
        if len(given) != len(targets) and kept is not None:
            given = given[kept.to(given.device)]
        like = next(self.model.parameters())
        given = given.to(like.device, like.dtype) if given.is_floating_point() else given.to(like.device)
        with torch.enable_grad():
            losses = F.cross_entropy(self.model(given), targets.to(like.device, torch.int64), reduction="none")
            if stand_ins:
                at = torch.arange(len(ids)) if kept is None else kept.cpu()
                known = ~torch.isin(at, torch.tensor(stand_ins)).to(losses.device)
                losses = torch.where(known, losses, torch.nan)
            self.optimizer.zero_grad()
            (losses.nanmean() if stand_ins else losses.mean()).backward()
        self.optimizer.step()
        self._pending.append((ids, kept, losses.detach().float()))
        return True

    def enter(self) -> None:
        """Bring the losses since the last call to the host; for a sample that occurs twice, the later one counts."""
        if self._pending:
            ids = np.concatenate([ids if kept is None else ids[kept.cpu().numpy()] for ids, kept, _ in self._pending])
            losses = torch.cat([losses for _, _, losses in self._pending]).cpu().numpy()
            self._pending.clear()
            known = np.isfinite(losses)
            self.losses[ids[known]] = losses[known]

    def state_dict(self) -> dict[str, Any]:
        self.enter()
        return {
            "losses": torch.from_numpy(self.losses.copy()),
            "model": copy.deepcopy(self.model.state_dict()),
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        try:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, ValueError) as cause:
            raise StateError(f"The saved proxy is another one; attach the model it was saved with. {cause}") from cause
        self._pending.clear()
        self.losses[:] = state["losses"].numpy()


class _Hook:
    """A forward pre-hook that holds its owner weakly. A copied or unpickled model gets one that does nothing."""

    def __init__(self, owner: Proxy | None = None) -> None:
        self._owner = None if owner is None else weakref.ref(owner)

    def __call__(self, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        owner = None if self._owner is None else self._owner()
        if owner is not None:
            owner.listen(first_tensor((*given, *named.values())))

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return _Hook, ()
