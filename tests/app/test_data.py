"""Folders, tars and packed shards give the same images, classes and splits; what cannot be trained on is said."""

from __future__ import annotations

import gzip
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

import salience
from salience.app.data import Split, open_split, pixel_statistics
from salience.errors import BrokenSample, DataError

RED, GREEN, BLUE = (200, 10, 10), (10, 200, 10), (10, 10, 200)
PLAIN = ("cat/b.png", "cat/a.png", "dog/deep/er/c.png", "dog/d.bmp", "ant/e.png", "ant/f.png")


def make(root: Path, *names: str, size: int = 16) -> Path:
    """Images of one colour; what is not called like one is a text."""
    for i, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix in (".png", ".bmp", ".PNG"):
            Image.new("RGB", (size + 4, size), (10 * i, 100, 50)).save(path)
        else:
            path.write_text("no image")
    return root


def packed(root: Path, mode: str = "w") -> Path:
    path = root.with_suffix(".tar.gz" if mode == "w:gz" else ".tar")
    with tarfile.open(path, mode) as archive:  # pyright: ignore[reportCallIssue, reportArgumentType]
        for part in sorted(root.iterdir()):
            archive.add(part, part.name)
    return path


def every_name(split: Split) -> list[str]:
    tested = split.test.source.names  # pyright: ignore[reportAttributeAccessIssue]
    return sorted([*(split.names[i] for i in range(len(split))), *(tested[i] for i in range(len(tested)))])


