"""`salience.sync`: chooses how the gradients of a DDP model travel, and the handle it returns."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from salience.errors import ConfigError, RankError, StateError
from salience.events import Event, EventData, Warned
from salience.gradients.auto import Chooser
from salience.gradients.exchange import Exchange, Whole
from salience.gradients.hook import Traffic, on_bucket
from salience.gradients.link import Notes
from salience.gradients.local import Local
from salience.gradients.modes import STEP_AHEAD, Links, make_averager, make_exchange
from salience.gradients.nodes import check_groups
from salience.gradients.options import check_model, difference, fingerprint, resolve
from salience.ranks import Ranks

Groups = Sequence[Sequence[int]] | str | None


def sync(
    model: nn.Module,
    optimizer: Optimizer,
    loader: Any = None,
    mode: str = "auto",
    *,
    groups: Groups = None,
    deadline: float | None = None,
    **options: Any,
) -> Handle:
    """Choose how the gradients of a `DistributedDataParallel` model travel. Collective: every rank calls it alike.

    `loader` is a `Loader` or `Selector`, whose event log is told what happens, and at the end of whose windows parameters are
    made equal where ranks take steps of their own. `groups` = "node", or lists of ranks, adds gradients up inside a group
    first. `deadline` is how many seconds a rank waits for the others. docs/sync.md lists modes and options.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        handle = Handle(model, optimizer, loader, mode, resolve(mode, options))
        handle.tell(Warned(text="sync() does nothing in a single process: there is nobody to exchange gradients with."))
        return handle
    ranks, trouble = Ranks(getattr(model, "process_group", None), deadline=deadline), ""
    if mode == "hierarchical":
        mode, groups = "allreduce", groups or "node"
    wanted: dict[str, Any] = {}
    try:
        wanted = resolve(mode, options)
        check_model(model, optimizer, mode, wanted)
        if model in _ACTIVE:
            raise ConfigError("sync() was called twice for one model; call close() of the first handle before.")
        if groups is not None and groups != "node":
            check_groups(cast("Any", groups), dist.get_process_group_ranks(cast("Any", model).process_group))
        if model not in _TRAFFIC:
            _take(model)
    except ConfigError as cause:
        trouble = str(cause)
    mine: Any = {"trouble": trouble, "settings": fingerprint(model, mode, wanted, groups, loader), "key": id(model)}
    found = ranks.gather_objects(mine)
    said = next((f"{one['trouble']} (rank {rank})" for rank, one in enumerate(found) if one["trouble"]), None)
    said = said or difference([one["settings"] for one in found])
    if said:
        raise ConfigError(said)
    handle = Handle(model, optimizer, loader, "allreduce", {})
    lists = _node_groups(ranks, handle.ddp.process_group) if isinstance(groups, str) else groups
    handle.begin(ranks, str(found[0]["key"]), lists)
    handle.use(mode, wanted)
    return handle


