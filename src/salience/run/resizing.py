"""Resizing: images of whole windows at a share of their side, as the Plan says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import numpy as np
from torch import Tensor

from salience.errors import ConfigError
from salience.plan import Plan, Shard
from salience.run.part import Batch, Part, Setup, Voice
from salience.treat.config import Treat
from salience.treat.resolution import curve_of, resized, share_at


class Resizing(Part):
    """Chooses the size of a window's images, and resizes batches that hold images."""

    name = "resizing"

    def __init__(self, setup: Setup, voice: Voice, treat: Treat, *, by_itself: bool, optional: bool = False) -> None:
        """`by_itself`: batches are resized when they are handed over; else the loop calls `resize`."""
        if setup.epochs is None:
            raise ConfigError(
                'treat="resolution" needs epochs=: the number of passes you will make, so that it can pace itself.'
            )
        self._setup, self._voice, self._by_itself = setup, voice, by_itself
        self._curve = curve_of(treat.sizes, treat.low, treat.until)
        self.optional = optional
        """True if `auto` may switch it on, and nobody asked for it."""
        self.on = not optional
        self.found_images = False
        """True once a batch had images."""
        self._share = 1.0
        self._said = False

    def plan(self, plan: Plan) -> Plan:
        """The plan with the size of its images."""
        return replace(plan, resolution=self.share_of(plan.window)) if self.on else plan

    def share_of(self, window: int) -> float:
        """Share of the full side in a window."""
        assert self._setup.windows is not None
        return share_at(self._curve, window, self._setup.windows)

    @property
    def costs(self) -> list[float]:
        """Computation of an epoch relative to one at full size, by epoch: as many as there are pixels."""
        setup = self._setup
        assert setup.epochs is not None
        shares = np.array([self.share_of(window) for window in range(setup.epochs * setup.pieces)])
        return (shares.reshape(setup.epochs, setup.pieces) ** 2).mean(axis=1).tolist()

    def open(self, shard: Shard, done: frozenset[int]) -> None:
        self._share = shard.plan.resolution

    def hand_over(self, batch: Batch) -> None:
        if not self._by_itself:
            return
        found: list[Tensor] = []
        _images(batch.content, len(batch.ids), found)
        self.found_images = len(found) == 1
        if len(found) == 1 and self._share < 1:
            batch.content = _with(batch.content, found[0], resized(found[0], self._share))
        elif not self.found_images and self.on and not self._said:
            self._said = True
            many = (
                f"{len(found)} tensors [B, C, H, W], and which are images is not known"
                if found
                else "no images [B, C, H, W]"
            )
            self._voice.warn(
                f'treat="resolution" leaves batches as they are: they have {many}. Call loader.resize(x) in the loop.'
            )

    def resize(self, images: Tensor) -> Tensor:
        """Images of the window in progress at its size; unchanged if batches were resized already."""
        if images.dim() != 4:
            raise ConfigError(
                f"resize() was given a tensor of shape {tuple(images.shape)}; it resizes images, [B, C, H, W]."
            )
        return images if self._by_itself and self.found_images else resized(images, self._share)

    def report(self) -> str:
        if not self.on:
            return ""
        shares = [self.share_of(window) for window in range(self._setup.windows or 0)]
        spent = sum(self.costs) / len(self.costs)
        return (
            f"Images were shown at {min(shares):.0%} to 100% of their side, at 100% in {sum(s == 1 for s in shares)} of "
            f"{len(shares)} windows: {spent:.0%} of the pixels of a run at full size."
        )


def _images(value: Any, count: int, found: list[Tensor]) -> None:
    """Collect the tensors [B, C, H, W] of a batch."""
    if isinstance(value, Tensor):
        if value.dim() == 4 and len(value) == count:
            found.append(value)
    elif isinstance(value, Mapping):
        for one in cast("Mapping[Any, Any]", value).values():
            _images(one, count, found)
    elif isinstance(value, (list, tuple)):
        for one in cast("list[Any]", value):
            _images(one, count, found)


def _with(value: Any, old: Tensor, new: Tensor) -> Any:
    """The batch with one tensor replaced."""
    if value is old:
        return new
    if isinstance(value, Mapping):
        changed = {key: _with(one, old, new) for key, one in cast("Mapping[Any, Any]", value).items()}
        return changed if type(value) is dict else type(value)(changed)  # pyright: ignore[reportCallIssue,reportUnknownVariableType]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_with(one, old, new) for one in cast("tuple[Any, ...]", value)))
    if isinstance(value, (list, tuple)):
        return type(value)(_with(one, old, new) for one in cast("list[Any]", value))
    return value
