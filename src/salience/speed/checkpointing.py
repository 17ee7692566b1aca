"""Activation checkpointing under a budget of memory: some results are dropped after the forward pass and made again for the
backward pass (Chen et al. 2016; Checkmate, Jain et al. 2020).

A unit is a layer with weights and what follows it, or a block; a segment is some units in a row, of which only the
input is kept.

    kept for the backward pass   what units outside of segments keep + the inputs of segments + the largest segment made again

Of segments of 1, 2, 4, ... units, those are taken that fit and cost the fewest seconds to make again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

GROUPS = (1, 2, 4, 8, 16)
"""Numbers of units per segment that are tried."""
BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(frozen=True, slots=True)
class Unit:
    """Layers in a row: children of `parent`, by name."""

    parent: nn.Module
    names: tuple[str, ...]

    @property
    def modules(self) -> list[nn.Module]:
        return [self.parent.get_submodule(name) for name in self.names]


@dataclass(frozen=True, kw_only=True, slots=True)
class Account:
    """What units keep for the backward pass, in bytes, as a function of the batch: per sample, by storage."""

    kept: Mapping[int, float]
    """Storage -> bytes."""
    users: Mapping[int, frozenset[int]]
    """Storage -> the units that keep it; -1 = code outside of units."""
    inputs: Mapping[int, int]
    """Unit -> storage of its input."""
    seconds: tuple[float, ...]
    """Seconds of the forward pass of each unit."""

    @property
    def whole(self) -> float:
        """Bytes kept without checkpointing."""
        return sum(self.kept.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Segments:
    """Which units are made again, in segments, and what that keeps and costs."""

    groups: tuple[tuple[int, ...], ...]
    kept: float
    """Bytes kept for the backward pass at the most."""
    seconds: float
    """Seconds of the forward pass that are spent twice."""


def units_of(model: nn.Module) -> list[Unit]:
    """The units of a model, in the order of its definition."""
    if isinstance(model, nn.Sequential):
        found: list[Unit] = []
        for name, child in model.named_children():
            starts = _has_weights(child) and not isinstance(child, BATCH_NORM)
            if starts or not found:
                found.append(Unit(model, (name,)))
            else:
                found[-1] = Unit(model, (*found[-1].names, name))
        return found
    if isinstance(model, nn.ModuleList):
        return [Unit(model, (name,)) for name, _ in model.named_children()]
    nested: list[Unit] = []
    for name, child in model.named_children():
        if any(True for _ in child.children()):
            nested += units_of(child) or [Unit(model, (name,))]
    return nested


def _has_weights(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


# --- the rule ---


def choose_segments(account: Account, units: Sequence[Unit], budget: float) -> Segments | None:
    """The cheapest segments with which at most `budget` bytes are kept, none if nothing has to be dropped; None if none fit."""
    if account.whole <= budget:
        return Segments(groups=(), kept=account.whole, seconds=0.0)
    found: list[Segments] = []
    for size in GROUPS:
        for groups in _growing(grouped(units, size), account):
            outcome = outcome_of(account, groups)
            if outcome.kept <= budget:
                found.append(outcome)
                break
        if size >= len(units):
            break
    return min(found, key=lambda one: (one.seconds, one.kept), default=None)


def smallest_segments(account: Account, units: Sequence[Unit]) -> Segments:
    """The segments that keep least."""
    outcomes = [outcome_of(account, grouped(units, size)) for size in GROUPS]
    return min(outcomes, key=lambda one: one.kept)


def grouped(units: Sequence[Unit], size: int) -> list[tuple[int, ...]]:
    """Segments of `size` units of one parent each."""
    groups: list[tuple[int, ...]] = []
    for place, unit in enumerate(units):
        sequence = isinstance(unit.parent, nn.Sequential)
        joins = groups and sequence and units[groups[-1][-1]].parent is unit.parent and len(groups[-1]) < size
        if joins:
            groups[-1] = (*groups[-1], place)
        else:
            groups.append((place,))
    return groups


def outcome_of(account: Account, groups: Sequence[tuple[int, ...]]) -> Segments:
    """What is kept, and made again, with these segments."""
    place = {unit: at for at, group in enumerate(groups) for unit in group}
    inputs = {account.inputs[group[0]] for group in groups if group[0] in account.inputs}
    again = [0.0] * len(groups)
    kept = 0.0
    for storage, size in account.kept.items():
        where = {place.get(unit, -1) for unit in account.users[storage]}
        if -1 in where or storage in inputs:
            kept += size
        else:
            for one in where:
                again[one] += size
    kept += max(again, default=0.0)
    seconds = sum(account.seconds[unit] for unit in place)
    return Segments(groups=tuple(groups), kept=kept, seconds=seconds)


def _growing(groups: list[tuple[int, ...]], account: Account) -> Generator[list[tuple[int, ...]]]:
    """First the segment that frees most bytes per second alone, then with the next, and so on."""
    freed = [account.whole - outcome_of(account, [group]).kept for group in groups]
    alone = [sum(size for at, size in account.kept.items() if account.users[at] <= set(group)) for group in groups]
    cost = [sum(account.seconds[unit] for unit in group) + 1e-9 for group in groups]
    order = sorted(range(len(groups)), key=lambda at: -max(freed[at], alone[at]) / cost[at])
    for count in range(1, len(groups) + 1):
        yield [groups[at] for at in sorted(order[:count])]


# --- what is measured ---


@dataclass(slots=True)
class _Counting:
    """Storages that the backward pass will need, in the units that keep them."""

    skip: set[int]
    unit: int = -1
    size: dict[int, int] = field(default_factory=dict[int, int])
    users: dict[int, set[int]] = field(default_factory=dict[int, "set[int]"])
    alive: list[Any] = field(default_factory=list[Any])
    """Storages that were seen, so that none of their addresses is used again while we count."""

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key not in self.skip and storage.nbytes():
            self.size[key] = storage.nbytes()
            self.users.setdefault(key, set()).add(self.unit)
            self.alive.append(storage)
        return tensor


def measure(model: nn.Module, units: Sequence[Unit], inputs: Sequence[Any], more: Mapping[str, Any]) -> Account:
    """What one training step on these inputs keeps, and how long each unit takes; the model is left as it was."""
    counting = _Counting({p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())})
    seconds, came, begun = [0.0] * len(units), dict[int, int](), [0.0]

    def enter(at: int) -> Callable[..., None]:
        def hook(module: nn.Module, given: tuple[Any, ...]) -> None:
            counting.unit, begun[0] = at, time.perf_counter()
            for one in given[:1]:
                if isinstance(one, Tensor) and at not in came:
                    came[at] = one.untyped_storage().data_ptr()
                    counting.alive.append(one.untyped_storage())

        return hook

    def leave(at: int) -> Callable[..., None]:
        def hook(module: nn.Module, given: tuple[Any, ...], out: Any) -> None:
            counting.unit = -1
            seconds[at] += time.perf_counter() - begun[0]

        return hook

    with _as_it_was(model), contextlib.ExitStack() as hooks:
        for at, unit in enumerate(units):
            modules = unit.modules
            hooks.callback(modules[0].register_forward_pre_hook(enter(at)).remove)
            hooks.callback(modules[-1].register_forward_hook(leave(at)).remove)
        with saved_tensors_hooks(counting.pack, lambda tensor: tensor), torch.enable_grad():
            out = model(*inputs, **more)
        del out
    return Account(
        kept={key: float(size) for key, size in counting.size.items()},
        users={key: frozenset(users) for key, users in counting.users.items()}, inputs=came, seconds=tuple(seconds),
    )  # fmt: skip


def scaled(account: Account, factor: float) -> Account:
    """The account of a batch `factor` times as large: activations grow with it."""
    return Account(
        kept={key: size * factor for key, size in account.kept.items()}, users=account.users, inputs=account.inputs,
        seconds=tuple(one * factor for one in account.seconds),
    )  # fmt: skip


@contextlib.contextmanager
def _as_it_was(model: nn.Module) -> Generator[None]:
    """Buffers (statistics of batch norm) and random numbers are afterwards what they were."""
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)):
        yield
    with torch.no_grad():
        for buffer, value in kept:
            buffer.copy_(value)


# --- a forward pass with segments ---


class _Again(nn.Module):
    """Runs a segment and keeps only its input; attributes are those of its first layer."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        object.__setattr__(self, "_layers", tuple(layers))  # not as children: they belong to the model

    def forward(self, *inputs: Any, **more: Any) -> Any:
        layers: tuple[nn.Module, ...] = vars(self)["_layers"]

        def run(*inputs: Any, **more: Any) -> Any:
            out = layers[0](*inputs, **more)
            for layer in layers[1:]:
                out = layer(out)
            return out

        return checkpoint(run, *inputs, use_reentrant=False, context_fn=lambda: _contexts(layers), **more)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_layers"][0], name)


