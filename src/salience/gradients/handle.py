"""`salience.sync`: chooses how the gradients of a DDP model travel, and the handle it returns."""

from __future__ import annotations

import logging
import os
import time
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
from salience.gradients.checks import check_groups, check_helpers, check_model, difference, fingerprint, refuse_sparse
from salience.gradients.exchange import Exchange, Whole
from salience.gradients.hook import Traffic, on_bucket
from salience.gradients.link import Notes
from salience.gradients.modes import Links, make_exchange, resolve
from salience.gradients.probe import near_groups, pair_seconds
from salience.ranks import Ranks
from salience.watch import Steps

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
    """Choose how the gradients of a `DistributedDataParallel` model travel. Collective: every rank makes the same call.

    `loader` is a `Loader` or `Selector`: what happens goes into its event log, and at the end of its windows parameters are
    made equal if ranks take steps of their own. `groups` = "node", "auto" (found by probing), or lists of ranks, adds
    gradients up inside a group first. `deadline` is how many seconds a rank waits for the others. docs/sync.md lists modes and
    options.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        handle = Handle(model, optimizer, loader, mode, resolve(mode, options))
        handle.tell(Warned(text="sync() does nothing in a single process: there is nobody to exchange gradients with."))
        return handle
    if mode == "hierarchical":
        mode, groups = "allreduce", groups or "node"
    ranks, trouble = Ranks(getattr(model, "process_group", None), deadline=deadline), ""
    wanted: dict[str, Any] = {}
    try:
        wanted = resolve(mode, options)
        _check(model, optimizer, mode, wanted, groups)
        if model not in _TRAFFIC:
            _register_hook(model)
    except ConfigError as cause:
        trouble = str(cause)
    mine: Any = {
        "trouble": trouble,
        "settings": fingerprint(model, mode, wanted, groups, loader),
        "key": os.urandom(8).hex(),
    }
    found = ranks.gather_objects(mine)
    said = next((f"{one['trouble']} (rank {rank})" for rank, one in enumerate(found) if one["trouble"]), None)
    said = said or difference([one["settings"] for one in found])
    if said:
        raise ConfigError(said)
    handle = Handle(model, optimizer, loader, "allreduce", {})
    handle.begin(ranks, found[0]["key"], groups)
    if mode == "auto":
        handle.auto = Chooser(handle, **wanted)
    else:
        handle.switch(mode, wanted)
    decay = max((float(group.get("weight_decay") or 0.0) for group in optimizer.param_groups), default=0.0)
    if wanted.get("momentum") and decay:
        handle.tell(Warned(text=(
            f"weight_decay={decay:g} joins gradients after their exchange, so it does not gather in the momentum of sync(): "
            f"divide it by 1 - {wanted['momentum']:g} for the effect it has in an optimizer with that momentum."
        )))  # fmt: skip
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
        self.auto: Chooser | None = None
        self._hooks: list[Any] = []
        self._first_step: list[Any] = []
        """Hooks that look at the gradients of the first step."""

    def begin(self, ranks: Ranks, key: str, groups: Groups) -> None:
        """Make the links, and hook into the optimizer and the loader."""
        self.ranks = ranks
        if isinstance(groups, str):
            groups = (_node_groups if groups == "node" else _near_groups)(self, ranks)
        self.notes = Notes(self.ddp.process_group, key)
        self.links = Links(self.ddp.process_group, self.notes, ranks.deadline, groups)
        self.traffic = _TRAFFIC[self.ddp]
        self.traffic.exchange = Whole(self.links.main)
        _ACTIVE.add(self.ddp)
        self._hooks = [
            self.optimizer.register_step_pre_hook(self.before_step),
            self.optimizer.register_step_post_hook(self.after_step),
        ]
        self._first_step = refuse_sparse(self.ddp.module, self.notes.leave)
        if hasattr(self.loader, "events"):
            self.loader.events.listen(self.on_event)

    # --- what a user calls ---

    def average(self) -> None:
        """Make parameters equal on all ranks now; does nothing in modes where they always are."""
        if self.ranks is not None:
            self.exchange.average()

    @property
    def exchange(self) -> Exchange:
        """The exchange in use."""
        return self.traffic.exchange

    @property
    def sent(self) -> float:
        """Bytes this rank has sent so far, by the arithmetic of a ring."""
        return 0.0 if self.ranks is None else self.links.sent

    def state_dict(self) -> dict[str, Any]:
        """What this rank needs to continue. Save the model after calling it, since parameters may be averaged here."""
        if self.ranks is None:
            return {"mode": self.mode, **self._place}
        inner = self.exchange.state_dict()  # averages parameters, so it comes first
        chooser = None if self.auto is None else self.auto.state_dict()
        return {"mode": self.mode, "options": self.options, **self._place, "inner": inner, "auto": chooser}

    @property
    def _place(self) -> dict[str, Any]:
        """What residuals belong to."""
        if self.ranks is None:
            return {"world": 1, "rank": 0, "groups": None}
        groups = None if self.links.nodes is None else self.links.nodes.groups
        return {"world": self.ranks.world, "rank": self.ranks.rank, "groups": groups}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state, after that of the model was loaded.

        If the number of ranks or the groups have changed, residuals are dropped, and the event log says so.
        """
        ranks = self.ranks
        if ranks is None or state["world"] == 1:
            if ranks is not None:
                self.exchange.restart()
            if state["world"] != self._place["world"]:
                self._tell_dropped(state)
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
        # On all ranks, or on none: what has stayed behind here must fit what did elsewhere.
        same = all(ranks.gather_objects(all(state.get(name) == now for name, now in self._place.items())))
        self.exchange.load_state_dict(state["inner"], residuals=same)
        if not same:
            self._tell_dropped(state)

    def _tell_dropped(self, state: Mapping[str, Any]) -> None:
        if not state.get("inner"):
            return  # nothing stays behind in this mode
        before, now = (
            f"rank {one['rank']} of {one['world']}" + (f" in the groups {one['groups']}" if one.get("groups") else "")
            for one in (state, self._place)
        )
        self.tell(Warned(text=(
            f"The state was saved by {before} and is loaded by {now}: gradients that had stayed behind (residuals) are dropped."
        )))  # fmt: skip

    def close(self) -> None:
        """Return to plain all-reduce; parameters are equal on all ranks afterwards."""
        if self.ranks is not None and self.mode != "closed":
            self.switch("allreduce", {})
            self.links.leave()
            for hook in [*self._hooks, *self._first_step]:
                hook.remove()
            self.auto, self.mode = None, "closed"
            _ACTIVE.discard(self.ddp)

    # --- what the chooser calls ---

    def switch(self, mode: str, options: Mapping[str, Any], exchange: Exchange | None = None) -> None:
        """Leave the current mode, with equal parameters, for another one or for an earlier `exchange`."""
        self.exchange.leave()
        self.mode, self.options = mode, dict(options)
        seed = int(getattr(self.loader, "seed", 0))
        self.traffic.exchange = exchange or make_exchange(self.links, mode, options, self.ddp, self.optimizer, seed)

    def tell(self, data: EventData) -> None:
        """Write to the event log, or to the program's log if there is no loader."""
        events = getattr(self.loader, "events", None)
        if events is not None:
            events.emit(data)
        elif self.ranks is None or self.ranks.rank == 0:
            logging.getLogger("salience").info(getattr(data, "text", None) or str(data))

    # --- around the optimizer's step ---

    def before_step(self, *_: Any) -> None:
        """Make sure that gradients have travelled, since the other ranks wait for them."""
        if self.ranks is None or self.exchange.silent or (self.traffic.passes and not self.traffic.open):
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
        while self._first_step:
            self._first_step.pop().remove()
        begin = time.perf_counter()
        self.exchange.stepped()
        if self.auto is not None:
            self.auto.step()
        waited, self.traffic.seconds = self.traffic.seconds + time.perf_counter() - begin, 0.0
        if isinstance(steps := getattr(self.loader, "steps", None), Steps):
            steps.synced(waited, trying=self.auto is not None and self.auto.trying)

    def on_event(self, event: Event) -> None:
        """Make parameters equal at the end of a window, so that a single model is evaluated."""
        if event.kind == "window" and self.mode != "closed":
            self.average()
        if self.auto is not None:
            self.auto.on_event(event)


