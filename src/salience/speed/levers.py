"""The levers of a training step: what each does to the numbers, what it can save at the most, and where it can be tried.

Numerics: "exact" = bit for bit the same training; "rounding" = the same operations in another order or fused, which differ in
the last bits of float32; "lossy" = fewer bits.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.optim import Optimizer

NUMERICS = ("exact", "rounding", "lossy")
"""From what changes nothing to what changes most."""
WITH_FOREACH = ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "NAdam", "RAdam", "Adamax", "Adadelta", "Rprop", "ASGD")
WITH_FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What levers are judged by before they are tried."""

    model: nn.Module
    optimizer: Optimizer
    device: torch.device
    ranks: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedLever:
    """One lever of the step."""

    name: str
    numerics: str
    saves: Mapping[str, float] = field(default_factory=dict[str, float])
    """Stage ("model" or "optimizer") -> largest share of its seconds that it can save."""
    refused: Callable[[Facts], str] = lambda facts: ""
    """Why it cannot be tried here; empty if it can."""
    costs: float = 0.0
    """Seconds that switching it on takes, once."""
    redraws: bool = False
    """True if draws of dropout fall on other elements, because they are made in another order."""

    def words(self, model: nn.Module) -> str:
        """What it does to the numbers of this model."""
        said = {"exact": "exact", "rounding": "the same up to rounding", "lossy": "lossy"}[self.numerics]
        drops = any(isinstance(one, DROPOUT) and one.p > 0 for one in model.modules())
        return f"{said}, with other draws of dropout" if self.redraws and drops else said


def _no_foreach(facts: Facts) -> str:
    return _no_flag(facts, "foreach", WITH_FOREACH)


def _no_fused(facts: Facts) -> str:
    if why := _no_flag(facts, "fused", WITH_FUSED):
        return why
    if not all(p.is_floating_point() for group in facts.optimizer.param_groups for p in group["params"]):
        return "some parameters are no floating-point numbers"
    return ""


def _no_flag(facts: Facts, flag: str, known: tuple[str, ...]) -> str:
    """Why an optimizer cannot be switched to one of torch's faster implementations."""
    name, groups = type(facts.optimizer).__name__, facts.optimizer.param_groups
    if type(facts.optimizer).__module__.partition(".")[0] != "torch" or name not in known:
        return f"{name} has no such implementation"
    if any(group.get(flag) is not None for group in groups):
        return f"you chose {flag}={groups[0].get(flag)}"
    if flag == "foreach" and facts.device.type == "cuda":
        return "torch uses it on this device by itself"
    if any(group.get(other) for group in groups for other in ("differentiable", "capturable")):
        return "the optimizer is differentiable or capturable"
    return ""


def _no_channels_last(facts: Facts) -> str:
    if not any(isinstance(one, CONVOLUTIONS) for one in facts.model.modules()):
        return "the model has no convolution over images"
    weights = [p for p in facts.model.parameters() if p.dim() == 4 and min(p.shape[1:3]) > 1]
    if weights and all(p.is_contiguous(memory_format=torch.channels_last) for p in weights):
        return "the model is in that format already"
    return ""


def _no_compiler(facts: Facts) -> str:
    if any(one._forward_hooks or one._forward_pre_hooks for one in facts.model.modules()):  # pyright: ignore[reportPrivateUsage]
        return "hooks on its layers (loader.attach) need the layers to be called one by one"
    if facts.device.type == "cuda":
        return "" if importlib.util.find_spec("triton") else "triton is not installed"
    compilers = (os.environ.get("CXX", ""), "g++", "clang++", "c++")
    return "" if any(shutil.which(one) for one in compilers if one) else "there is no C++ compiler (g++, clang++)"


def _no_graphs(facts: Facts) -> str:
    return _gpu_only(facts) or _no_compiler(facts) or ("several ranks" if facts.ranks > 1 else "")


def _gpu_only(facts: Facts) -> str:
    return "" if facts.device.type == "cuda" else "it is for CUDA devices"


def _no_tf32(facts: Facts) -> str:
    if why := _gpu_only(facts):
        return why
    return "" if torch.cuda.get_device_capability(facts.device) >= (8, 0) else "the device has no TF32"


def _no_bf16(facts: Facts) -> str:
    if any(p.dtype != torch.float32 for p in facts.model.parameters()):
        return "the model is not in float32"
    if facts.device.type == "cuda" and not torch.cuda.is_bf16_supported():
        return "the device has no bfloat16"
    return ""


SPEED_LEVERS = (
    SpeedLever(name="fused", numerics="rounding", saves={"optimizer": 0.8}, refused=_no_fused),
    SpeedLever(name="foreach", numerics="exact", saves={"optimizer": 0.7}, refused=_no_foreach),
    SpeedLever(name="cudnn_benchmark", numerics="rounding", saves={"model": 0.3}, refused=_gpu_only),
    SpeedLever(
        name="channels_last", numerics="rounding", saves={"model": 0.5}, refused=_no_channels_last, redraws=True
    ),
    SpeedLever(name="tf32", numerics="lossy", saves={"model": 0.6}, refused=_no_tf32),
    SpeedLever(name="bf16", numerics="lossy", saves={"model": 0.6}, refused=_no_bf16),
    SpeedLever(
        name="compile", numerics="rounding", saves={"model": 0.5}, refused=_no_compiler, costs=60.0, redraws=True
    ),
    SpeedLever(
        name="cuda_graphs", numerics="rounding", saves={"model": 0.6}, refused=_no_graphs, costs=60.0, redraws=True
    ),
)
"""In the order in which they are tried; what changes layouts or types comes before what is compiled for them."""
BY_NAME = {lever.name: lever for lever in SPEED_LEVERS}
INSTEAD_OF = {"foreach": "fused"}
"""Lever -> one that does the same better: it is not tried where that one was kept."""


def ceiling(seconds: Mapping[str, float], lever: SpeedLever) -> float:
    """Largest possible speed-up of a step that takes `seconds`, by stage: step / (step - what the lever can save)."""
    step = sum(seconds.values())
    left = step - sum(share * seconds.get(stage, 0.0) for stage, share in lever.saves.items())
    return step / left if left > 0 else 1.0
