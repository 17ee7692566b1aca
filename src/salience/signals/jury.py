"""A jury: two small models trained beside the attached one, each on its half of the samples, that judge all of them.

Every sample is trained on by one of the two and held out by the other, for the whole run. A wrong label that the one learns by
heart is news to the other: what both say is evidence that the model itself cannot give.

deliver()                  a batch is on its way
sit(targets, ids, kept)    each model makes a step on its half of the batch and looks at the other half
enter()                    what they said goes into two ledgers: `trained` and `held_out`
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from salience.errors import ConfigError, StateError
from salience.ledger import Ledger
from salience.ledger.statistics import finish, reduce_batch
from salience.seeds import TIES, generator
from salience.signals.listening import Listening

LEARNING_RATE, MOMENTUM = 0.05, 0.9
"""Settings of the SGD that trains a juror given without an optimizer; the learning rate is not scheduled."""
LEAST_ROWS = 2
"""A model in training mode may need more than one sample (BatchNorm)."""

Juror = nn.Module | tuple[nn.Module, torch.optim.Optimizer]


@dataclass(slots=True, eq=False)
class _Heard:
    """What one juror said of some samples."""

    ids: npt.NDArray[np.int64]
    window: int
    names: tuple[str, ...]
    values: Tensor
    trained: bool


class Jury:
    """Two models, their optimizers, and what they said."""

    def __init__(self, beside: nn.Module, jurors: Sequence[Juror], n: int, seed: int) -> None:
        if len(jurors) != 2:
            raise ConfigError(
                f"A jury is two models, and {len(jurors)} were given: each holds out half of the samples."
            )
        self._listening = Listening(beside)
        self.models: list[nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        taken = {id(p) for p in beside.parameters()}
        for juror in jurors:
            model, optimizer = juror if isinstance(juror, tuple) else (juror, None)
            mine = list(model.parameters())
            if not mine:
                raise ConfigError(f"A juror ({type(model).__name__}) has no parameters; there is nothing to train.")
            if taken & {id(p) for p in mine}:
                raise ConfigError("A juror shares parameters with another model; give it parameters of its own.")
            taken |= {id(p) for p in mine}
            self.models.append(model)
            self.optimizers.append(optimizer or torch.optim.SGD(mine, lr=LEARNING_RATE, momentum=MOMENTUM))
        self.outside: npt.NDArray[np.int8] = generator(seed, TIES, n, 2).integers(0, 2, n).astype(np.int8)
        """Which of the two holds out each sample, int8 [n]."""
        self.trained, self.held_out = Ledger(n), Ledger(n)
        self._heard: list[_Heard] = []

    def close(self) -> None:
        """Stop listening; the ledgers stay as they are."""
        self._listening.close()

    @property
    def sits(self) -> bool:
        """False after `close`."""
        return self._listening.close.alive

    def deliver(self) -> None:
        self._listening.deliver()

    def sit(
        self,
        targets: Tensor,
        ids: npt.NDArray[np.int64],
        kept: Tensor | None = None,
        stand_ins: Sequence[int] = (),
        *,
        window: int,
    ) -> bool:
        """One step of each juror on the mean cross-entropy of its half; negative targets and `stand_ins` are left out.

        Returns False where the attached model was not given as many samples.
        """
        like = next(self.models[0].parameters())
        given = self._listening.take(ids, len(targets), kept, like)
        if given is None:
            return False
        targets = targets.to(like.device, torch.int64)
        at = np.arange(len(ids)) if kept is None else kept.cpu().numpy()
        known = ~np.isin(at, stand_ins)
        mine, outside = ids[at], self.outside[ids[at]]
        for number, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            for held_out in (False, True):
                rows = np.flatnonzero(known & ((outside == number) == held_out))
                if len(rows) < LEAST_ROWS:
                    continue
                place = torch.from_numpy(rows).to(like.device)
                label = targets[place]
                model.train(not held_out)
                with torch.set_grad_enabled(not held_out):
                    logits = model(given[place])
                    losses = F.cross_entropy(logits, label, reduction="none", ignore_index=-100)
                if not held_out and bool((label >= 0).any()):
                    optimizer.zero_grad()
                    (losses.sum() / (label >= 0).sum()).backward()
                    optimizer.step()
                names, values = reduce_batch(losses.detach(), logits.detach(), label)
                self._heard.append(_Heard(mine[rows], window, names, values, not held_out))
            model.train()
        return True

    def enter(self) -> None:
        """Bring what was said since the last call to the host and into the ledgers."""
        for one in self._heard:
            ledger = self.trained if one.trained else self.held_out
            rows = dict(zip(one.names, one.values.cpu().numpy(), strict=True))
            labelled = rows["target"] >= 0
            ids, rows = one.ids[labelled], {name: row[labelled] for name, row in rows.items()}
            if len(ids):
                ledger.label[ids] = rows["target"].astype(np.int32)
                ledger.record(ids, finish(rows), window=one.window, trained=one.trained)
        self._heard.clear()

    def state_dict(self) -> dict[str, Any]:
        """The models; the two ledgers have states of their own."""
        self.enter()
        return {
            "models": [copy.deepcopy(model.state_dict()) for model in self.models],
            "optimizers": [copy.deepcopy(optimizer.state_dict()) for optimizer in self.optimizers],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        try:
            for model, saved in zip(self.models, state["models"], strict=True):
                model.load_state_dict(saved)
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
        except (RuntimeError, ValueError) as cause:
            raise StateError(f"The saved jury is another one; attach the models it was saved with. {cause}") from cause
        self._heard.clear()
