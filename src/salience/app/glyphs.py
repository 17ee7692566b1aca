"""A labelled image set with known truth: which labels are wrong, which images are hard, which are near-copies.

Selection rules claim to find exactly these three, so the demo and the benchmarks need data on which the claim can
be checked. Every image is a glyph of Pillow's own font, with random distortion, lighting and noise.
"""

from __future__ import annotations

import math
import string
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from salience.errors import ConfigError, MissingExtra

if TYPE_CHECKING:
    from PIL import Image

SYMBOLS = string.digits + string.ascii_uppercase

_CHUNK = 256  # images drawn from one generator; part of what (seed, split, index) means, so never change it
_CANVAS = 48  # side of the cached glyph bitmaps: a little above the usual image, so that bending loses nothing
_STROKES = (0, 1, 2)  # pen widths cached per glyph, in canvas pixels
_DRAWS = 20  # uniform numbers that describe one image
_ROLES, _LABELS, _PIXELS, _COPIES = range(4)  # independent random streams

_F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True)
class Glyphs:
    """Rendered images, the labels as given, and the truth about both. Arrays run over N images."""

    images: npt.NDArray[np.uint8]
    """uint8 [N, size, size], greyscale."""
    labels: npt.NDArray[np.int64]
    """int64 [N], the given label, which training sees; wrong where `wrong` is set."""
    true_labels: npt.NDArray[np.int64]
    """int64 [N], the glyph that was drawn."""
    wrong: npt.NDArray[np.bool_]
    """bool [N], True if the given label is not the true one. Never set together with `hard`."""
    hard: npt.NDArray[np.bool_]
    """bool [N], True if strongly distorted, and correctly labelled."""
    copy_of: npt.NDArray[np.int64]
    """int64 [N], index of the original that this is a near-copy of, -1 for none. Originals are plain: neither
    copies themselves, nor hard, nor wrong."""

    def __len__(self) -> int:
        return len(self.labels)


def render(
    n: int,
    *,
    classes: int = 10,
    size: int = 32,
    copies: float = 0.15,
    wrong: float = 0.05,
    hard: float = 0.10,
    seed: int = 0,
    split: str = "train",
    progress: Callable[[int, int], None] | None = None,
) -> Glyphs:
    """Render `n` images; `copies`, `wrong` and `hard` are exact shares of them (rounded to whole images).

    The same arguments give the same bytes, and an image that keeps its role looks the same whatever `n` is.
    Another `split` draws other images: a clean test set is `render(n, copies=0, wrong=0, split="test")`.
    """
    n_hard, n_copies, n_wrong = _check(n, classes, size, copies, wrong, hard, seed)

    def rng(stream: int, part: int = 0) -> np.random.Generator:
        return np.random.default_rng([seed, zlib.crc32(split.encode()), stream, part])

    # Roles first: one shuffled row of indices, cut into hard, copies and plain; wrong falls on the last two.
    roles = rng(_ROLES)
    order = roles.permutation(n)
    hard_ids, copy_ids = order[:n_hard], order[n_hard : n_hard + n_copies]
    wrong_ids = roles.choice(order[n_hard:], size=n_wrong, replace=False)
    is_hard, is_wrong = np.zeros(n, np.bool_), np.zeros(n, np.bool_)
    is_hard[hard_ids] = True
    is_wrong[wrong_ids] = True
    copy_of = np.full(n, -1, np.int64)
    if n_copies:
        plain = order[n_hard + n_copies :]
        plain = plain[~is_wrong[plain]]
        if not len(plain):
            raise ConfigError(f"{n=} leaves no plain image to copy: take more images or smaller shares")
        copy_of[copy_ids] = roles.choice(plain, size=n_copies)

    # Whole alphabets in shuffled order: classes are equally frequent, and the first n stay what they are.
    draw = rng(_LABELS)
    alphabets = np.tile(np.arange(classes, dtype=np.int64), (math.ceil(n / classes), 1))
    true_labels = draw.permuted(alphabets, axis=1).reshape(-1)[:n]
    true_labels[copy_ids] = true_labels[copy_of[copy_ids]]
    labels = true_labels.copy()
    labels[wrong_ids] += roles.integers(1, max(classes, 2), size=n_wrong)
    labels %= classes

    bitmaps = _bitmaps(SYMBOLS[:classes])
    images = np.empty((n, size, size), np.uint8)
    for part, start in enumerate(range(0, n, _CHUNK)):
        rows = slice(start, min(start + _CHUNK, n))
        images[rows] = _draw(rng(_PIXELS, part), bitmaps, true_labels[rows], is_hard[rows], size)
        if progress is not None:
            progress(rows.stop, n)
    for part, start in enumerate(range(0, n_copies, _CHUNK)):
        ids = copy_ids[start : start + _CHUNK]
        images[ids] = _near_copy(rng(_COPIES, part), images[copy_of[ids]])
    return Glyphs(images=images, labels=labels, true_labels=true_labels, wrong=is_wrong, hard=is_hard, copy_of=copy_of)


