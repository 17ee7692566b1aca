"""`hierarchical`: gradients are added up inside a node first, and only one rank of each node talks to the other nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from salience.gradients.exchange import Averager, Exchange, RoundedMean, join, split
from salience.gradients.link import Link, Notes

PIECE = 1 << 18
"""Number of values sent at once when whole gradients are added up in groups."""


class Nodes:
    """The links of a rank that is in a group: to the ranks of the group, and from its first rank to the other groups."""

    def __init__(self, parent: Any, groups: Sequence[Sequence[int]], notes: Notes, deadline: float) -> None:
        """`groups` are ranks of the default process group. Collective."""
        me = dist.get_rank()
        self.groups = [sorted(group) for group in groups]
        mine = next(group for group in self.groups if me in group)
        self.leads = mine[0] == me
        self.weight = len(mine) * len(self.groups) / sum(map(len, self.groups))
        """Factor on this group's mean that turns the mean over groups into the mean over ranks."""
        first = [group[0] for group in self.groups]
        everywhere = parent is dist.group.WORLD  # then all ranks make all groups
        made = {
            group[0]: (new_group(parent, group), new_group(parent, group))
            for group in self.groups
            if everywhere or me in group
        }
        inside, beside = made[mine[0]]
        across = new_group(parent, first)
        self.inside = Link(inside, notes, deadline)
        """The link to the ranks of this group, for gradients."""
        self.beside = Link(beside, notes, deadline)
        """A second link to them, for exchanges during the next steps: the two must not interfere."""
        self.across = Link(across, notes, deadline) if self.leads else None
        """The link to the first ranks of the other groups; None on all ranks except the first."""

    def mean(self, tensor: Tensor) -> Tensor:
        """Replace `tensor`, which is equal inside each group, by its mean over all ranks."""
        if self.across is not None:
            self.across.mean(tensor.mul_(self.weight))
        return self.beside.broadcast(tensor)

    def check_equal(self, digest: int) -> None:
        """Check that all groups have the same parameters."""
        if self.across is not None:
            self.across.check_equal(digest)


class Grouped(Exchange):
    """The mean inside a group at full precision, then `across` between the groups' first ranks, then the result to all."""

    def __init__(self, nodes: Nodes, across: Exchange | None, *, lossy: bool) -> None:
        """`across` is None on ranks that are not the first of their group."""
        self.nodes, self.across, self.lossy = nodes, across, lossy

    def finish(self, gradients: Sequence[Tensor]) -> None:
        if not self.lossy:
            flat = join(gradients)
            self._in_pieces(flat.split(PIECE))
            split(flat, gradients)
            return
        flat = join(gradients)
        self.nodes.inside.wait(self.nodes.inside.start_collect(flat))
        if self.across is not None:
            split(flat.mul_(self.nodes.weight), gradients)
            self.across.finish(gradients)
            flat = join(gradients)
        split(self.nodes.inside.broadcast(flat), gradients)

    def _in_pieces(self, pieces: Sequence[Tensor]) -> None:
        """Add up one piece inside the group while the previous one is between groups and another on its way back."""
        inside, across = self.nodes.inside, self.nodes.across
        crossing: list[Any] = []
        for piece, work in [(piece, inside.start_collect(piece)) for piece in pieces]:
            inside.wait(work)
            if across is not None:
                crossing.append(across.start_mean(piece.mul_(self.nodes.weight)))
        leaving: list[Any] = []
        for i, piece in enumerate(pieces):
            if across is not None:
                across.wait(crossing[i])
            leaving.append(inside.start_broadcast(piece))
        for work in leaving:
            inside.wait(work)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.across is None else self.across.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], *, residuals: bool = True) -> None:
        if self.across is not None and state:
            self.across.load_state_dict(state, residuals=residuals)


class GroupedAverager(Averager):
    """Averages parameters between the groups' first ranks; inside a group they are equal already."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes, self.across = nodes, None if nodes.across is None else RoundedMean(nodes.across)

    def __call__(self, vector: Tensor, count: int, *, together: bool = True) -> list[Tensor]:
        del together  # ranks always are
        (update,) = [vector.clone()] if self.across is None else self.across(vector * self.nodes.weight, count)
        return [self.nodes.beside.broadcast(update.contiguous())]

    def state_dict(self) -> dict[str, Any]:
        return {} if self.across is None else self.across.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], *, residuals: bool = True) -> None:
        if self.across is not None and state:
            self.across.load_state_dict(state, residuals=residuals)


def new_group(parent: Any, ranks: Sequence[int]) -> Any:
    """A process group of its own for some ranks of `parent`. Collective over `parent`.

    torch names a group that its members make alone after the number of groups that each of them has, and waits for ever where
    these differ. So a rank that is not among `ranks` makes one for itself, and all have as many.
    """
    if parent is dist.group.WORLD:
        return dist.new_group(list(ranks))
    me = dist.get_rank()
    return dist.new_group(list(ranks) if me in ranks else [me], use_local_synchronization=True)