class Handle:
    """The exchange of one model's gradients. All of its methods are collective."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, loader: Any, mode: str, options: Mapping[str, Any]
    ) -> None:
        self.mode, self.options = mode, dict(options)
        """The mode in use, and its options."""
        self.ddp, self.optimizer, self.loader = cast("DistributedDataParallel", model), optimizer, loader
        self.ranks: Ranks | None = None
        """None in a single process, where nothing happens."""
        self.local: Local | None = None
        self.auto: Chooser | None = None
        self._hooks: list[Any] = []

    def begin(self, ranks: Ranks, key: str, groups: Sequence[Sequence[int]] | None) -> None:
        """Make the links, and hook into the optimizer and the loader."""
        self.ranks = ranks
        self.notes = Notes(self.ddp.process_group, key)
        self.links = Links(self.ddp.process_group, self.notes, ranks.deadline, groups)
        self.traffic = _TRAFFIC[self.ddp]
        self.traffic.exchange = Whole(self.links.main)
        _ACTIVE.add(self.ddp)
        self._hooks = [
            self.optimizer.register_step_pre_hook(self.before_step),
            self.optimizer.register_step_post_hook(self.after_step),
        ]
        if hasattr(self.loader, "events"):
            self.loader.events.listen(self.on_event)

    # --- what a user calls ---

    def average(self) -> None:
        """Make parameters equal on all ranks now; does nothing in modes where they always are."""
        if self.local is not None:
            self.local.average()

    @property
    def sent(self) -> float:
        """Bytes this rank has sent so far, by the arithmetic of a ring."""
        return 0.0 if self.ranks is None else self.links.sent

    def state_dict(self) -> dict[str, Any]:
        """What this rank needs to go on; save the model after calling it, since parameters may be averaged here."""
        if self.ranks is None:
            return {"mode": self.mode, "world": 1, "rank": 0}
        inner = self.local.state_dict() if self.local is not None else self.traffic.exchange.state_dict()
        chooser = None if self.auto is None else self.auto.state_dict()
        return {
            "mode": self.mode, "options": self.options, "world": self.ranks.world, "rank": self.ranks.rank, "inner": inner,
            "auto": chooser,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state, after that of the model was loaded.

        Where the number of ranks has changed, what had stayed behind is dropped, and the event log says so.
        """
        if self.ranks is None:
            return
        if self.auto is not None and state.get("auto") is not None:
            self.auto.load_state_dict(state["auto"])
            if not self.auto.adopted:
                return  # nothing was decided yet
            self.switch(state["mode"], state["options"])
        elif state["mode"] != self.mode:
            raise StateError(
                f"The state is of sync(mode={state['mode']!r}), this run uses {self.mode!r}; use the same mode."
            )
        same = (state["world"], state["rank"]) == (self.ranks.world, self.ranks.rank)
        if self.local is not None:
            self.local.load_state_dict(state["inner"], residuals=same)
        elif same:
            self.traffic.exchange.load_state_dict(state["inner"])
        if not same:
            self.tell(Warned(text=(
                f"The state was saved by rank {state['rank']} of {state['world']} and is loaded by rank {self.ranks.rank} of "
                f"{self.ranks.world}: gradients that had stayed behind (residuals) are dropped."
            )))  # fmt: skip

    def close(self) -> None:
        """Go back to plain all-reduce; parameters are equal on all ranks afterwards."""
        if self.ranks is not None and self.mode != "closed":
            self.switch("allreduce", {})
            for hook in self._hooks:
                hook.remove()
            self.auto, self.mode = None, "closed"
            _ACTIVE.discard(self.ddp)

    # --- what the chooser calls ---

    def use(self, mode: str, options: Mapping[str, Any]) -> None:
        """Exchange gradients in `mode` from the next step on."""
        if mode == "auto":
            self.auto = Chooser(self, **options)
        else:
            self.switch(mode, options)

    def switch(self, mode: str, options: Mapping[str, Any], exchange: Exchange | None = None) -> None:
        """Leave the present mode, parameters equal, and take up another, or go on with an `exchange` of before."""
        if self.local is not None:
            self.local.leave()
            self.local = None
        self.mode, self.options = mode, dict(options)
        seed = int(getattr(self.loader, "seed", 0))
        self.traffic.exchange = exchange or make_exchange(self.links, mode, options, seed=seed)
        if mode in STEP_AHEAD:
            mine = dict(options)
            late = {name: mine.pop(name) for name in ("quorum", "staleness") if name in mine}
            averager = make_averager(self.links, mode, **late)
            self.local = Local(self.ddp, self.optimizer, averager, quiet=self.links.nodes is None, **mine)

    def tell(self, data: EventData) -> None:
        """Into the event log, or the program's log where there is no loader."""
        events = getattr(self.loader, "events", None)
        if events is not None:
            events.emit(data)
        elif self.ranks is None or self.ranks.rank == 0:
            logging.getLogger("salience").info(getattr(data, "text", None) or str(data))

    # --- around the optimizer's step ---

    def before_step(self, *_: Any) -> None:
        """Gradients must have travelled, or the other ranks wait for them."""
        quiet = self.local is not None and self.links.nodes is None
        if quiet or (self.traffic.passes and not self.traffic.open) or self.ranks is None:
            return
        said = (
            f"Rank {self.ranks.rank} came to optimizer.step() without all its gradients: a parameter took no part in its "
            "loss, or no_sync() was on. Use DistributedDataParallel(..., find_unused_parameters=True), or give every rank "
            "a synchronised backward pass per step."
        )
        self.notes.leave(said)
        raise RankError(said)

    def after_step(self, *_: Any) -> None:
        self.traffic.reset()
        if self.local is not None:
            self.local.step()
        if self.auto is not None:
            self.auto.step()

    def on_event(self, event: Event) -> None:
        """Windows end with equal parameters, so that what is evaluated is one model."""
        if event.kind == "window" and self.mode != "closed":
            self.average()
        if self.auto is not None:
            self.auto.on_event(event)


_ACTIVE: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Models whose gradients a handle exchanges."""
_TRAFFIC: weakref.WeakKeyDictionary[nn.Module, Traffic] = weakref.WeakKeyDictionary()
"""DDP takes one hook for life: a model that was closed is taken up again with the same one."""


def _take(model: nn.Module) -> None:
    ddp = cast("DistributedDataParallel", model)
    traffic = Traffic(ddp)
    try:
        ddp.register_comm_hook(traffic, on_bucket)
    except RuntimeError as cause:
        raise ConfigError(
            "The model already has a communication hook, and DDP takes one only; leave out register_comm_hook()."
        ) from cause
    _TRAFFIC[model] = traffic


def _node_groups(ranks: Ranks, group: Any) -> list[list[int]]:
    """The ranks of each node, as ranks of the default process group."""
    found: dict[int, list[int]] = {}
    for rank, leader in enumerate(ranks.gather_objects(ranks.node_leader)):
        found.setdefault(leader, []).append(dist.get_global_rank(group, rank))
    return list(found.values())
