"""Per-sample gradient norms of Linear and Conv2d layers, without one backward pass per sample ("ghost norms").

A layer has the input a_t, and the loss has the gradient g_t with respect to its output, at T positions t of one sample: tokens,
pixels of the output (a_t is then the patch under the kernel), or one position for a Linear on [B, D]. The gradients of weight
and bias are sum_t g_t a_t^T and sum_t g_t, with D inputs and O outputs per position, so

    |grad weight|^2 = sum_{t,s} (a_t . a_s)(g_t . g_s)       Gram form, T^2 (D + O) operations
                    = |sum_t g_t a_t^T|^2                     direct form, T D O operations
    |grad bias|^2   = |sum_t g_t|^2

and for T = 1 both together are (|a|^2 + 1) |g|^2 (Goodfellow 2015; Rochette et al. 2019 for convolutions; the choice
between the forms is that of Bu et al. 2022).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Layer = nn.Linear | nn.Conv2d
Extent = Literal["auto", "all", "last"]

MAX_SHARE_OF_STEP = 0.1
"""Largest share of a step's operations that "auto" may spend."""
STEP_OVER_FORWARD = 3
"""Operations of a training step divided by those of its forward pass: gradients of inputs and of weights cost one each."""
MULTIPLICATIONS_PER_COPY = 64
"""Multiplications that take as long as copying one number into a patch (measured on one core)."""
MAX_NUMBERS_HELD = 1 << 24
"""Maximum count of numbers held while norms are computed; larger batches are processed in parts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """The size of one sample in a layer."""

    positions: int
    inputs: int
    outputs: int
    """Inputs and outputs of one position, in one group."""
    groups: int = 1
    copied: int = 0
    """Numbers in the patches of a convolution."""

    @property
    def forward(self) -> int:
        """Operations of the forward pass."""
        return self.groups * self.positions * self.inputs * self.outputs

    @property
    def norm(self) -> int:
        """Operations of the norm."""
        gram, direct = _operations(self.positions, self.inputs, self.outputs)
        return self.groups * min(gram, direct) + MULTIPLICATIONS_PER_COPY * self.copied

    @property
    def held(self) -> int:
        """Numbers in memory while the norm is computed."""
        return self.copied + 1 + self.groups * min(2 * self.positions**2, self.inputs * self.outputs)


def _operations(positions: int, inputs: int, outputs: int) -> tuple[int, int]:
    return positions**2 * (inputs + outputs), positions * inputs * outputs


def cheaper(positions: int, inputs: int, outputs: int) -> Literal["gram", "direct"]:
    """The form with fewer operations."""
    gram, direct = _operations(positions, inputs, outputs)
    return "gram" if gram <= direct else "direct"


def size_of(layer: Layer, given: Sequence[int], gave: Sequence[int]) -> Size:
    """The size of a sample, from the shapes of the layer's input and output."""
    if isinstance(layer, nn.Linear):
        return Size(positions=math.prod(given[1:-1]), inputs=given[-1], outputs=gave[-1])
    positions, inputs = math.prod(gave[2:]), layer.in_channels // layer.groups * math.prod(layer.kernel_size)
    copied = 0 if _pointwise(layer) else positions * inputs * layer.groups
    outputs = layer.out_channels // layer.groups
    return Size(positions=positions, inputs=inputs, outputs=outputs, groups=layer.groups, copied=copied)


def choose(sizes: Mapping[str, Size], extent: Extent) -> tuple[str, ...]:
    """The layers to use, given all of them in the order in which they run.

    "all" means all of them, "last" the last one, and "auto" goes from the end backwards while the norms cost at most
    `MAX_SHARE_OF_STEP` of the step.
    """
    names = list(sizes)
    if extent == "all":
        return tuple(names)
    budget = (
        MAX_SHARE_OF_STEP * STEP_OVER_FORWARD * sum(size.forward for size in sizes.values()) if extent == "auto" else 0
    )
    first, spent = len(names) - 1, sizes[names[-1]].norm
    while first > 0 and (spent := spent + sizes[names[first - 1]].norm) <= budget:
        first -= 1
    return tuple(names[first:])


