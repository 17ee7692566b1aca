"""Randomness by sample: global generators seeded from (seed, window, id, view), so that workers do not matter."""

from __future__ import annotations

import random
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

FETCH, PREFIX, REST = range(3)
"""Last element of a path: the part of the work that draws."""


def sample_seeds(seed: int, *path: int | npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """A seed for each sample, uint64 [B], from `seed` and a path of integers or integer arrays [B].

    h = mix(h + golden ratio + part), part by part, where mix is that of SplitMix64 (Steele, Lea and Flood 2014).
    """
    with np.errstate(over="ignore"):
        state = _mixed(np.asarray(seed, dtype=np.uint64))
        for part in path:
            state = _mixed(state + np.uint64(0x9E3779B97F4A7C15) + np.asarray(part).astype(np.int64).view(np.uint64))
    return np.atleast_1d(state)


def _mixed(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def seed_globals(seed: int) -> None:
    """Seed the generators that transforms use: those of torch (on the CPU), NumPy and Python."""
    torch.default_generator.manual_seed(seed & 0x7FFFFFFFFFFFFFFF)
    np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002 - the one that transforms draw from
    random.seed(seed)


def globals_state() -> tuple[Any, ...]:
    """The states of these generators, for comparison."""
    return torch.default_generator.get_state().numpy().tobytes(), _numpy_state(), random.getstate()


def _numpy_state() -> tuple[Any, ...]:
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002
    return kind, np.asarray(keys).tobytes(), *rest


@contextmanager
def own_globals() -> Generator[None]:
    """Restore the user's generators afterwards, for work in the training process itself."""
    before = torch.default_generator.get_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    try:
        yield
    finally:
        torch.default_generator.set_state(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
        random.setstate(before[2])
