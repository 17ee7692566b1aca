"""How the model and optimizer of a run are divided among ranks. A checkpoint always contains both as a whole.

    --zero 0   DistributedDataParallel: everything on every rank
    --zero 1   the optimizer's state is divided (ZeroRedundancyOptimizer)
    --zero 2   gradients too (FSDP2, parameters stay gathered between forward and backward pass)
    --zero 3   parameters too

So a run may be resumed with another --zero and another number of ranks.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from salience.app import checkpoint, models
from salience.config import TrainConfig
from salience.errors import ConfigError, StateError
from salience.gradients import sync
from salience.gradients.handle import Handle
from salience.gradients.modes import STEP_AHEAD, resolve
from salience.loader import Loader
from salience.ranks import Ranks

MOMENTUM = 0.9
APART = (*STEP_AHEAD, "auto")
"""Modes of sync in which the ranks' parameters may differ between two exchanges."""


def check(config: TrainConfig) -> None:
    """Raise ConfigError if options for several ranks cannot be combined."""
    if config.zero > 3:
        raise ConfigError(
            f"train.zero is {config.zero}; it must be 0 (nothing divided), 1 (optimizer state), 2 (gradients) or 3 "
            "(parameters)."
        )
    if not config.sync:
        return
    resolve(config.sync, {})
    if config.zero >= 2:
        raise ConfigError(
            f"--zero {config.zero} leaves the exchange of gradients to FSDP2, so --sync {config.sync} has nothing to do; use "
            "--sync with --zero 0 or 1, or leave it out."
        )
    if config.zero and config.sync in APART:
        raise ConfigError(
            f"With --sync {config.sync} ranks may take steps of their own, and with --zero 1 each updates a part of the "
            "parameters for all; use --zero 0, or a mode that exchanges gradients in every step, such as --sync bf16."
        )


def useless(config: TrainConfig) -> str:
    """A sentence that names the options ignored in a single process; empty if there are none."""
    named = [
        ("--balance", config.balance),
        (f"--sync {config.sync}", config.sync),
        (f"--zero {config.zero}", config.zero),
    ]
    given = [name for name, on in named if on]
    if not given:
        return ""
    return (
        f"{' and '.join(given)} {'does' if len(given) == 1 else 'do'} nothing in a single process; start several ranks with "
        "torchrun --nproc-per-node 2 -m salience train ..."
    )


@contextmanager
def first_rank_writes(folder: Path, ranks: Ranks | None) -> Generator[None]:
    """Only rank 0 writes to the folder and reports progress."""
    if ranks is None or ranks.rank == 0:
        with checkpoint.claimed(folder):
            yield
        return
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
        yield


class Parallel:
    """This rank's part of a run's model and optimizer. Every method is collective."""

    def __init__(self, model: nn.Module, config: TrainConfig, ranks: Ranks | None, device: torch.device) -> None:
        self.model, self.ranks = model, ranks
        self.zero = 0 if ranks is None else config.zero
        self.trained: nn.Module = model
        """What a training step calls: the model, or DDP around it."""
        if ranks is not None and self.sharded:
            _shard(model, device, ranks.world, gathered=self.zero == 2)
        elif ranks is not None:
            self.trained = DistributedDataParallel(model)
        self.optimizer = _sgd(model, config, divided=self.zero == 1)
        self.handle: Handle | None = None

    @property
    def sharded(self) -> bool:
        """True if every forward pass is a collective call."""
        return self.zero >= 2

    def sync(self, mode: str, loader: Loader[Any]) -> None:
        """Exchange gradients by a mode of `salience.sync` from now on."""
        self.handle = sync(self.trained, self.optimizer, loader, mode)

    # --- state ---

    def own_state(self) -> dict[str, Any] | None:
        """What only this rank knows, or None. Call it first, since parameters may be averaged here."""
        if self.handle is None or self.ranks is None:
            return None
        state: dict[str, Any] = {"sync": self.handle.state_dict()}
        if self.ranks.rank and self.handle.mode in STEP_AHEAD:  # rank 0's is in the checkpoint anyway
            state["optimizer"] = self.optimizer.state_dict()
        return state

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Load what `own_state` returned, or that of rank 0 if it is lost. Call it after `load_model` and `load_optimizer`."""
        if self.handle is None:
            return
        if "optimizer" in state:
            self.optimizer.load_state_dict(state["optimizer"])
        self.handle.load_state_dict(state["sync"])

    def model_state(self) -> dict[str, Any]:
        """State of the whole model, on every rank."""
        return {name: _whole(value) for name, value in self.model.state_dict().items()}

    def load_model(self, state: Mapping[str, Any], name: str) -> None:
        """Load this rank's part of the state of a whole model; `name` is the user's name for the model."""
        here = self.model.state_dict()
        try:
            if self.sharded and state.keys() == here.keys():
                state = {key: _part_of(value, here[key]) for key, value in state.items()}
            self.model.load_state_dict(state)
        except RuntimeError as cause:
            raise StateError(
                f"Model {name!r} has other parameters than the checkpoint; resume with the code it was made "
                f"with. {str(cause).partition(chr(10))[0]}"
            ) from cause

    def optimizer_state(self) -> dict[str, Any]:
        """State of the whole optimizer, in the form of SGD in a single process; with `--zero 1` only on rank 0."""
        if self.zero == 1:
            cast("Any", self.optimizer).consolidate_state_dict(to=0)
            if self.ranks is not None and self.ranks.rank:
                return {}
        state = self.optimizer.state_dict()
        return {**state, "state": {i: {n: _whole(v) for n, v in one.items()} for i, one in state["state"].items()}}

    def load_optimizer(self, state: Mapping[str, Any]) -> None:
        """Load this rank's part of the state of a whole optimizer."""
        if self.sharded:
            parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
            mine = {i: {n: _part_of(v, parameters[i]) for n, v in one.items()} for i, one in state["state"].items()}
            state = {**state, "state": mine}
        self.optimizer.load_state_dict(dict(state))


def _sgd(model: nn.Module, config: TrainConfig, *, divided: bool) -> Optimizer:
    groups = models.decayed(model, config.weight_decay)
    options: dict[str, Any] = {"lr": config.lr, "momentum": MOMENTUM, "nesterov": True}
    if not divided:
        return SGD(groups, **options)
    with warnings.catch_warnings():  # torch's own use of torch.jit.script
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer(cast("Any", groups), SGD, **options)


def _shard(model: nn.Module, device: torch.device, world: int, *, gathered: bool) -> None:
    """Divide parameters, gradients and optimizer state by FSDP2, child by child, so that communication overlaps."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (world,))
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()  # fully_shard takes no other layout
    lists = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
    for child in model.children():
        if any(True for _ in child.parameters()) and not isinstance(child, lists):
            fully_shard(child, mesh=mesh, reshard_after_forward=not gathered)
    fully_shard(model, mesh=mesh, reshard_after_forward=not gathered)


def _whole(value: Any) -> Any:
    """A tensor that is divided among the ranks, as a whole."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _part_of(value: Any, like: Any) -> Any:
    """This rank's part of a whole tensor, divided like `like`."""
    if not hasattr(like, "device_mesh") or not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
