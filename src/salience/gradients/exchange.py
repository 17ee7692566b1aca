"""What all exchanges of gradients have in common, and the plain ones: everything travels, unchanged or in 16 bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from salience.errors import RankError
from salience.gradients.link import Link


class Saved(Protocol):
    """The state of an exchange, given by the names of its attributes."""

    counters: ClassVar[tuple[str, ...]] = ()
    """Attributes that are equal on every rank, and valid for any number of ranks."""
    residuals: ClassVar[tuple[str, ...]] = ()
    """Attributes that differ from rank to rank."""

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in (*self.counters, *self.residuals)}

    def load_state_dict(self, state: Mapping[str, Any], *, residuals: bool = True) -> None:
        """Restore what was saved; without `residuals`, only the counters."""
        for name in (*self.counters, *(self.residuals if residuals else ())):
            setattr(self, name, copy(state[name]))


class Exchange(Saved, Protocol):
    """Replaces the gradients of a backward pass by their mean over the ranks, or by the part of it that travels now.

    `begin` is called for each bucket in the same order on every rank, then `finish` once with the gradients of all parameters,
    in the order of the model. All collectives happen in these calls, in one fixed order, whatever the number of buckets.
    An exchange overrides what it needs: each method but `finish` does nothing by itself.
    """

    lossy: bool
    """True if the gradients that come out can differ from the mean."""
    silent: bool = False
    """True if nothing travels in a backward pass."""

    def begin(self, bucket: Tensor) -> None:
        """A bucket is complete: anything that can be sent without the others may be sent."""

    def finish(self, gradients: Sequence[Tensor]) -> None:
        """All gradients are there: exchange them in place."""
        ...

    def stepped(self) -> None:
        """The optimizer has made a step."""

    def average(self) -> None:
        """Make parameters equal on all ranks, if they are not always equal. Collective."""

    def leave(self) -> None:
        """Another exchange takes over; parameters must be equal. Collective."""

    def restart(self) -> None:
        """Parameters were loaded, equal on all ranks: continue from them."""


class Whole(Exchange):
    """All gradients travel in every step, unchanged or rounded to `dtype`, during the backward pass."""

    def __init__(self, link: Link, dtype: torch.dtype | None = None, *, overlap: bool = True) -> None:
        """`overlap=False` sends everything at once after the backward pass, so that only the link is timed."""
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


class Averager(Saved, Protocol):
    """Sends this rank's progress and returns the updates that all ranks make, in order; called in a separate thread."""

    def __call__(self, vector: Tensor, count: int, *, together: bool) -> list[Tensor]:
        """`count` steps were made; `together` says that parameters must be equal on all ranks afterwards.

        `vector` may be overwritten.
        """
        ...

    def leave(self) -> None:
        """Nothing more will be sent."""


class RoundedMean(Averager):
    """A mean over ranks in which every number travels in 16 bits, and no rounding error is lost.

    Each rank adds up one part of the vector in float32; parts travel there and back as bfloat16. Rounding errors are
    kept and added the next time, in both directions. The result is bitwise the same on every rank.
    """

    residuals = ("own", "part")

    def __init__(self, link: Link) -> None:
        self.link = link
        self.own: Tensor | None = None
        """Rounding errors of this rank's vector, [world, part]."""
        self.part: Tensor | None = None
        """Rounding errors of the part that this rank adds up."""

    def __call__(self, vector: Tensor, count: int, *, together: bool = True) -> list[Tensor]:
        """The mean, as the one update that all ranks make; `count` is the number of steps made, which must be equal."""
        del together  # ranks always are
        counts: list[int] = self.link.gather(torch.tensor([count])).flatten().tolist()
        if len(set(counts)) > 1:
            said = ", ".join(f"rank {rank}: {n}" for rank, n in enumerate(counts))
            raise RankError(
                f"Ranks disagree on the number of optimizer steps ({said}); every rank must make the same number of steps "
                "before parameters are averaged."
            )
        world = self.link.world
        sent, self.own = rounded(F.pad(vector, (0, -len(vector) % world)).view(world, -1), self.own)
        mean, self.part = rounded(self.link.shuffle(sent).mean(0, dtype=torch.float32), self.part)
        return [self.link.gather(mean).float().view(-1)[: len(vector)]]


def rounded(values: Tensor, error: Tensor | None) -> tuple[Tensor, Tensor]:
    """The values plus the previous rounding error as bfloat16, and the new rounding error, which takes the place of `values`.

    In place, since new memory costs more than the arithmetic.
    """
    whole = values if error is None else values.add_(error)
    sent = whole.to(torch.bfloat16)
    return sent, whole.sub_(sent)


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
