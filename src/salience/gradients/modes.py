"""The modes of `sync` by name: options, exchanges and links of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from salience.errors import ConfigError, did_you_mean
from salience.gradients.exchange import Exchange, RoundedMean, Whole
from salience.gradients.hybrid import Hybrid, Shard, make_shards
from salience.gradients.lazy import Lazy
from salience.gradients.link import Link, Notes
from salience.gradients.local import Local
from salience.gradients.lowrank import LowRank
from salience.gradients.nodes import Grouped, GroupedAverager, Nodes, new_group
from salience.gradients.quorum import Quorum
from salience.gradients.sparse import Sparse


class Option(NamedTuple):
    """An option of a mode."""

    default: Any
    """None also means that None may be given."""
    rule: str
    """The allowed values, in words."""
    allows: Callable[[Any], bool]


def _number(
    default: float | None, low: float, high: float, kinds: Any = (int, float), what: str = "a number"
) -> Option:
    def allows(value: Any) -> bool:
        return isinstance(value, kinds) and not isinstance(value, bool) and low <= value <= high

    return Option(default, f"{what} from {low:g} to {high:g}", allows)


def _whole(default: int | None, low: int, high: float) -> Option:
    return _number(default, low, high, int, "a whole number")


def _flag(default: bool) -> Option:
    return Option(default, "True or False", _is_flag)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_list(value: Any, of: Any = int) -> bool:
    return isinstance(value, (tuple, list)) and all(isinstance(one, of) for one in cast("Sequence[Any]", value))


def _is_pair(value: Any) -> bool:
    return _is_list(value, (int, float)) and len(value) == 2


class Mode(NamedTuple):
    """A mode: its options, and how to make its exchange over one link if gradients travel in every step."""

    options: Mapping[str, Option]
    make: Callable[..., Exchange] = Whole


_LOCAL = {
    "steps": _whole(8, 1, 1e9), "alpha": _number(None, 0.0, 1e6), "most": _whole(512, 1, 1e9), "overlap": _flag(True),
    "outer": Option(None, "a pair (learning rate, momentum), such as (0.7, 0.9)", _is_pair),
}  # fmt: skip
_SPARSE = {
    "rate": _number(0.01, 1e-6, 1.0), "momentum": _number(0.0, 0.0, 0.9999), "warmup": _whole(0, 0, 1e9),
    "small": _whole(1024, 0, 1e12),
}  # fmt: skip
_LAZY = {"threshold": _number(2.0, 0.0, 1e6), "tau": _whole(4, 1, 1e6), "small": _whole(1024, 0, 1e12)}
_HELPERS = Option(None, "a list of ranks, such as [2, 3]", _is_list)

MODES: dict[str, Mode] = {
    "auto": Mode({"lossy": _flag(True)}),
    "allreduce": Mode({}),
    "fp16": Mode({}, partial(Whole, dtype=torch.float16)),
    "bf16": Mode({}, partial(Whole, dtype=torch.bfloat16)),
    "topk": Mode(_SPARSE, partial(Sparse, kernels=False)),
    "kernels": Mode(_SPARSE, partial(Sparse, kernels=True)),
    "lowrank": Mode({"rank": _whole(2, 1, 256), "warmup": _whole(2, 0, 1e9)}, LowRank),
    "lazy": Mode(_LAZY, Lazy),
    "local": Mode(_LOCAL),
    "quorum": Mode({**_LOCAL, "quorum": _whole(None, 1, 1e6), "staleness": _whole(2, 0, 1e6)}),
    "hierarchical": Mode({}),
    "hybrid": Mode({"helpers": _HELPERS, "share": _number(None, 0.0, 1.0)}),
}
STEP_AHEAD = ("local", "quorum")
"""Modes in which ranks take steps of their own between two exchanges."""
WHOLE = ("allreduce", "fp16", "bf16")
"""Modes that send buckets as they are completed."""


def resolve(mode: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """All options of a mode: given ones checked, the others at their defaults."""
    if mode not in MODES:
        raise ConfigError(f"mode is {mode!r}, which sync() does not have.{did_you_mean(mode, MODES)}")
    known = MODES[mode].options
    for name, value in given.items():
        if name not in known:
            raise ConfigError(f"sync(mode={mode!r}) has no option {name!r}.{did_you_mean(name, known)}")
        if not known[name].allows(value) and not (value is None and known[name].default is None):
            raise ConfigError(f"{name} is {value!r}; it must be {known[name].rule}.")
    return {**{name: option.default for name, option in known.items()}, **given}


class Links:
    """All links of one model: that of DDP, a second one beside it, and those inside and across groups."""

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
        """A separate process group, since it is used in parallel with the training. Collective when it is created."""
        if self._aside is None:
            apart = new_group(self.group, dist.get_process_group_ranks(self.group))
            self._aside = Link(apart, self.notes, self.main.deadline)
        return self._aside

    def meet(self, helpers: Sequence[int]) -> Sequence[Shard]:
        """The links to the helpers, created on first use. Collective, including the helpers."""
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
        """Bytes that this rank has sent over all links."""
        nodes = [] if self.nodes is None else [self.nodes.inside, self.nodes.beside, self.nodes.across]
        links = (self.main, self._aside, *nodes, *(shard.up for shard in self.shards))
        return sum(link.sent for link in links if link is not None)


def make_exchange(
    links: Links, mode: str, options: Mapping[str, Any], ddp: DistributedDataParallel, optimizer: Optimizer, seed: int
) -> Exchange:
    """The exchange of a model's gradients, or parameters, in this mode. Collective."""
    nodes, given, make = links.nodes, dict(options), MODES[mode].make
    if mode == "hybrid":
        return Hybrid(links.main, links.meet(given["helpers"]), given["share"], next(ddp.parameters()).device)
    if mode in STEP_AHEAD:
        late = {name: given.pop(name) for name in ("quorum", "staleness") if name in given}
        if nodes is not None:  # a group steps together, and groups step apart
            return Local(ddp, optimizer, GroupedAverager(nodes), nodes, Whole(nodes.inside), silent=False, **given)
        averager = Quorum(links.aside, **late) if mode == "quorum" else RoundedMean(links.aside)
        return Local(ddp, optimizer, averager, links.aside, Whole(links.main), silent=True, **given)
    if mode == "lowrank":
        given["seed"] = seed
    if nodes is None:
        return make(links.main, **given)
    if mode in WHOLE:
        given["overlap"] = False  # between groups everything is sent at once: buckets belong to the exchange inside
    across = None if nodes.across is None else make(nodes.across, **given)
    return Grouped(nodes, across, lossy=mode != "allreduce")
