"""An image folder gives the right pixels in every process, and names the file when it cannot."""

from __future__ import annotations

import os
import pickle
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from salience.app.folder import ImageFolder, decode
from salience.errors import BrokenSample, ConfigError, DataError, MissingExtra

RED, GREEN, BLUE = (200, 10, 10), (10, 200, 10), (10, 10, 200)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for i, (name, colour) in enumerate((("a", RED), ("b", GREEN), ("c", BLUE))):
        folder = tmp_path / "data" / name
        folder.mkdir(parents=True)
        for suffix in ("png", "bmp"):
            Image.new("RGB", (20 + i, 16), colour).save(folder / f"1.{suffix}")
    return tmp_path / "data"


@pytest.fixture
def tar(root: Path) -> Path:
    with tarfile.open(root.with_suffix(".tar"), "w") as archive:
        archive.add(root, arcname="data")
    return root.with_suffix(".tar")


@pytest.fixture(params=["folder", "tar"])
def path(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue("root" if request.param == "folder" else "tar")


def test_images_and_labels_come_by_index(path: Path, tmp_path: Path):
    images = ImageFolder(path, cache_dir=tmp_path / "cache")
    assert len(images) == 6
    assert images.classes == ("a", "b", "c")
    assert images.targets.tolist() == [0, 0, 1, 1, 2, 2]
    assert images.targets.dtype == np.int64
    assert images.name(3).endswith("b/1.png")
    for i, colour in enumerate((RED, RED, GREEN, GREEN, BLUE, BLUE)):
        x, y = images[i]
        assert x.dtype == torch.uint8
        assert x.shape == (3, 16, 16)
        assert x[:, 8, 8].tolist() == list(colour)
        assert y == images.targets[i]
        assert type(y) is int


def test_iterating_ends_after_the_last_image(path: Path, tmp_path: Path):
    assert sum(1 for _ in ImageFolder(path, cache_dir=tmp_path)) == 6  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("start", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_workers_read_the_same_as_the_main_process(path: Path, tmp_path: Path, start: str):
    images = ImageFolder(path, size=8, cache_dir=tmp_path / "cache")
    expected = torch.stack([images[i][0] for i in range(6)])  # the handle is open when workers start
    loader = DataLoader(images, batch_size=3, num_workers=2, multiprocessing_context=start)
    batches = list(loader)
    assert torch.equal(torch.cat([x for x, _ in batches]), expected)
    assert torch.cat([y for _, y in batches]).tolist() == images.targets.tolist()


def test_a_pickled_folder_leaves_its_handle_behind(tar: Path, tmp_path: Path):
    images = ImageFolder(tar, cache_dir=tmp_path)
    copy = pickle.loads(pickle.dumps(images))
    assert copy._handle is None
    assert torch.equal(copy[0][0], images[0][0])


@pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors in /proc")
def test_handles_are_closed_with_the_folder(tar: Path, tmp_path: Path):
    before = len(os.listdir("/proc/self/fd"))
    images = ImageFolder(tar, cache_dir=tmp_path)
    _ = images[0], images[1]
    assert len(os.listdir("/proc/self/fd")) == before + 1
    del images
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("content", "cause"), [(b"", "cannot identify"), (b"rubbish", "cannot identify"), (None, "trunc")]
)
def test_a_broken_image_is_named_with_its_cause_and_a_remedy(
    root: Path, tmp_path: Path, content: bytes | None, cause: str
):
    file = root / "b" / "1.png"
    if content is None:
        pixels = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
        Image.fromarray(pixels).save(file)
        content = file.read_bytes()[:-3000]
    file.write_bytes(content)
    images = ImageFolder(root, cache_dir=tmp_path / "cache")
    with pytest.raises(BrokenSample, match=rf"b/1\.png.*{cause}.*delete or replace it") as caught:
        _ = images[3]
    assert caught.value.__cause__ is not None
    assert images[4][1] == 2


def test_a_file_that_vanished_is_a_broken_sample(root: Path, tmp_path: Path):
    images = ImageFolder(root, cache_dir=tmp_path / "cache")
    (root / "a" / "1.png").unlink()
    with pytest.raises(BrokenSample, match=r"a/1\.png.*No such file"):
        _ = images[1]


def test_a_tar_cut_short_after_listing_is_a_broken_sample(tar: Path, tmp_path: Path):
    images = ImageFolder(tar, cache_dir=tmp_path / "cache")
    os.truncate(tar, int(images.listing.data_offsets[5]) + 10)
    with pytest.raises(BrokenSample, match=r"c/1\.png in .*data\.tar.*too early"):
        _ = images[5]


def test_a_broken_image_crosses_from_a_worker_as_itself(root: Path, tmp_path: Path):
    (root / "b" / "1.png").write_bytes(b"rubbish")
    loader = DataLoader(ImageFolder(root, cache_dir=tmp_path / "cache"), num_workers=1, multiprocessing_context="spawn")
    with pytest.raises(BrokenSample, match=r"b/1\.png"):
        list(loader)


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


def test_an_unstated_size_is_the_first_image_s_up_to_224(tmp_path: Path):
    (tmp_path / "x" / "a").mkdir(parents=True)
    Image.new("RGB", (500, 300)).save(tmp_path / "x" / "a" / "1.png")
    assert ImageFolder(tmp_path / "x", cache_dir=tmp_path / "cache").size == 224


def test_a_split_is_selected(tmp_path: Path):
    for name, side in (("train", 16), ("val", 18)):
        (tmp_path / "x" / name / "a").mkdir(parents=True)
        Image.new("L", (side, side), 77).save(tmp_path / "x" / name / "a" / "1.png")
    images = ImageFolder(tmp_path / "x", split="test", channels=1, cache_dir=tmp_path / "cache")
    assert images[0][0].shape == (1, 18, 18)


def test_impossible_options_are_refused(root: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match="channels=2"):
        ImageFolder(root, channels=2)
    with pytest.raises(ConfigError, match="size=0"):
        ImageFolder(root, size=0)
    with pytest.raises(DataError, match="nowhere"):
        ImageFolder(tmp_path / "nowhere")
    with pytest.raises(IndexError):
        _ = ImageFolder(root, cache_dir=tmp_path / "cache")[6]


def test_without_pillow_the_extra_is_named(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    images = ImageFolder(root, cache_dir=tmp_path / "cache")
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtra, match=r"salience\[images\]"):
        _ = images[0]
