"""Random crop and flip of whole batches on their own device.

The random numbers are always drawn on the CPU, so that a run gives the same batches on every device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from salience.errors import ConfigError


def crop_flip(
    x: Tensor, generator: torch.Generator | int | Sequence[int], pad: int = 4, *, flip: bool = True
) -> Tensor:
    """Shift every image of [B, C, H, W] by up to `pad` pixels each way, mirrored at its edges; flip half.

    The same as reflect-padding by `pad` and cutting out H x W at random. `generator` is a CPU generator, which
    advances, or a seed: one number, or several such as (seed, epoch, step). Any dtype; the input is not modified.
    """
    if x.ndim != 4:
        raise ConfigError(f"crop_flip takes a batch of images [B, C, H, W], not a tensor of shape {tuple(x.shape)}")
    batch, channels, height, width = x.shape
    if not 0 <= pad < min(height, width):
        raise ConfigError(f"{pad=} for images of {height} x {width}; use 0 to {min(height, width) - 1}")
    draw = _cpu_generator(generator)
    shifts = torch.randint(-pad, pad + 1, (2, batch, 1), generator=draw)
    rows = _mirrored(torch.arange(height) + shifts[0], height)
    columns = _mirrored(torch.arange(width) + shifts[1], width)
    if flip:
        flipped = torch.randint(0, 2, (batch, 1), generator=draw).bool()
        columns = torch.where(flipped, columns.flip(1), columns)
    shape = (batch, channels, height, width)
    by_row = rows.to(x.device)[:, None, :, None].expand(shape)
    by_column = columns.to(x.device)[:, None, None, :].expand(shape)
    return x.gather(2, by_row).gather(3, by_column)


def _mirrored(index: Tensor, length: int) -> Tensor:
    """Positions outside 0 to length - 1 reflected at the edge, the edge itself not repeated."""
    last = length - 1
    return last - (last - index.abs()).abs()


def _cpu_generator(given: torch.Generator | int | Sequence[int]) -> torch.Generator:
    if isinstance(given, torch.Generator):
        if given.device.type != "cpu":
            raise ConfigError(
                f"the generator is on {given.device}; draw on the CPU, so that every device gets the same"
            )
        return given
    seeds = [given] if isinstance(given, int) else list(given)
    if not seeds or min(seeds) < 0:
        raise ConfigError(f"seeds {seeds}; give one or more numbers from 0")
    mixed = np.random.SeedSequence(seeds).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(mixed) >> 1)
