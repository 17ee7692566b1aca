"""Small models by name, so that the command line needs no code, and your own models by "pkg.module:factory".

Each built-in ends in one `nn.Linear`, whose input is the feature vector that scores hook into.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from salience.errors import ConfigError, did_you_mean


def mlp(classes: int, channels: int = 3, size: int = 32) -> nn.Module:
    """Two hidden layers on the flattened image."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(channels * size * size, 256),
        nn.ReLU(inplace=True),
        nn.Linear(256, 128),
        nn.ReLU(inplace=True),
        nn.Linear(128, classes),
    )


def cnn(classes: int, channels: int = 3, size: int = 32) -> nn.Module:
    """Four small convolutions, light enough to train on a laptop's CPU. Any size from 16."""
    _at_least(size, 16, "cnn")
    model = nn.Sequential(
        *_conv(channels, 16, kernel=5, stride=2),
        *_conv(16, 32),
        nn.MaxPool2d(2),
        *_conv(32, 64),
        nn.MaxPool2d(2),
        *_conv(64, 128),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, classes),
    )
    for weight in model.parameters():
        if weight.ndim == 4:  # convolutions follow their weights' layout, and on a CPU this one is about 1.5x faster
            weight.data = weight.data.contiguous(memory_format=torch.channels_last)
    return model


def resnet9(classes: int, channels: int = 3, size: int = 32) -> nn.Module:
    """The DAWNBench ResNet-9: widths 64 to 512, a residual block at 128 and at 512, features times 1/8. Any size from 32."""
    _at_least(size, 32, "resnet9")
    return nn.Sequential(
        *_conv(channels, 64),
        *_conv(64, 128),
        nn.MaxPool2d(2),
        _Residual(nn.Sequential(*_conv(128, 128), *_conv(128, 128))),
        *_conv(128, 256),
        nn.MaxPool2d(2),
        *_conv(256, 512),
        nn.MaxPool2d(2),
        _Residual(nn.Sequential(*_conv(512, 512), *_conv(512, 512))),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        _Times(0.125),  # without it the high learning rates it is trained with drive the first steps astray
        nn.Linear(512, classes),
    )


def resnet18(classes: int, channels: int = 3, size: int = 32) -> nn.Module:
    """ResNet-18 for small images: a 3x3 stem, no max-pooling, then four pairs of blocks. Any size from 16."""
    _at_least(size, 16, "resnet18")
    blocks: list[nn.Module] = []
    width_in = 64
    for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        blocks += [_basic_block(width_in, width, stride), _basic_block(width, width, 1)]
        width_in = width
    return nn.Sequential(*_conv(channels, 64), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes))


Factory = Callable[..., nn.Module]

BUILT_IN: dict[str, Factory] = {"mlp": mlp, "cnn": cnn, "resnet9": resnet9, "resnet18": resnet18}


def build(name: str, classes: int, channels: int = 3, size: int = 32) -> nn.Module:
    """A new model: a built-in by its name, or what the factory at "pkg.module:factory" returns.

    A factory is called by keyword, with those of `classes`, `channels` and `size` that its signature takes.
    """
    for what, value in (("classes", classes), ("channels", channels), ("size", size)):
        if value < 1:
            raise ConfigError(f"{what}={value} for model {name!r}; use 1 or more")
    if ":" not in name:
        if name not in BUILT_IN:
            raise ConfigError(
                f"no model is named {name!r}.{did_you_mean(name, BUILT_IN)}"
                " Your own model is named as 'pkg.module:factory'."
            )
        return BUILT_IN[name](classes, channels, size)
    factory = _find(name)
    model: object = factory(**_arguments(name, factory, classes=classes, channels=channels, size=size))
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model {name!r} returned {type(model).__name__}, not a torch.nn.Module; return the model")
    return model


def _find(name: str) -> Callable[..., object]:
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, ValueError) as error:  # ValueError: an empty module name
        raise ConfigError(
            f"module {module_name!r} of model {name!r} cannot be imported ({error}); install it, or put its"
            " folder on PYTHONPATH"
        ) from error
    factory: object = getattr(module, attribute, None)
    if factory is None:
        public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ConfigError(f"module {module_name!r} has no {attribute!r}.{did_you_mean(attribute, public)}")
    if not callable(factory):
        raise ConfigError(f"model {name!r} is a {type(factory).__name__}, which cannot be called; name a factory")
    return factory


def _arguments(name: str, factory: Callable[..., object], **known: int) -> dict[str, int]:
    """The arguments in `known` that the factory takes by keyword; an error if it requires any other."""
    parameters = inspect.signature(factory).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return known
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    fixed = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    missing = [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind not in fixed and not (p in named and p.name in known)
    ]
    if missing:
        raise ConfigError(
            f"the factory of model {name!r} requires {', '.join(missing)}; it is given {', '.join(known)} alone,"
            " by keyword, so give the others defaults"
        )
    return {p.name: known[p.name] for p in named if p.name in known}


def _at_least(size: int, least: int, model: str) -> None:
    if size < least:
        raise ConfigError(f"{size=} is too small for {model}; use images of {least} pixels or more")


def _conv(width_in: int, width: int, *, kernel: int = 3, stride: int = 1) -> tuple[nn.Module, ...]:
    return (
        nn.Conv2d(width_in, width, kernel, stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
    )


def _basic_block(width_in: int, width: int, stride: int) -> nn.Module:
    body = nn.Sequential(
        *_conv(width_in, width, stride=stride),
        nn.Conv2d(width, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
    )
    if stride == 1 and width_in == width:
        shortcut: nn.Module = nn.Identity()
    else:
        shortcut = nn.Sequential(nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width))
    return nn.Sequential(_Residual(body, shortcut), nn.ReLU(inplace=True))


class _Times(nn.Module):
    """A constant factor."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class _Residual(nn.Module):
    """shortcut(x) + body(x)."""

    def __init__(self, body: nn.Module, shortcut: nn.Module | None = None) -> None:
        super().__init__()
        self.body = body
        self.shortcut = nn.Identity() if shortcut is None else shortcut

    def forward(self, x: Tensor) -> Tensor:
        out: Any = self.shortcut(x) + self.body(x)
        return cast(Tensor, out)


def seeded(name: str, classes: int, *, size: int, seed: int) -> nn.Module:
    """The model, with parameters that depend only on the seed; the global generator is unchanged."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # pkg.module:factory may lie right here
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return build(name, classes, size=size)


def decayed(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups: weight decay on matrices and kernels, none on biases and norms."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]


def check_name(name: str, *, size: int) -> None:
    """Raise at once if the name of a built-in is misspelt; on the meta device a model costs nothing."""
    if ":" not in name:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            build(name, 2, size=size)