def _check(
    n: int, classes: int, size: int, copies: float, wrong: float, hard: float, seed: int
) -> tuple[int, int, int]:
    """Numbers of hard, copied and wrong images; the arguments are checked first."""
    if n < 0:
        raise ConfigError(f"{n=} images asked for; n is 0 or more")
    if not 2 <= classes <= len(SYMBOLS):
        raise ConfigError(f"{classes=} is not between 2 and {len(SYMBOLS)} (ten digits, then the letters)")
    if size < 16:
        raise ConfigError(f"{size=} is too small to tell glyphs apart; use 16 or more")
    if seed < 0:
        raise ConfigError(f"{seed=} is negative; use 0 or more")
    for name, share in (("copies", copies), ("wrong", wrong), ("hard", hard)):
        if not 0 <= share <= 1:
            raise ConfigError(f"{name}={share} is not a share; use a number from 0 to 1")
    counts = round(hard * n), round(copies * n), round(wrong * n)
    if sum(counts) > n:
        raise ConfigError(f"{copies=}, {wrong=} and {hard=} add up to more than 1; lower one of them")
    return counts


def _bitmaps(symbols: str) -> list[list[Image.Image]]:
    """Each symbol at each pen width, white on black, centred on a canvas: drawn once, bent many times."""
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError as error:
        raise MissingExtra.of("pillow", "images", "drawing glyphs") from error
    font = ImageFont.load_default(0.9 * _CANVAS)
    middle = _CANVAS / 2

    def one(symbol: str, stroke: int) -> Image.Image:
        canvas = Image.new("L", (_CANVAS, _CANVAS), 0)
        left, top, right, bottom = ImageDraw.Draw(canvas).textbbox((0, 0), symbol, font=font, stroke_width=stroke)
        corner = (middle - (left + right) / 2, middle - (top + bottom) / 2)
        ImageDraw.Draw(canvas).text(corner, symbol, fill=255, font=font, stroke_width=stroke)
        return canvas

    return [[one(symbol, stroke) for stroke in _STROKES] for symbol in symbols]


def _draw(
    rng: np.random.Generator,
    bitmaps: list[list[Image.Image]],
    labels: npt.NDArray[np.int64],
    hard: npt.NDArray[np.bool_],
    size: int,
) -> npt.NDArray[np.uint8]:
    """One chunk of images, uint8 [len(labels), size, size]."""
    b = len(labels)
    # A whole chunk of numbers is drawn even for a short one, so that image i does not depend on n.
    u: _F32 = rng.random((_CHUNK, _DRAWS), np.float32)[:b]
    noise: _F32 = rng.standard_normal((_CHUNK, size, size), np.float32)[:b]
    other = rng.integers(0, len(bitmaps), _CHUNK)[:b]

    ink = _bend(bitmaps, labels, u[:, :8], hard, size)
    ink = _blur(ink, u[:, 8] * np.where(hard, 1.0, 0.7))
    clutter = _bend(bitmaps, other, u[:, [9, 1, 2, 3, 4, 10, 11, 7]], hard, size, aside=True)

    # A background with a slope in a random direction, glyphs lighter or darker than it, and grain.
    line = np.linspace(-0.5, 0.5, size, dtype=np.float32)
    angle = 2 * np.pi * u[:, 12]
    slope = (0.1 + 0.4 * u[:, 13])[:, None, None]
    ramp = slope * (np.cos(angle)[:, None, None] * line[:, None] + np.sin(angle)[:, None, None] * line)
    contrast = np.where(hard, 0.3, 0.4) + np.where(hard, 0.25, 0.4) * u[:, 14]
    sign = np.where(u[:, 15] < 0.5, -1.0, 1.0)
    level = 0.5 - sign * contrast / 2 + 0.1 * (u[:, 16] - 0.5)
    grain = 0.02 + 0.06 * u[:, 17]
    marks = np.maximum(ink, 0.7 * clutter)
    marks[_bar(u[:, 18], u[:, 19], size) & hard[:, None, None]] = 0.0
    light = level[:, None, None] + ramp + (sign * contrast)[:, None, None] * marks + grain[:, None, None] * noise
    return _to_bytes(light)


