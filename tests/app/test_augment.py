"""Augmentation moves pixels, invents none, and draws the same numbers whatever the device."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from salience.app.augment import crop_flip
from salience.errors import ConfigError


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randint(0, 256, (64, 3, 12, 10), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_each_image_is_a_crop_of_its_reflected_self(x: torch.Tensor):
    out = crop_flip(x, 7, pad=3)
    padded = functional.pad(x.float(), [3] * 4, mode="reflect").to(torch.uint8)
    windows = padded.unfold(2, 12, 1).unfold(3, 10, 1)  # [B, C, 7, 7, 12, 10]
    for image, mine in zip(out, windows, strict=True):
        crops = mine.permute(1, 2, 0, 3, 4).flatten(0, 1)
        matches = (crops == image).flatten(1).all(1) | (crops.flip(-1) == image).flatten(1).all(1)
        assert matches.any()


def test_all_shifts_and_flips_are_equally_likely():
    ramp = torch.arange(64.0).reshape(1, 1, 8, 8).expand(4500, 1, 8, 8)
    out = crop_flip(ramp, 1, pad=1)
    flipped = out[:, 0, 4, 4] < out[:, 0, 4, 3]
    assert abs(flipped.float().mean() - 0.5) < 4 * (0.25 / 4500) ** 0.5
    row = out[:, 0, 4, 4].div(8, rounding_mode="floor")
    for shift in (3, 4, 5):
        assert abs((row == shift).float().mean() - 1 / 3) < 4 * (2 / 9 / 4500) ** 0.5


def test_without_padding_and_flip_nothing_changes(x: torch.Tensor):
    assert torch.equal(crop_flip(x, 0, pad=0, flip=False), x)


def test_the_input_is_left_alone_and_dtype_kept(x: torch.Tensor):
    before = x.clone()
    assert crop_flip(x, 0).dtype == torch.uint8
    assert crop_flip(x.half(), 0).dtype == torch.float16
    assert torch.equal(x, before)


def test_the_same_seed_gives_the_same_batch_and_another_a_different_one(x: torch.Tensor):
    assert torch.equal(crop_flip(x, (1, 2, 3)), crop_flip(x, (1, 2, 3)))
    assert not torch.equal(crop_flip(x, (1, 2, 3)), crop_flip(x, (1, 2, 4)))
    generator = torch.Generator().manual_seed(5)
    first = crop_flip(x, generator)
    assert not torch.equal(first, crop_flip(x, generator))
    assert torch.equal(first, crop_flip(x, torch.Generator().manual_seed(5)))


def test_the_global_random_state_is_neither_read_nor_set(x: torch.Tensor):
    before = torch.get_rng_state()
    crop_flip(x, 3)
    assert torch.equal(before, torch.get_rng_state())


def test_turning_flips_off_leaves_the_crops_as_they_were(x: torch.Tensor):
    straight, flipped = crop_flip(x, 9, flip=False), crop_flip(x, 9)
    same = (straight == flipped).flatten(1).all(1)
    mirrored = (straight.flip(-1) == flipped).flatten(1).all(1)
    assert (same | mirrored).all()


@pytest.mark.gpu
def test_a_gpu_gives_the_same_as_the_cpu(x: torch.Tensor):
    assert torch.equal(crop_flip(x.cuda(), 4).cpu(), crop_flip(x, 4))


def test_an_empty_batch_stays_empty():
    assert crop_flip(torch.zeros(0, 3, 8, 8), 0).shape == (0, 3, 8, 8)


@pytest.mark.parametrize(
    ("shape", "pad", "named"), [((3, 8, 8), 4, "shape"), ((1, 3, 8, 4), 4, "pad=4"), ((1, 1, 8, 8), -1, "pad=-1")]
)
def test_impossible_crops_are_refused(shape: tuple[int, ...], pad: int, named: str):
    with pytest.raises(ConfigError, match=named):
        crop_flip(torch.zeros(shape), 0, pad=pad)


@pytest.mark.parametrize("seeds", [-1, (), (1, -2)])
def test_impossible_seeds_are_refused(x: torch.Tensor, seeds: int | tuple[int, ...]):
    with pytest.raises(ConfigError, match="seeds"):
        crop_flip(x, seeds)
