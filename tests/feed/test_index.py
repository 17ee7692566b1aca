"""The byte index goes to a file and back, opens fast because names are arrays, and refuses what leads outside."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from salience.errors import DataError, StateError
from salience.feed.index import Index, Names, check_path, classes_of, folders_of


def index() -> Index:
    return Index(
        names=Names.of(["a/1.jpg", "b/ü.jpg", "b/3.jpg"]), shards=("00.tar", "01.tar"), shard_sizes=np.array([100, 50]),
        shard=np.array([0, 0, 1], np.int32), offset=np.array([0, 60, 10]), size=np.array([40, 40, 40]),
        check=np.array([1, 2, 2**64 - 1], np.uint64), label=np.array([0, 1, 1], np.int32), classes=("a", "b"),
    )  # fmt: skip


def test_an_index_goes_to_a_file_and_back(tmp_path):
    index().save(tmp_path / "index.npz")
    again = Index.load(tmp_path / "index.npz")
    assert [again.names[i] for i in range(3)] == ["a/1.jpg", "b/ü.jpg", "b/3.jpg"]
    assert (again.shards, again.classes) == (("00.tar", "01.tar"), ("a", "b"))
    assert [again.path(i) for i in range(3)] == ["00.tar", "00.tar", "01.tar"]
    assert again.check[2] == 2**64 - 1
    assert again.nbytes == 120


def test_an_object_of_its_own_is_its_own_path():
    alone = replace(index(), shards=(), shard_sizes=np.empty(0, np.int64), shard=np.full(3, -1, np.int32))
    alone.validate("x")
    assert alone.path(1) == "b/ü.jpg"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"offset": np.array([0, 70, 10])}, "end after their shard"),
        ({"offset": np.array([-1, 60, 10])}, "negative"),
        ({"size": np.array([1, 2])}, "differ in length"),
        ({"shard": np.array([0, 0, 2], np.int32)}, "does not list"),
        ({"shards": ("../x.tar", "01.tar")}, "leads outside"),
        ({"label": np.array([0, 1, 2], np.int32)}, "labels of classes"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(change, said):
    with pytest.raises(DataError, match=said):
        replace(index(), **change).validate("some.npz")


def test_a_file_that_is_none_is_refused(tmp_path):
    (tmp_path / "index.npz").write_bytes(b"rubbish")
    with pytest.raises(StateError, match="byte index"):
        Index.load(tmp_path / "index.npz")


@pytest.mark.parametrize("path", ["", "/etc/passwd", "a/../../b", "..", "a\\..\\b", "a\0b"])
def test_paths_that_lead_outside_are_refused(path):
    with pytest.raises(DataError, match="leads outside"):
        check_path(path, "here")


def test_the_class_is_the_first_directory_below_the_root():
    classes, label = classes_of(["b/x/1", "a/x/2", "b/y/deep/3", "b/4"])
    assert classes == ("a", "b")
    assert label.tolist() == [1, 0, 1, 1]
    assert classes_of(["1", "a/2"])[0] == ()


def test_a_lone_directory_of_directories_is_left_out():
    assert classes_of(["x/b/1", "x/a/2", "x/b/3"])[0] == ("a", "b")
    assert classes_of(["x/1", "x/a/2"])[0] == ("x",)


def test_splits_are_no_classes():
    paths = ["x/train/a/1", "x/val/b/2", "x/extra/3"]
    assert folders_of(paths) == [("train", "a"), ("val", "b"), ("", "")]
    assert classes_of(paths[:2])[0] == ("a", "b")
    assert folders_of(["train/a/1", "trial/b/2"]) == [("", "train"), ("", "trial")]
