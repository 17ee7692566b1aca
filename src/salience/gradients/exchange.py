"""What every way to exchange gradients has in common, and the plain one: everything travels, as it is or in 16 bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from salience.gradients.link import Link


class Exchange(Protocol):
    """Replaces the gradients of a backward pass by their mean over the ranks, or by what of it may travel now.

    `begin` is called for each bucket in the same order on every rank, then `finish` once with the gradients of all parameters,
    in the order of the model. All collectives happen in these calls, in one fixed order, whatever the number of buckets.
    An exchange overrides what it needs: each method but `finish` does nothing by itself.
    """

    lossy: bool
    """True if the gradients that come out can differ from the mean."""
    silent: bool = False
    """True if nothing travels in a backward pass."""

    def begin(self, bucket: Tensor) -> None:
        """A bucket is complete; what can be sent without the others may be."""

    def finish(self, gradients: Sequence[Tensor]) -> None:
        """All gradients are there: exchange them in place."""
        ...

    def stepped(self) -> None:
        """The optimizer has made a step."""

    def average(self) -> None:
        """Make parameters equal on all ranks, where they are not always. Collective."""

    def leave(self) -> None:
        """Another exchange takes over; parameters must be equal. Collective."""

    def restart(self) -> None:
        """Parameters were loaded, equal on all ranks: go on from them."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any], *, residuals: bool = True) -> None:
        """Without `residuals` only what is the same on every rank and for any number of them: counters."""


class Whole(Exchange):
    """All gradients travel in every step, as they are or rounded to `dtype`. Sent while the backward pass goes on."""

    def __init__(self, link: Link, dtype: torch.dtype | None = None, *, overlap: bool = True) -> None:
        """`overlap=False` sends everything at once after the backward pass: its time is then that of the link alone."""
        self.link, self.dtype, self.overlap = link, dtype, overlap
        self.lossy = dtype is not None
        self._begun: list[tuple[Tensor, Tensor, Any]] = []

    def begin(self, bucket: Tensor) -> None:
        if self.overlap:
            travelling = bucket if self.dtype is None else bucket.to(self.dtype)
            self._begun.append((bucket, travelling, self.link.start_mean(travelling)))

    def finish(self, gradients: Sequence[Tensor]) -> None:
        if not self.overlap:
            flat = join(gradients)
            split(self.link.mean(flat if self.dtype is None else flat.to(self.dtype)), gradients)
        begun, self._begun = self._begun, []
        for bucket, travelling, work in begun:
            self.link.wait(work)
            if travelling is not bucket:
                bucket.copy_(travelling)


class Averager(Protocol):
    """Sends this rank's progress and returns the updates that all ranks make, in order; called in a thread of its own."""

    def __call__(self, vector: Tensor, count: int, *, together: bool) -> list[Tensor]:
        """`count` steps were made; `together` says that parameters must be equal on all ranks afterwards."""
        ...

    def leave(self) -> None:
        """Nothing more will be sent."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def join(tensors: Sequence[Tensor]) -> Tensor:
    """All values as one float32 vector."""
    if not tensors:
        return torch.zeros(0)
    return torch.cat([tensor.detach().reshape(-1).float() for tensor in tensors])


@torch.no_grad()
def split(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Write the values of one vector back into `tensors`, in order."""
    for tensor, values in zip(tensors, flat.split([one.numel() for one in tensors]), strict=True):
        tensor.copy_(values.view(tensor.shape))
