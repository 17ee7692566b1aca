"""The modes of `sync`, their options and their limits, and the check that all ranks were given the same."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from salience._version import __version__
from salience.errors import ConfigError, did_you_mean

LOCAL: dict[str, Any] = {"steps": 8, "alpha": None, "most": 512, "overlap": True, "outer": None}
SPARSE: dict[str, Any] = {"rate": 0.01, "momentum": 0.0, "warmup": 0, "small": 1024}
MODES: dict[str, dict[str, Any]] = {
    "auto": {"lossy": True},
    "allreduce": {},
    "fp16": {},
    "bf16": {},
    "topk": SPARSE,
    "kernels": SPARSE,
    "lowrank": {"rank": 2, "warmup": 2},
    "lazy": {"threshold": 2.0, "tau": 4, "small": 1024},
    "local": LOCAL,
    "quorum": {**LOCAL, "quorum": None, "staleness": 2},
    "hierarchical": {},
    "hybrid": {"helpers": None, "share": None},
}
"""Every mode with its options and their defaults."""

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Types of parameters whose gradients can travel."""

_RANGES: dict[str, tuple[float, float]] = {
    "rate": (1e-6, 1.0), "momentum": (0.0, 0.9999), "warmup": (0, 1e9), "small": (0, 1e12), "rank": (1, 256),
    "threshold": (0.0, 1e6), "tau": (1, 1e6), "steps": (1, 1e9), "alpha": (0.0, 1e6), "most": (1, 1e9),
    "quorum": (1, 1e6), "staleness": (0, 1e6), "share": (0.0, 1.0),
}  # fmt: skip
_FLAGS = ("overlap", "lossy")
_REAL = ("rate", "momentum", "threshold", "alpha", "share")


def resolve(mode: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """All options of a mode, those given checked, the others at their defaults."""
    if mode not in MODES:
        raise ConfigError(f"mode is {mode!r}, which sync() does not have.{did_you_mean(mode, MODES)}")
    known = MODES[mode]
    for name, value in given.items():
        if name not in known:
            raise ConfigError(f"sync(mode={mode!r}) has no option {name!r}.{did_you_mean(name, known)}")
        if not _allowed(name, value) and not (value is None and known[name] is None):
            raise ConfigError(f"{name} is {value!r}; {_rule(name)}.")
    return {**known, **given}


def _allowed(name: str, value: Any) -> bool:
    if name in _FLAGS:
        return isinstance(value, bool)
    if name == "outer":
        pair: Any = value
        return isinstance(pair, (tuple, list)) and len(pair) == 2 and all(isinstance(x, (int, float)) for x in pair)
    if name == "helpers":
        ranks: Any = value
        return isinstance(ranks, (tuple, list)) and all(isinstance(rank, int) for rank in ranks)
    low, high = _RANGES[name]
    number = isinstance(value, (int, float) if name in _REAL else int) and not isinstance(value, bool)
    return number and low <= value <= high


def _rule(name: str) -> str:
    if name in _FLAGS:
        return "it must be True or False"
    if name == "outer":
        return "it must be a pair (learning rate, momentum), such as (0.7, 0.9)"
    if name == "helpers":
        return "it must be a list of ranks, such as [2, 3]"
    low, high = _RANGES[name]
    return f"it must be {'a number' if name in _REAL else 'a whole number'} from {low:g} to {high:g}"


def check_model(model: nn.Module, optimizer: Optimizer, mode: str, options: Mapping[str, Any]) -> None:
    """What one rank can see of its model and optimizer by itself."""
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


def _has_momentum(group: Mapping[str, Any]) -> bool:
    return bool(group.get("momentum") or (group.get("betas") or (0.0,))[0])


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