_ACTIVE: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Models whose gradients a handle exchanges."""
_TRAFFIC: weakref.WeakKeyDictionary[nn.Module, Traffic] = weakref.WeakKeyDictionary()
"""DDP takes one hook for life: a model that was closed is used again with the same hook."""


def _check(model: nn.Module, optimizer: Optimizer, mode: str, options: Mapping[str, Any], groups: Groups) -> None:
    """Refuse what this rank can recognise as wrong without the others."""
    check_model(model, optimizer, mode, options)
    if model in _ACTIVE:
        raise ConfigError("sync() was called twice for one model; call close() of the first handle before.")
    members = dist.get_process_group_ranks(cast("Any", model).process_group)
    if isinstance(groups, str) and groups not in ("node", "auto"):
        raise ConfigError(
            f'groups is {groups!r}; it must be "node", "auto" or lists of ranks, such as [[0, 1], [2, 3]].'
        )
    if groups is not None and not isinstance(groups, str):
        check_groups(groups, members)
    if mode == "hybrid" and groups is not None:
        raise ConfigError(f"groups={groups!r} cannot be combined with sync(mode='hybrid'); leave one of them out.")
    if mode == "hybrid":
        check_helpers(options["helpers"], members)


def _register_hook(model: nn.Module) -> None:
    """Register the communication hook, through which all gradients of the model pass from now on."""
    ddp = cast("DistributedDataParallel", model)
    traffic = Traffic(ddp)
    try:
        ddp.register_comm_hook(traffic, on_bucket)
    except RuntimeError as cause:
        raise ConfigError(
            "The model already has a communication hook, and DDP takes one only; leave out register_comm_hook()."
        ) from cause
    _TRAFFIC[model] = traffic


def _node_groups(handle: Handle, ranks: Ranks) -> list[list[int]]:
    """The ranks of each node, as ranks of the default process group."""
    found: dict[int, list[int]] = {}
    group: Any = handle.ddp.process_group
    for rank, leader in enumerate(ranks.gather_objects(ranks.node_leader)):
        found.setdefault(leader, []).append(dist.get_global_rank(group, rank))
    return list(found.values())


def _near_groups(handle: Handle, ranks: Ranks) -> list[list[int]] | None:
    """Groups of ranks that are near each other, as ranks of the default process group; None if there are none."""
    group: Any = handle.ddp.process_group
    found = near_groups(pair_seconds(group, ranks.deadline))
    named = None if found is None else [[dist.get_global_rank(group, rank) for rank in one] for one in found]
    handle.tell(Warned(text=(
        f'groups="auto" found {named or "no groups"} by timing messages between all ranks.'
    )))  # fmt: skip
    return named
