"""Transforms of torchvision v2, Albumentations and Kornia as stages: the real libraries, as their users write them."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

import salience
from salience import Stage, Treat

from conftest import require

N, BATCH = 24, 6


class Images(Dataset[Any]):
    """(image, class), uint8, as `kind` of array."""

    def __init__(self, kind: str) -> None:
        self.images = np.random.default_rng(0).integers(0, 256, (N, 40, 40, 3), dtype=np.uint8)
        self.kind = kind

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> tuple[Any, int]:
        image = self.images[i]
        return torch.from_numpy(image).permute(2, 0, 1) if self.kind == "tensor" else image.copy(), i % 3


def albumentations() -> tuple[str, list[Any]]:
    a = importlib.import_module("albumentations")
    return "array", [
        Stage(a.Resize(36, 36), random=False),
        Stage(a.ColorJitter(p=1.0), random=True, freeze=True),
        a.Compose([a.RandomCrop(32, 32), a.HorizontalFlip(p=0.5)]),
    ]


def unbatched(x: Tensor) -> Tensor:
    return x[0]


def as_float(x: Tensor) -> Tensor:
    return x.float() / 255


def kornia() -> tuple[str, list[Any]]:
    k = importlib.import_module("kornia.augmentation")
    return "tensor", [
        Stage(as_float, random=False),
        Stage(k.ColorJitter(0.2, 0.2, 0.2, 0.1, p=1.0), random=True, freeze=True),
        k.RandomCrop((32, 32)),
        k.RandomHorizontalFlip(p=0.5),
        Stage(unbatched, random=False),
    ]


def torchvision() -> tuple[str, list[Any]]:
    v2 = importlib.import_module("torchvision.transforms.v2")
    return "tensor", [
        Stage(v2.Resize((36, 36), antialias=True), random=False),
        Stage(v2.RandAugment(), random=True, freeze=True),
        v2.Compose([v2.RandomCrop(32), v2.RandomHorizontalFlip()]),
    ]


@pytest.fixture(params=[albumentations, kornia, torchvision], ids=lambda make: make.__name__)
def given(request: pytest.FixtureRequest) -> tuple[str, list[Any]]:
    name = request.param.__name__
    try:
        return request.param()
    except ImportError:
        require(name == "torchvision", name)
        pytest.skip("torchvision is missing; run this where it can be imported")
    except RuntimeError as trouble:  # of torchvision beside a CPU build of torch; that is no failure under CI either
        pytest.skip(f"{name} cannot be imported beside this torch ({trouble}); run this where it can")


def run(given: tuple[str, list[Any]], treat: Treat | str | None, windows: int = 4, **more: Any) -> tuple[Tensor, Any]:
    kind, stages = given
    loader = salience.Loader(Images(kind), BATCH, epochs=windows, augment=stages, treat=treat, seed=3, **more)
    out = []
    for _ in range(windows):
        for x, y in loader:
            assert x.shape[0] == BATCH
            assert 32 in x.shape[1:]
            loader.loss(torch.ones(len(y)))
            out.append(x)
    return torch.stack(out), loader


def test_the_number_of_workers_changes_no_tensor_and_windows_differ(given):
    alone, _ = run(given, None)
    workers, _ = run(given, None, num_workers=2)
    assert torch.equal(alone, workers)
    assert not torch.equal(alone[: N // BATCH], alone[N // BATCH : 2 * N // BATCH])


def test_reuse_of_what_is_deterministic_changes_no_tensor(given):
    fresh, _ = run(given, None)
    again, loader = run(given, Treat("reuse", split=1), num_workers=1)
    counts = loader._run.staging.treating.counts
    assert counts["reused"] > N
    assert counts["unfit"] == counts["missed"] == 0
    assert torch.equal(fresh, again)


def test_frozen_draws_are_kept_and_those_behind_them_are_not(given):
    taken, loader = run(given, Treat("reuse", split=2), num_workers=1)
    assert loader._run.staging.treating.counts["reused"] > N
    assert len(loader._run.staging.treating.frozen) == 1
    assert len({x.numpy().tobytes() for x in taken}) == len(taken), "two batches were alike"


def test_a_library_transform_declared_deterministic_is_found_out(given, caplog):
    kind, stages = given
    lying = [stages[0], Stage(stages[1].call, random=False, name="jitter"), *stages[2:]]
    run((kind, lying), "reuse", 1)
    assert "Stage 'jitter' is declared random=False and is not" in caplog.text