def _bend(
    bitmaps: list[list[Image.Image]],
    labels: npt.NDArray[np.int64],
    u: _F32,
    hard: npt.NDArray[np.bool_],
    size: int,
    *,
    aside: bool = False,
) -> _F32:
    """Glyphs through random affine maps, float32 [B, size, size] in [0, 1]; `aside` puts them half outside."""
    from PIL import Image

    s = 2 * u - 1
    turn = np.radians(np.where(hard, 36.0, 20.0) * s[:, 0])
    shear = np.where(hard, 0.4, 0.25) * s[:, 1]
    height = 0.62 + 0.38 * u[:, 2]
    width = height * (1 + np.where(hard, 0.35, 0.25) * s[:, 3])
    dx, dy = 0.14 * s[:, 5], 0.14 * s[:, 6]
    if aside:
        reach = 0.62 * np.where(s[:, 5] < 0, -1, 1)
        dx, dy = reach + 0.12 * s[:, 6], 0.7 * s[:, 4]
    pens: list[int] = np.minimum((u[:, 7] * len(_STROKES)).astype(np.int64), len(_STROKES) - 1).tolist()
    symbols: list[int] = labels.tolist()

    # Pillow wants the map from output pixel to canvas pixel: undo the shift, then scale, shear and turn.
    cos, sin = np.cos(turn), np.sin(turn)
    unit = _CANVAS / size
    a, b = unit * (cos + shear * sin) / width, unit * (sin - shear * cos) / width
    d, e = -unit * sin / height, unit * cos / height
    centre_x, centre_y = size * (0.5 + dx), size * (0.5 + dy)
    c = _CANVAS / 2 - a * centre_x - b * centre_y
    f = _CANVAS / 2 - d * centre_x - e * centre_y
    maps: list[tuple[float, ...]] = [tuple(row) for row in np.stack([a, b, c, d, e, f], axis=1).tolist()]

    out = np.empty((len(labels), size, size), np.uint8)
    for i, (symbol, pen, data) in enumerate(zip(symbols, pens, maps, strict=True)):
        bent = bitmaps[symbol][pen].transform((size, size), Image.Transform.AFFINE, data, Image.Resampling.BILINEAR)
        out[i] = np.frombuffer(bent.tobytes(), np.uint8).reshape(size, size)
    return out.astype(np.float32) / np.float32(255)


def _blur(x: _F32, strength: npt.NDArray[Any]) -> _F32:
    """Mix each pixel with its neighbours along rows, then columns; `strength` 0 (sharp) to 1, float [B]."""
    side: _F32 = np.asarray(strength / 3, np.float32)[:, None, None]
    for axis in (1, 2):
        ends = np.roll(x, 1, axis) + np.roll(x, -1, axis)
        x = np.asarray(x + side * (ends - x - x), np.float32)
    return x


def _bar(where: _F32, angle: _F32, size: int) -> npt.NDArray[np.bool_]:
    """A straight bar across each image, off its centre, at a random angle: bool [B, size, size]."""
    line = np.linspace(-0.5, 0.5, size, dtype=np.float32)
    theta = np.pi * angle[:, None, None]
    across = np.cos(theta) * line[:, None] + np.sin(theta) * line
    return np.abs(across - (0.4 * where[:, None, None] - 0.2)) < 0.04


def _near_copy(rng: np.random.Generator, originals: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Each image moved by at most a pixel, slightly lighter or darker, with a little new grain."""
    b = len(originals)
    size: int = originals.shape[1]
    steps = rng.integers(-1, 2, (_CHUNK, 2))[:b]
    gain = rng.uniform(-0.03, 0.03, _CHUNK)[:b, None, None]
    grain: _F32 = rng.standard_normal((_CHUNK, size, size), np.float32)[:b] * np.float32(0.012)
    line = np.arange(size)
    rows = np.clip(line + steps[:, :1], 0, size - 1)
    columns = np.clip(line + steps[:, 1:], 0, size - 1)
    moved = originals[np.arange(b)[:, None, None], rows[:, :, None], columns[:, None, :]]
    return _to_bytes(moved / np.float32(255) + gain + grain)


def _to_bytes(light: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return np.clip(light * 255 + 0.5, 0, 255).astype(np.uint8)
