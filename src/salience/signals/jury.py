"""A jury: two small models trained beside the attached one, each on its own half of the samples, that judge all of them.

For the whole run, every sample is trained on by one of the two and held out from the other. A wrong label that one learns by
heart surprises the other: together they give evidence that the model itself cannot give.

deliver()                  a batch is on its way
sit(targets, ids, kept)    each model makes a step on its half of the batch and evaluates the other half
enter()                    the results go into two ledgers: `trained` and `held_out`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from salience.errors import ConfigError
from salience.ledger import Ledger
from salience.ledger.statistics import finish, reduce_batch
from salience.seeds import TIES, generator
from salience.signals.beside import Learner, Listening

LEARNING_RATE = 0.05
LEAST_ROWS = 2
"""A model in training mode may need more than one sample (BatchNorm)."""

Juror = nn.Module | tuple[nn.Module, torch.optim.Optimizer]


class Jury:
    """Two models, their optimizers, and their results."""

    def __init__(self, beside: nn.Module, jurors: Sequence[Juror], n: int, seed: int) -> None:
        if len(jurors) != 2:
            raise ConfigError(
                f"A jury is two models, and {len(jurors)} were given: each holds out half of the samples."
            )
        self.models: list[nn.Module] = []
        self.learners: list[Learner] = []
        for juror in jurors:
            model, optimizer = juror if isinstance(juror, tuple) else (juror, None)
            self.learners.append(Learner("juror", model, optimizer, [beside, *self.models], rate=LEARNING_RATE))
            self.models.append(model)
        self.outside: npt.NDArray[np.int8] = generator(seed, TIES, n, 2).integers(0, 2, n).astype(np.int8)
        """Which of the two each sample is held out from, int8 [n]."""
        self.trained, self.held_out = Ledger(n), Ledger(n)
        self._said: list[tuple[Ledger, npt.NDArray[np.int64], int, tuple[str, ...], Tensor]] = []
        """Ledger, ids, window, row names and values of results that are not entered yet."""
        self._listening = Listening(beside)
        self.deliver, self.close = self._listening.deliver, self._listening.close

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

        Returns False if the attached model received a different number of samples.
        """
        like = next(self.models[0].parameters())
        given = self._listening.take(ids, len(targets), kept, like)
        if given is None:
            return False
        targets = targets.to(like.device, torch.int64)
        at = np.arange(len(ids)) if kept is None else kept.cpu().numpy()
        known = ~np.isin(at, stand_ins)
        mine, outside = ids[at], self.outside[ids[at]]
        for number, learner in enumerate(self.learners):
            for ledger in (self.trained, self.held_out):
                trains = ledger is self.trained
                rows = np.flatnonzero(known & ((outside == number) != trains))
                if len(rows) < LEAST_ROWS:
                    continue
                place = torch.from_numpy(rows).to(like.device)
                label = targets[place]
                learner.model.train(trains)
                with torch.set_grad_enabled(trains):
                    logits = learner.model(given[place])
                    losses = F.cross_entropy(logits, label, reduction="none", ignore_index=-100)
                if trains and bool((label >= 0).any()):
                    learner.step(losses.sum() / (label >= 0).sum())
                self._said.append((ledger, mine[rows], window, *reduce_batch(losses.detach(), logits.detach(), label)))
            learner.model.train()
        return True

    def enter(self) -> None:
        """Copy the results since the last call to the host, and enter them into the ledgers."""
        for ledger, ids, window, names, values in self._said:
            rows = dict(zip(names, values.cpu().numpy(), strict=True))
            labelled = rows["target"] >= 0
            ids, rows = ids[labelled], {name: row[labelled] for name, row in rows.items()}
            if len(ids):
                ledger.label[ids] = rows["target"].astype(np.int32)
                ledger.record(ids, finish(rows), window=window, trained=ledger is self.trained)
        self._said.clear()

    def state_dict(self) -> dict[str, Any]:
        """State of the models; the two ledgers have states of their own."""
        self.enter()
        states = [learner.state_dict() for learner in self.learners]
        return {f"{part}s": [state[part] for state in states] for part in ("model", "optimizer")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for learner, model, optimizer in zip(self.learners, state["models"], state["optimizers"], strict=True):
            learner.load_state_dict({"model": model, "optimizer": optimizer})
        self._said.clear()
