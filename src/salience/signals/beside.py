"""Small models that learn beside the attached one: how they get its input, and how they are trained.

deliver()            a batch is on its way: the attached model's next input belongs to it
take(ids, ...)       that input, one row for each of the batch's losses
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from salience.errors import ConfigError, StateError


class Listening:
    """The first tensor that the attached model receives, batch by batch. The hook on that model refers to this weakly."""

    def __init__(self, beside: nn.Module) -> None:
        self._waiting = 0
        """Delivered batches whose losses have not arrived: more than one if a loop fetches ahead."""
        self._given: Tensor | None = None
        hook = beside.register_forward_pre_hook(WeakHook(self.listen), with_kwargs=True)
        self.close = weakref.finalize(self, hook.remove)
        """Stop listening."""
        self.close.atexit = False

    def deliver(self) -> None:
        self._waiting += 1

    def listen(self, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Record the input of the attached model: its last call with gradients on before the losses belongs to the batch."""
        if self._waiting and torch.is_grad_enabled():
            found = first_tensor((*given, *named.values()))
            self._given = None if found is None else found.detach()

    def take(self, ids: npt.NDArray[np.int64], count: int, kept: Tensor | None, like: Tensor) -> Tensor | None:
        """The input of `count` samples (all `ids`, or the positions `kept` of them), on the device and in the type of `like`.

        None if the attached model received a different number of samples.
        """
        given, self._given = self._given, None
        self._waiting = max(0, self._waiting - 1)
        if given is None or given.dim() == 0 or len(given) not in (len(ids), count):
            return None
        if len(given) != count and kept is not None:
            given = given[kept.to(given.device)]
        return given.to(like.device, like.dtype) if given.is_floating_point() else given.to(like.device)


class Learner:
    """A small model and the optimizer that trains it; by default SGD with momentum, at a constant rate."""

    def __init__(
        self,
        name: str,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        others: Iterable[nn.Module],
        *,
        rate: float,
    ) -> None:
        """`name` is used in messages; the model must not share parameters with the `others`."""
        mine = list(model.parameters())
        if not mine:
            raise ConfigError(f"The {name} ({type(model).__name__}) has no parameters; there is nothing to train.")
        if {id(p) for p in mine} & {id(p) for other in others for p in other.parameters()}:
            raise ConfigError(f"The {name} shares parameters with another model; give it parameters of its own.")
        self.name, self.model = name, model
        self.optimizer = optimizer or torch.optim.SGD(mine, lr=rate, momentum=0.9)

    def step(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.optimizer}
        return {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        try:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, ValueError) as cause:
            raise StateError(
                f"The saved {self.name} is another one; attach the model it was saved with. {cause}"
            ) from cause


class WeakHook:
    """A hook on a model with a weak reference to the object behind it. In a copied or unpickled model it does nothing."""

    def __init__(self, method: Callable[..., None] | None = None, *first: Any) -> None:
        """`method` is called with `first` before what PyTorch passes."""
        self._method = None if method is None else weakref.WeakMethod(method)
        self._first = first

    def __call__(self, *args: Any) -> None:
        method = None if self._method is None else self._method()
        if method is not None:
            method(*self._first, *args)

    def __reduce__(self) -> tuple[type[WeakHook], tuple[()]]:
        return WeakHook, ()


def first_tensor(output: Any) -> Tensor | None:
    """The value if it is a tensor, or the first tensor in a tuple, list or dictionary."""
    if isinstance(output, Tensor):
        return output
    several: Any = output.values() if isinstance(output, Mapping) else output
    if isinstance(output, (Mapping, tuple, list)):
        return next((item for item in several if isinstance(item, Tensor)), None)
    return None
