"""Shared pieces: a small learnable problem, and the plain training loop everything is compared with."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

torch.set_num_threads(1)
os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"  # Ray Tune would keep Ctrl-C from the tests that come after it
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the processes that tests start share the same few cores


def require(found: bool, what: str) -> None:
    """Skip loudly when a part is missing; under CI=true that is a failure."""
    if not found:
        if os.environ.get("CI") == "true":
            pytest.fail(f"{what} is missing, and under CI nothing may be skipped")
        pytest.skip(f"{what} is missing")


@pytest.fixture(scope="session")
def rivals() -> Any:
    """The cache policies of the benchmarks, with which ours is compared."""
    path = Path(__file__).parents[1] / "benchmarks" / "rivals.py"
    spec = importlib.util.spec_from_file_location("rivals", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def problem() -> TensorDataset:
    """300 points in 8 dimensions, 4 classes, linearly separable."""
    g = torch.Generator().manual_seed(3)
    x = torch.randn(300, 8, generator=g)
    y = (x @ torch.randn(8, 4, generator=g)).argmax(1)
    return TensorDataset(x, y)


def make_model() -> nn.Module:
    """A linear model with parameters that depend on nothing but this line."""
    model = nn.Linear(8, 4)
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=g) * 0.1)
    return model


def train(
    loader: Iterable[Any],
    reduce: Callable[[Tensor, Tensor, Tensor], Tensor],
    *,
    epochs: int,
    model: nn.Module | None = None,
) -> nn.Module:
    model = make_model() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(epochs):
        for x, y in loader:
            logits = model(x)
            loss = reduce(F.cross_entropy(logits, y, reduction="none"), logits, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model
