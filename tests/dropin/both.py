"""One case of the table: the same data, options and loop for torch's DataLoader and for salience.Loader."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import salience


@dataclass(frozen=True)
class Case:
    """A behaviour: `loop(loader)` returns the same, or raises the same, whichever of the two the loader is."""

    name: str
    data: Callable[[], Any]
    loop: Callable[[Any], Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    ordered: bool = False
    """True: DataLoader's own default, shuffle=False."""

    def __str__(self) -> str:
        return self.name

    def plain(self) -> tuple[str, Any]:
        return outcome(lambda: DataLoader(self.data(), **self._shuffled(), **self.options), self.loop)

    def ours(self) -> tuple[str, Any]:
        return outcome(lambda: salience.Loader(self.data(), **self._shuffled(), **self.options), self.loop)

    def _shuffled(self) -> dict[str, Any]:
        shuffle = {} if "shuffle" in self.options else {"shuffle": not self.ordered}
        generator = {} if "generator" in self.options else {"generator": torch.Generator().manual_seed(7)}
        return {**shuffle, **generator}


def outcome(make: Callable[[], Any], loop: Callable[[Any], Any]) -> tuple[str, Any]:
    """What a loop returned in plain values, or what it raised."""
    try:
        return "gave", plain_values(loop(make()))
    except Exception as error:
        return "raised", error


def plain_values(value: Any) -> Any:
    """Containers, types and numbers of a batch as something that == compares exactly."""
    if isinstance(value, Tensor):
        value = value.int_repr() if value.is_quantized else value
        return ("tensor", str(value.dtype), tuple(value.shape), value.is_pinned(), value.tolist())
    if isinstance(value, np.ndarray):
        return ("array", str(value.dtype), value.tolist())
    if isinstance(value, collections.abc.Mapping):
        return (type(value).__name__, {key: plain_values(part) for key, part in value.items()})
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, [plain_values(part) for part in value])
    if hasattr(value, "parts"):
        return (type(value).__name__, plain_values(value.parts))
    return value


def check(case: Case) -> None:
    """Assert that both do the same. Where DataLoader raises, ours may raise a subclass with a sentence of its own."""
    (how, expected), (how_ours, found) = case.plain(), case.ours()
    assert how_ours == how, f"DataLoader {how} {expected!r}, salience.Loader {how_ours} {found!r}"
    if how == "raised":
        assert isinstance(found, type(expected)), f"DataLoader raised {expected!r}, salience.Loader {found!r}"
        assert str(found), "an error says something"
    else:
        assert found == expected
