"""What `sync` refuses: models and groups it cannot work with, and ranks that were given different settings."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from salience._version import __version__
from salience.errors import ConfigError

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Types of parameters that can be exchanged."""


def check_model(model: nn.Module, optimizer: Optimizer, mode: str, options: Mapping[str, Any]) -> None:
    """Check what a rank can see of its model and optimizer without the others."""
    if not isinstance(model, DistributedDataParallel):
        raise ConfigError(
            f"The model is a {type(model).__name__}, not wrapped in DistributedDataParallel; pass the wrapped one: "
            "salience.sync(DistributedDataParallel(model), optimizer, loader)."
        )
    for name, parameter in model.module.named_parameters():
        if parameter.requires_grad and parameter.dtype not in DTYPES:
            raise ConfigError(
                f"Parameter {name!r} has the type {parameter.dtype}; gradients that sync() exchanges must be float32, "
                "float16 or bfloat16."
            )
    for name, module in model.module.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise ConfigError(
                f"{name!r} has sparse gradients, which sync() cannot exchange; make it with sparse=False."
            )
    if options.get("momentum") and any(map(_has_momentum, optimizer.param_groups)):
        raise ConfigError(
            f"momentum is {options['momentum']:g} in sync(mode={mode!r}) and the optimizer has momentum too; it would count "
            "twice. Set the optimizer's to 0, or leave this one out."
        )


def refuse_sparse(model: nn.Module, leave: Callable[[str], None]) -> list[Any]:
    """Look at each gradient before DistributedDataParallel does, which cannot name it; returns hooks for the first step."""

    def look(name: str, gradient: Tensor) -> None:
        if gradient.is_sparse:
            said = f"The gradient of {name!r} is sparse, which sync() cannot exchange; make it dense (sparse=False)."
            leave(said)
            raise ConfigError(said)

    return [p.register_hook(partial(look, name)) for name, p in model.named_parameters() if p.requires_grad]


def _has_momentum(group: Mapping[str, Any]) -> bool:
    return bool(group.get("momentum") or (group.get("betas") or (0.0,))[0])


def check_groups(groups: Sequence[Sequence[int]], ranks: Sequence[int]) -> None:
    """Every rank must be in exactly one group."""
    members = sorted(rank for group in groups for rank in group)
    if members != sorted(ranks) or not all(groups):
        raise ConfigError(
            f"groups={groups!r} must hold each of the ranks {list(ranks)} exactly once, and no empty group."
        )


def check_helpers(helpers: Any, workers: Sequence[int]) -> None:
    """Every rank of the default process group trains or helps."""
    if not helpers or sorted([*helpers, *workers]) != list(range(dist.get_world_size())):
        raise ConfigError(
            f"helpers={helpers!r} must name all ranks of the default process group that do not train, each once; the model's "
            f"process group has the ranks {list(workers)} of {dist.get_world_size()}. Wrap the model with process_group= the "
            "workers."
        )


def fingerprint(model: nn.Module, mode: str, options: Mapping[str, Any], groups: Any, loader: Any) -> dict[str, Any]:
    """What must be equal on all ranks, by the name a user would look for."""
    shapes = [(tuple(p.shape), str(p.dtype), p.requires_grad) for p in model.parameters()]
    return {
        "version of salience": __version__,
        "mode": mode,
        "options": {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()},
        "groups": groups,
        "shapes of parameters": zlib.crc32(repr(shapes).encode()),
        "size of the data set": getattr(loader, "n", None),
        "seed": getattr(loader, "seed", None),
    }


def difference(prints: Sequence[Mapping[str, Any]]) -> str | None:
    """A sentence about the first thing that ranks disagree on, or None."""
    for name in prints[0]:
        for rank, one in enumerate(prints):
            if one.get(name) != prints[0][name]:
                return (
                    f"Ranks were given different settings for sync(): {name} is {prints[0][name]!r} on rank 0 and "
                    f"{one.get(name)!r} on rank {rank}; they must be equal on all ranks."
                )
    return None
