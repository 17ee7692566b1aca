"""Every kind of image becomes pixels of one size."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from salience.app.pixels import Decode, decode
from salience.errors import ConfigError, MissingExtra


def test_the_shorter_side_is_resized_and_the_middle_cut_out(tmp_path: Path):
    stripes = np.zeros((20, 60, 3), np.uint8)
    stripes[:, 20:40] = 255
    Image.fromarray(stripes).save(tmp_path / "wide.png")
    pixels = decode((tmp_path / "wide.png").read_bytes(), 10, 3)
    assert pixels.shape == (3, 10, 10)
    assert (pixels[:, :, 1:-1] == 255).all()


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGB", "RGBA", "1", "I;16", "CMYK"])
@pytest.mark.parametrize("channels", [1, 3])
def test_every_colour_mode_is_decoded(tmp_path: Path, mode: str, channels: int):
    if mode == "I;16":
        image = Image.fromarray(np.full((12, 12), 200 * 256, np.uint16))
    else:
        image = Image.new("L", (12, 12), 255 if mode == "1" else 200).convert(mode)
    suffix = "jpg" if mode == "CMYK" else "png"
    options = {"transparency": bytes([0] * 256)} if mode == "P" else {}
    image.save(tmp_path / f"x.{suffix}", **options)
    pixels = decode((tmp_path / f"x.{suffix}").read_bytes(), 8, channels)
    assert pixels.shape == (channels, 8, 8)
    assert abs(int(pixels[0, 4, 4]) - (255 if mode == "1" else 200)) <= 3


def test_a_large_jpeg_shrunk_while_decoding_looks_as_it_should(tmp_path: Path):
    ramp = np.tile(np.linspace(0, 255, 640).astype(np.uint8), (640, 1))
    Image.fromarray(ramp).convert("RGB").save(tmp_path / "x.jpg", quality=95)
    pixels = decode((tmp_path / "x.jpg").read_bytes(), 64, 3)
    expected = ramp.reshape(64, 10, 64, 10).mean((1, 3))
    assert np.abs(pixels[0] - expected).max() < 6


def test_a_decoder_can_be_sent_to_workers(tmp_path: Path):
    Image.new("RGB", (20, 16), (200, 10, 10)).save(tmp_path / "x.png")
    made = pickle.loads(pickle.dumps(Decode(8)))((tmp_path / "x.png").read_bytes())
    assert made.shape == (3, 8, 8)
    assert made[:, 4, 4].tolist() == [200, 10, 10]


def test_impossible_options_are_refused():
    with pytest.raises(ConfigError, match="channels=2"):
        Decode(8, channels=2)
    with pytest.raises(ConfigError, match="size=0"):
        Decode(0)


def test_without_pillow_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtra, match=r"salience\[images\]"):
        Decode(8)(b"")