@pytest.fixture(params=["folder", "tar", "tar.gz", "shards"])
def as_data(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes of a folder what `--data` is given."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))

    def made(root: Path) -> Path:
        if request.param == "shards":
            pytest.importorskip("xxhash")
            from salience.feed.pack import PackSettings, pack

            pack(root, tmp_path / "shards", PackSettings())
            return tmp_path / "shards"
        return root if request.param == "folder" else packed(root, "w:gz" if request.param == "tar.gz" else "w")

    return made


def test_classes_are_the_first_folders_whatever_the_data_come_in(as_data, tmp_path: Path):
    data = as_data(make(tmp_path / "data", *PLAIN, "dog/.hidden.png"))
    split = open_split(str(data))
    assert split.classes == ("ant", "cat", "dog")
    assert every_name(split) == sorted(PLAIN)
    assert (len(split), split.tested) == (3, 3)  # one of two of each class is held out
    assert [split.names[i] for i in range(3)] == ["ant/e.png", "cat/a.png", "dog/d.bmp"]  # the same ids everywhere
    assert [split.classes[k] for k in split.labels] == [split.names[i].split("/")[0] for i in range(3)]


@pytest.mark.parametrize("as_tar", [False, True])
def test_a_source_has_the_same_classes(tmp_path: Path, as_tar: bool):
    root = make(tmp_path / "data", *PLAIN)
    data = str(packed(root) if as_tar else root)
    assert salience.Source(data).classes == open_split(data).classes == ("ant", "cat", "dog")


@pytest.mark.parametrize(
    ("names", "classes"),
    [
        (("cat/x/1.png", "cat/x/2.png", "dog/x/3.png", "dog/x/4.png"), ("cat", "dog")),
        (("cat/x/1.png", "cat/x/2.png", "cat/y/3.png", "cat/y/4.png"), ("x", "y")),
        (("cat/x/1.png", "cat/x/2.png", "cat/3.png", "dog/4.png", "dog/5.png"), ("cat", "dog")),
        (("a/b/x/1.png", "a/b/x/2.png", "a/c/x/3.png", "a/c/x/4.png"), ("b", "c")),
    ],
)
def test_train_source_and_pack_find_the_same_classes_in_a_folder(tmp_path: Path, names, classes):
    pytest.importorskip("xxhash")
    from salience.feed.pack import PackSettings, pack

    root = make(tmp_path / "data", *names)
    index = pack(root, tmp_path / "shards", PackSettings())
    found = {}
    for door, source in (("source", salience.Source(root)), ("pack", salience.Source(tmp_path / "shards"))):
        found[door] = {source.names[i]: source.classes[k] for i, k in enumerate(source.labels.tolist())}
    assert index.classes == classes
    assert sorted(set(found["source"].values())) == list(classes)
    assert found["source"] == found["pack"]
    for data in (root, tmp_path / "shards"):
        split = open_split(str(data))
        assert split.classes == classes
        assert [split.classes[k] for k in split.labels] == [found["source"][split.names[i]] for i in range(len(split))]


def test_files_that_are_no_images_are_left_out(tmp_path: Path):
    root = make(tmp_path / "data", *PLAIN, "README.md", "dog/notes.txt", "docs/x.txt", ".git/x.png")
    split = open_split(str(root))
    assert split.classes == ("ant", "cat", "dog")
    assert every_name(split) == sorted(PLAIN)


@pytest.mark.parametrize("wrapper", ["", "cifar10/"])
@pytest.mark.parametrize("held_out", ["test", "val", "valid", "validation"])
@pytest.mark.parametrize("as_tar", [False, True])
def test_splits_are_found_also_inside_a_wrapper(tmp_path: Path, wrapper: str, held_out: str, as_tar: bool):
    files = [f"{wrapper}train/{name}" for name in ("a/1.png", "b/2.png", "c/3.png")]
    files += [f"{wrapper}{held_out}/a/4.png", f"{wrapper}{held_out}/c/5.png", f"{wrapper}README.md"]
    root = make(tmp_path / "x", *files)
    split = open_split(str(packed(root) if as_tar else root))
    # c is class 2 in both, although the held-out split has no b.
    assert split.classes == ("a", "b", "c")
    assert split.labels.tolist() == [0, 1, 2]
    assert [int(y) for _, y in DataLoader(split.test)] == [0, 2]


def test_of_several_test_splits_the_first_is_taken(tmp_path: Path):
    root = make(tmp_path / "x", "train/a/1.png", "val/a/2.png", "val/a/3.png", "test/b/4.png")
    split = open_split(str(root))
    assert (split.tested, split.classes) == (1, ("a", "b"))


@pytest.mark.parametrize("as_tar", [False, True])
def test_a_wrapper_is_stepped_through_and_a_lone_folder_of_images_is_the_only_class(tmp_path: Path, as_tar: bool):
    wrapped, alone = make(tmp_path / "x", "data/a/1.png", "data/a/2.png"), make(tmp_path / "y", "a/1.png", "a/2.png")
    for root in (wrapped, alone):
        assert open_split(str(packed(root) if as_tar else root)).classes == ("a",)


def test_of_a_tar_member_written_twice_the_last_one_counts(tmp_path: Path):
    root = make(tmp_path / "x", "a/1.png", "a/2.png")
    tar = packed(root)
    Image.new("RGB", (16, 16), RED).save(root / "a/1.png")
    with tarfile.open(tar, "a") as archive:
        archive.add(root / "a/1.png", "a/1.png")
    split = open_split(str(tar))
    assert every_name(split) == ["a/1.png", "a/2.png"]
    pixels = split.pixels([[split.names[i] for i in range(len(split))].index("a/1.png")])[0]
    assert pixels is not None
    assert pixels[:, 8, 8].tolist() == list(RED)


def test_classes_of_a_tar_may_be_said_in_it(tmp_path: Path):
    root = make(tmp_path / "x", "1.png", "2.png", "3.png", "4.png")
    for i in range(1, 5):
        (root / f"{i}.cls").write_text("dog" if i < 3 else "cat")
    split = open_split(str(packed(root)))
    assert split.classes == ("cat", "dog")
    assert split.labels.tolist() == [1, 0]


def test_names_that_are_not_utf8_survive(tmp_path: Path):
    names = [os.fsdecode(b"a\xff/\xe9.png"), os.fsdecode(b"a\xff/x.png")]
    try:
        root = make(tmp_path / "x", *names)
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    split = open_split(str(root))
    assert every_name(split) == sorted(names)
    assert split.classes == (os.fsdecode(b"a\xff"),)


def test_links_in_a_circle_end(tmp_path: Path):
    root = make(tmp_path / "x", *PLAIN)
    (root / "cat" / "again").symlink_to(root / "cat")
    assert every_name(open_split(str(root))) == sorted(PLAIN)


def test_a_loader_gets_pixels_and_labels_and_workers_the_same(tmp_path: Path):
    root = tmp_path / "data"
    for name, colour in (("a", RED), ("b", GREEN), ("c", BLUE)):
        (root / name).mkdir(parents=True)
        for i in range(4):
            Image.new("RGB", (20, 16), colour).save(root / name / f"{i}.png")
    split = open_split(str(root))
    for workers in (0, 2):
        for x, y in salience.Loader(split.train, 3, num_workers=workers):
            assert (x.dtype, x.shape[1:]) == (torch.uint8, (3, 16, 16))
            for pixels, label in zip(x, y, strict=True):
                assert tuple(pixels[:, 8, 8].tolist()) == (RED, GREEN, BLUE)[label]


def test_an_unstated_size_is_the_first_image_s_up_to_224(tmp_path: Path):
    assert open_split(str(make(tmp_path / "x", "a/1.png", "a/2.png", size=18))).size == 18
    assert open_split(str(make(tmp_path / "y", "a/1.png", "a/2.png", size=300))).size == 224
    assert open_split(str(tmp_path / "y"), size=20).size == 20


@pytest.mark.parametrize("content", [b"", b"rubbish", None])
def test_a_broken_image_is_named_with_its_cause_and_a_remedy(tmp_path: Path, content: bytes | None):
    root = make(tmp_path / "x", "train/a/1.png", "test/a/1.png", "test/b/1.png")
    file = root / "test" / "b" / "1.png"
    if content is None:
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)).save(file)
        content = file.read_bytes()[:-3000]
    file.write_bytes(content)
    split = open_split(str(root))
    with pytest.raises(BrokenSample, match=r"image 'test/b/1\.png' of .* cannot be read .*; delete or replace it"):
        list(DataLoader(split.test, batch_size=2))


