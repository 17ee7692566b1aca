"""A small model trained beside the attached one, on the same batches: its losses are a reference made by the run itself.

deliver()                    a batch is on its way
train(targets, ids, kept)    a step of the small model on its input; its losses before the step are kept
enter()                      those losses go into `losses`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from salience.signals.beside import Learner, Listening

LEARNING_RATE = 0.01


class Proxy:
    """The small model, its optimizer and its last loss on every sample."""

    def __init__(self, beside: nn.Module, model: nn.Module, optimizer: torch.optim.Optimizer | None, n: int) -> None:
        self.learner = Learner("proxy", model, optimizer, [beside], rate=LEARNING_RATE)
        self.losses = np.full(n, np.nan, dtype=np.float32)
        """Loss at the sample's last visit, float32 [n]; NaN where unknown."""
        self._listening = Listening(beside)
        self._pending: list[tuple[npt.NDArray[np.int64], Tensor | None, Tensor]] = []
        self.deliver, self.close = self._listening.deliver, self._listening.close

    def train(
        self, targets: Tensor, ids: npt.NDArray[np.int64], kept: Tensor | None = None, stand_ins: Sequence[int] = ()
    ) -> bool:
        """One step on the mean cross-entropy of the samples `ids` (or of the positions `kept` of them).

        Positions in `stand_ins` hold a different sample from the one their id names; they are left out. Returns False if the
        attached model received a different number of samples. Nothing here waits for the device.
        """
        like = next(self.learner.model.parameters())
        given = self._listening.take(ids, len(targets), kept, like)
        if given is None:
            return False
        with torch.enable_grad():
            losses = F.cross_entropy(self.learner.model(given), targets.to(like.device, torch.int64), reduction="none")
            if stand_ins:
                at = torch.arange(len(ids)) if kept is None else kept.cpu()
                known = ~torch.isin(at, torch.tensor(stand_ins)).to(losses.device)
                losses = torch.where(known, losses, torch.nan)
            self.learner.step(losses.nanmean() if stand_ins else losses.mean())
        self._pending.append((ids, kept, losses.detach().float()))
        return True

    def enter(self) -> None:
        """Copy the losses since the last call to the host; for a sample that occurs twice, the later one counts."""
        if self._pending:
            ids = np.concatenate([ids if kept is None else ids[kept.cpu().numpy()] for ids, kept, _ in self._pending])
            losses = torch.cat([losses for _, _, losses in self._pending]).cpu().numpy()
            self._pending.clear()
            known = np.isfinite(losses)
            self.losses[ids[known]] = losses[known]

    def state_dict(self) -> dict[str, Any]:
        self.enter()
        return {"losses": torch.from_numpy(self.losses.copy()), **self.learner.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.learner.load_state_dict(state)
        self._pending.clear()
        self.losses[:] = state["losses"].numpy()
