"""The modes by name: which exchange each is made of, and over which links."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from salience.gradients.exchange import Exchange, Whole
from salience.gradients.hybrid import Hybrid, Shard, make_shards
from salience.gradients.lazy import Lazy
from salience.gradients.link import Link, Notes
from salience.gradients.local import Averager
from salience.gradients.lowrank import LowRank
from salience.gradients.nodes import Grouped, GroupedAverager, Nodes, new_group
from salience.gradients.quorum import Quorum
from salience.gradients.rounding import RoundedMean
from salience.gradients.sparse import Sparse

STEP_AHEAD = ("local", "quorum")
"""Modes in which ranks take steps of their own between two exchanges."""


def _fp16(link: Link, **options: Any) -> Exchange:
    return Whole(link, torch.float16, **options)


def _bf16(link: Link, **options: Any) -> Exchange:
    return Whole(link, torch.bfloat16, **options)


def _kernels(link: Link, **options: Any) -> Exchange:
    return Sparse(link, kernels=True, **options)


MAKERS: dict[str, Callable[..., Exchange]] = {
    "allreduce": Whole, "fp16": _fp16, "bf16": _bf16, "topk": Sparse, "kernels": _kernels, "lowrank": LowRank, "lazy": Lazy,
}  # fmt: skip
"""Modes that exchange gradients in every step."""


class Links:
    """Every link of one model: that of DDP, one beside it, and those inside and across groups."""

    def __init__(self, group: Any, notes: Notes, deadline: float, groups: Sequence[Sequence[int]] | None) -> None:
        """Collective."""
        self.group, self.notes = group, notes
        self.main = Link(group, notes, deadline)
        self.nodes = None if groups is None else Nodes(group, groups, notes, deadline)
        self._aside: Link | None = None
        self.shards: list[Shard] = []
        """Links to helper ranks."""

    @property
    def aside(self) -> Link:
        """A process group of its own, since it is used beside the training. Collective when it is made."""
        if self._aside is None:
            apart = new_group(self.group, dist.get_process_group_ranks(self.group))
            self._aside = Link(apart, self.notes, self.main.deadline)
        return self._aside

    def meet(self, helpers: Sequence[int]) -> Sequence[Shard]:
        """The links to the helpers, made when they are first asked for. Collective, the helpers included."""
        workers = dist.get_process_group_ranks(self.group)
        self.shards = self.shards or make_shards(workers, helpers, self.notes, self.main.deadline)
        return self.shards

    def leave(self) -> None:
        """Tell the helpers that nothing more will come."""
        for shard in self.shards:
            shard.up.wait(shard.announce(0, torch.float32))
        self.shards = []

    @property
    def sent(self) -> float:
        nodes = [] if self.nodes is None else [self.nodes.inside, self.nodes.beside, self.nodes.across]
        links = (self.main, self._aside, *nodes, *(shard.up for shard in self.shards))
        return sum(link.sent for link in links if link is not None)


def make_exchange(
    links: Links, mode: str, options: Mapping[str, Any], *, seed: int = 0, device: torch.device | None = None
) -> Exchange:
    """The exchange of every step; where ranks take steps of their own, that inside a group. `device` is the model's."""
    nodes = links.nodes
    if mode == "hybrid":
        return Hybrid(links.main, links.meet(options["helpers"]), options["share"], device or torch.device("cpu"))
    if mode in STEP_AHEAD:
        return Whole(links.main if nodes is None else nodes.inside)
    given = {**options, "seed": seed} if mode == "lowrank" else dict(options)
    if nodes is None:
        return MAKERS[mode](links.main, **given)
    if MAKERS[mode] in (Whole, _fp16, _bf16):
        given["overlap"] = False  # between groups everything is sent at once: buckets belong to the exchange inside
    across = None if nodes.across is None else MAKERS[mode](nodes.across, **given)
    return Grouped(nodes, across, lossy=mode != "allreduce")


def make_averager(links: Links, mode: str, *, quorum: int | None = None, staleness: int = 0) -> Averager:
    """What averages parameters where ranks take steps of their own."""
    if links.nodes is not None:
        across = links.nodes.across
        return GroupedAverager(links.nodes, None if across is None else RoundedMean(across))
    if mode == "quorum":
        return Quorum(links.aside, quorum=quorum, staleness=staleness)
    return RoundedMean(links.aside)