def test_a_file_that_vanished_is_a_broken_image(tmp_path: Path):
    split = open_split(str(make(tmp_path / "x", "train/a/1.png", "test/a/1.png")))
    (tmp_path / "x" / "test" / "a" / "1.png").unlink()
    with pytest.raises(BrokenSample, match=r"test/a/1\.png.*it is not there"):
        _ = split.test[0]


def test_pixel_statistics_leave_broken_images_out(tmp_path: Path):
    root = make(tmp_path / "x", *(f"a/{i}.png" for i in range(9)))
    for i in range(9):
        Image.new("RGB", (16, 16), (51, 102, 153)).save(root / f"a/{i}.png")
    split = open_split(str(root))
    (root / split.names[1]).write_bytes(b"no image")
    mean, std = pixel_statistics(split)
    assert mean == pytest.approx([0.2, 0.4, 0.6])
    assert std == pytest.approx([1e-3] * 3)
    for i in range(9):
        (root / f"a/{i}.png").write_bytes(b"no image")
    with pytest.raises(DataError, match="None of the 8 images"):
        pixel_statistics(split)


@pytest.mark.parametrize("as_tar", [False, True])
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (("notes.txt",), "contains no images"),
        (("a/notes.txt",), "contains no images"),
        (("1.png",), "no class folders"),
        (("train/1.png", "test/a/1.png"), "no class folders"),
        (("a/1.png", "b/2.png"), "there is none to hold out"),
    ],
)
def test_what_cannot_be_trained_on_is_said(tmp_path: Path, content: tuple[str, ...], said: str, as_tar: bool):
    root = make(tmp_path / "x", *content)
    with pytest.raises(DataError, match=said):
        open_split(str(packed(root) if as_tar else root))


def test_a_missing_or_empty_place_is_named(tmp_path: Path):
    with pytest.raises(DataError, match=r"there is no file or folder .*nowhere"):
        open_split(str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty is empty; make a folder for each class"):
        open_split(str(tmp_path / "empty"))


@pytest.mark.parametrize("keep", [512 + 100, 512 + 512, 1536, 3 * 1024])
def test_a_truncated_tar_is_refused(tmp_path: Path, keep: int):
    tar = packed(make(tmp_path / "x", "a/1.png", "a/2.png", "a/3.png"))
    tar.write_bytes(tar.read_bytes()[:keep])
    with pytest.raises(DataError, match=r"cut off|damaged"):
        open_split(str(tar))


@pytest.mark.parametrize(
    "content",
    [b"PK\x03\x04 a zip", b"x" * 5000, gzip.compress(b"x" * 5000, mtime=0)],
    ids=["zip", "text", "gzip"],
)
def test_a_file_that_is_no_tar_is_refused(tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    (tmp_path / "x.tar").write_bytes(content)
    with pytest.raises(DataError, match=r"not a tar|cut off"):
        open_split(str(tmp_path / "x.tar"))
    (tmp_path / "x.zip").write_bytes(content[:1] + content)
    with pytest.raises(DataError, match=r"x\.zip is not a tar archive"):
        open_split(str(tmp_path / "x.zip"))


def test_members_that_point_outside_are_refused(tmp_path: Path):
    make(tmp_path / "x", "a/1.png")
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        archive.add(tmp_path / "x" / "a" / "1.png", "../a/2.png")
    with pytest.raises(DataError, match="leads outside"):
        open_split(str(tmp_path / "x.tar"))