def squared_norms(layer: Layer, calls: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """|gradient|^2 of the layer's trainable parameters for each sample, [B], float32 or better.

    `calls` are (input, gradient of the output), batch first. The gradients of several calls add up, which is the same as
    more positions in one call.
    """
    if torch.is_autocast_enabled(calls[0][0].device.type):
        with torch.autocast(calls[0][0].device.type, enabled=False):
            return squared_norms(layer, calls)
    calls = [(_wide(a), _wide(g)) for a, g in calls]
    a, g = calls[0]
    if a.dim() == 2 and len(calls) == 1:  # as below, in as few operations as can be: many such layers are small
        return _squares(g) * (_trains(layer, "weight") * _squares(a) + _trains(layer, "bias"))
    part = max(1, MAX_NUMBERS_HELD // size_of(layer, a.shape, g.shape).held // len(calls))
    if part >= len(a):
        return _squared_norms(layer, calls)
    parts = zip(*(zip(a.split(part), g.split(part), strict=True) for a, g in calls), strict=True)
    return torch.cat([_squared_norms(layer, some) for some in parts])


def _squared_norms(layer: Layer, calls: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    rows = [_rows(layer, a, g) for a, g in calls]
    a, g = rows[0] if len(rows) == 1 else (torch.cat([r[0] for r in rows], 1), torch.cat([r[1] for r in rows], 1))
    total = _weight_part(a, g) if _trains(layer, "weight") else g.new_zeros(len(g))
    if _trains(layer, "bias"):
        total = total + _squares(g.sum(1))
    return total.view(len(calls[0][0]), -1).sum(1)


def _weight_part(a: Tensor, g: Tensor) -> Tensor:
    positions, inputs, outputs = a.shape[1], a.shape[2], g.shape[2]
    if cheaper(positions, inputs, outputs) == "gram":
        return torch.linalg.vecdot((a @ a.mT).flatten(1), (g @ g.mT).flatten(1))
    return _squares((g.mT @ a).flatten(1))


def _squares(x: Tensor) -> Tensor:
    return torch.linalg.vecdot(x, x)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _trains(layer: Layer, name: str) -> bool:
    parameter = getattr(layer, name)
    return parameter is not None and parameter.requires_grad


def _rows(layer: Layer, a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Input [N, T, D] and output gradient [N, T, O], where N counts the groups of a convolution as samples."""
    if isinstance(layer, nn.Linear):
        return a.reshape(len(a), -1, a.shape[-1]), g.reshape(len(g), -1, g.shape[-1])
    patches, g = _patches(layer, a), g.flatten(2)
    groups = len(a) * layer.groups
    return patches.reshape(groups, -1, g.shape[2]).mT, g.reshape(groups, -1, g.shape[2]).mT


def _patches(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """The patch under the kernel at each output pixel, [B, C * kernel, T]."""
    if _pointwise(conv):
        return x.flatten(2)
    rows, columns = _sides(conv)
    if conv.padding_mode == "zeros" and rows[0] == rows[1] and columns[0] == columns[1]:
        return F.unfold(x, conv.kernel_size, conv.dilation, (rows[0], columns[0]), conv.stride)
    mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
    return F.unfold(F.pad(x, (*columns, *rows), mode=mode), conv.kernel_size, conv.dilation, 0, conv.stride)


def _sides(conv: nn.Conv2d) -> list[tuple[int, int]]:
    """Padding before and after, of rows and of columns."""
    if not isinstance(conv.padding, str):
        return [(n, n) for n in conv.padding]
    same = conv.padding == "same"
    reach = [same * d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
    return [(n // 2, n - n // 2) for n in reach]


def _pointwise(conv: nn.Conv2d) -> bool:
    one = (1, 1)
    return conv.kernel_size == one and conv.stride == one and conv.padding in ((0, 0), "same", "valid")
