"""Arrays as tensors that torch.load(weights_only=True) takes, and back."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from salience.ledger import COLUMNS


def tensors(of: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """Copies as tensors; unsigned integers travel under a signed type."""
    return {
        name: torch.from_numpy(np.array(a.view(f"i{a.itemsize}") if a.dtype.kind == "u" and a.itemsize > 1 else a))
        for name, a in of.items()
    }


def arrays(of: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """The arrays behind such tensors, ledger columns with their own type."""
    found: dict[str, np.ndarray] = {name: tensor.numpy() for name, tensor in of.items()}
    for name, array in found.items():
        dtype = np.dtype(COLUMNS[name].dtype) if name in COLUMNS else array.dtype
        if dtype != array.dtype:
            found[name] = array.view(dtype)
    return found