def _contexts(layers: Sequence[nn.Module]) -> tuple[Any, Any]:
    return contextlib.nullcontext(), _statistics_unchanged(layers)


@contextlib.contextmanager
def _statistics_unchanged(layers: Sequence[nn.Module]) -> Generator[None]:
    """Batch norm counts a batch once, although it is run twice."""
    norms = [one for layer in layers for one in layer.modules() if isinstance(one, BATCH_NORM)]
    before = [
        (one.momentum, None if one.num_batches_tracked is None else one.num_batches_tracked.clone()) for one in norms
    ]
    try:
        for one in norms:
            one.momentum = 0.0
        yield
    finally:
        for one, (momentum, count) in zip(norms, before, strict=True):
            one.momentum = momentum
            if count is not None and one.num_batches_tracked is not None:
                one.num_batches_tracked.copy_(count)


@contextlib.contextmanager
def segmented(units: Sequence[Unit], groups: Sequence[tuple[int, ...]]) -> Generator[None]:
    """Within, a call of the model runs these segments under checkpointing. Afterwards its modules are the user's own again."""
    own: list[tuple[nn.Module, str, nn.Module]] = []
    try:
        for group in groups:
            parent, names = units[group[0]].parent, [name for unit in group for name in units[unit].names]
            layers = [parent.get_submodule(name) for name in names]
            own += [(parent, name, layer) for name, layer in zip(names, layers, strict=True)]
            parent.register_module(names[0], _Again(layers))
            for name in names[1:]:
                parent.register_module(name, nn.Identity())
        yield
    finally:
        for parent, name, layer in own:
            parent.register_module(name, layer)
