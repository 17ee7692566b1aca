"""A mean over ranks in which every number travels in 16 bits, and no rounding error is lost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from salience.errors import RankError
from salience.gradients.exchange import Averager
from salience.gradients.link import Link


class RoundedMean(Averager):
    """Each rank adds up one part of the vector in float32; parts travel there and back as bfloat16.

    What rounding takes off is kept and added the next time, on both ways. The result is bitwise the same on every rank.
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        self.own: Tensor | None = None
        """Rounding errors of this rank's vector, [world, part]."""
        self.part: Tensor | None = None
        """Rounding errors of the part that this rank adds up."""

    def __call__(self, vector: Tensor, count: int, *, together: bool = True) -> list[Tensor]:
        """The mean, as the one update that all ranks make; `count` is the number of steps made, which must be equal."""
        del together  # ranks always are
        self._check(count)
        world = self.link.world
        rows = F.pad(vector, (0, -len(vector) % world)).view(world, -1)
        rows = rows if self.own is None else rows + self.own
        sent = rows.to(torch.bfloat16)
        self.own = rows - sent.float()
        mean = self.link.shuffle(sent).float().mean(0)
        mean = mean if self.part is None else mean + self.part
        rounded = mean.to(torch.bfloat16)
        self.part = mean - rounded.float()
        return [self.link.gather(rounded).float().view(-1)[: len(vector)]]

    def _check(self, count: int) -> None:
        counts: list[int] = self.link.gather(torch.tensor([count])).flatten().tolist()
        if len(set(counts)) > 1:
            said = ", ".join(f"rank {rank}: {n}" for rank, n in enumerate(counts))
            raise RankError(
                f"Ranks disagree on the number of optimizer steps ({said}); every rank must make the same number of steps "
                "before parameters are averaged."
            )

    def state_dict(self) -> dict[str, Any]:
        return {"own": self.own, "part": self.part}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.own, self.part = state["own"], state["part"]
