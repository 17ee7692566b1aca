"""Random generators derived from a seed and a path of integers; the user's global generators are never touched."""

from __future__ import annotations

import numpy as np
import torch

PLAN, PICK, WORKERS, AUGMENT, PEEK, TIES, EVEN, STATIC, TRIAL, LENGTHS = range(10)
"""First element of a path, which names the purpose, so that no two purposes share a stream."""


def generator(seed: int, *path: int) -> np.random.Generator:
    """A NumPy generator that depends on (seed, path) and on nothing else."""
    return np.random.Generator(np.random.SFC64(np.random.SeedSequence((seed & 0xFFFFFFFF, seed >> 32, *path))))


def torch_seed(seed: int, *path: int) -> int:
    """A 63-bit seed for a torch.Generator that depends on (seed, path) and on nothing else."""
    high, low = np.random.SeedSequence((seed & 0xFFFFFFFF, seed >> 32, *path)).generate_state(2)
    return (int(high) << 31) ^ int(low)


def torch_generator(seed: int, *path: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A torch generator on `device` that depends on (seed, path) and on nothing else."""
    made = torch.Generator(device=device)
    made.manual_seed(torch_seed(seed, *path))
    return made
