"""Sizes of images: the curves, the multiples, and one size per batch."""

from __future__ import annotations

import pytest
import torch

from salience.errors import ConfigError
from salience.treat import Treat
from salience.treat.resolution import RESOLUTION_CURVES, curve_of, multiple_of, resized, share_at, side_of


@pytest.mark.parametrize(("full", "multiple"), [(224, 32), (128, 16), (64, 8), (32, 4), (28, 4), (8, 1)])
def test_sides_are_multiples_that_leave_at_least_seven_cells(full, multiple):
    assert multiple_of(full) == multiple


@pytest.mark.parametrize(
    ("full", "share", "side"),
    [(224, 0.72, 160), (32, 0.75, 24), (32, 0.6, 20), (28, 0.5, 16), (32, 0.01, 4), (33, 1.0, 33)],
)
def test_a_share_becomes_the_nearest_multiple(full, share, side):
    assert side_of(full, share) == side


def test_curves_go_where_they_say():
    at = [0.0, 0.05, 0.3, 0.59, 0.6, 0.9]
    assert [curve_of("rise", 0.5, 0.6)(p) for p in at] == [0.5, 0.5, 0.5, 0.5, 1, 1]
    assert [curve_of("valley", 0.5, 0.6)(p) for p in at] == [1, 1, 0.5, 0.5, 1, 1]
    assert [curve_of("ramp", 0.5, 0.6)(p) for p in at] == pytest.approx([0.5, 0.5417, 0.75, 0.9917, 1, 1], abs=1e-4)


@pytest.mark.parametrize("name", RESOLUTION_CURVES)
@pytest.mark.parametrize("windows", [1, 2, 20])
def test_the_last_window_is_at_full_size(name, windows):
    assert share_at(curve_of(name, 0.5, 1.0), windows - 1, windows) == 1


def test_a_curve_that_gives_no_share_is_an_error_with_the_value():
    with pytest.raises(ConfigError, match=r"gave 1\.5 at progress 0.5"):
        share_at(lambda progress: 1.5, 5, 10)


def test_wrong_settings_are_refused_at_once():
    with pytest.raises(ConfigError, match="Did you mean 'rise'"):
        Treat("resolution", sizes="rize")
    with pytest.raises(ConfigError, match="low is 0"):
        Treat("resolution", low=0)
    with pytest.raises(ConfigError, match="until is 2"):
        Treat("resolution", until=2)


def test_images_keep_type_and_mean_and_memory_format():
    x = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0)).contiguous(
        memory_format=torch.channels_last
    )
    small = resized(x, 0.5)
    assert small.shape == (4, 3, 16, 16)
    assert small.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(small.mean((2, 3)), x.mean((2, 3)), atol=0.01, rtol=0)
    bytes_ = (255 * x).to(torch.uint8)
    assert resized(bytes_, 0.5).dtype == torch.uint8
    assert resized(x, 1.0) is x


def test_fine_detail_is_filtered_and_does_not_become_a_pattern():
    board = (torch.arange(32)[:, None] + torch.arange(32)) % 2  # every pixel differs from its neighbours
    small = resized(board.float()[None, None], 0.5)
    assert float((small[..., 2:-2, 2:-2] - 0.5).abs().max()) < 0.05
