"""What the attached model is given, overheard for models that learn beside it.

deliver()            a batch is on its way: what the attached model is given from here on is its input
take(ids, ...)       that input, one row for each of the batch's losses
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from salience.signals.attached import first_tensor


class Listening:
    """The first tensor the attached model is given, batch by batch. The hook on that model holds this weakly."""

    def __init__(self, beside: nn.Module) -> None:
        self._waiting = 0
        """Batches delivered whose losses have not come: more than one where a loop fetches ahead."""
        self._given: Tensor | None = None
        hook = beside.register_forward_pre_hook(_Hook(self), with_kwargs=True)
        self.close = weakref.finalize(self, hook.remove)
        """Stop listening."""
        self.close.atexit = False

    def deliver(self) -> None:
        self._waiting += 1

    def listen(self, given: Tensor | None) -> None:
        """The attached model runs: its last call with gradients on before the losses is that of the batch."""
        if self._waiting and torch.is_grad_enabled():
            self._given = None if given is None else given.detach()

    def take(self, ids: npt.NDArray[np.int64], count: int, kept: Tensor | None, like: Tensor) -> Tensor | None:
        """The input of `count` samples: all `ids`, or the positions `kept` of them, on the device and in the type of `like`.

        None where the attached model was not given as many samples.
        """
        given, self._given = self._given, None
        self._waiting = max(0, self._waiting - 1)
        if given is None or given.dim() == 0 or len(given) not in (len(ids), count):
            return None
        if len(given) != count and kept is not None:
            given = given[kept.to(given.device)]
        return given.to(like.device, like.dtype) if given.is_floating_point() else given.to(like.device)


class _Hook:
    """A forward pre-hook that holds its owner weakly. A copy of the model, or a pickled one, gets one that does nothing."""

    def __init__(self, owner: Listening | None = None) -> None:
        self._owner = None if owner is None else weakref.ref(owner)

    def __call__(self, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        owner = None if self._owner is None else self._owner()
        if owner is not None:
            owner.listen(first_tensor((*given, *named.values())))

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return _Hook, ()
