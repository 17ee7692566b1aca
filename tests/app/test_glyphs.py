"""Glyphs promise exact shares, known truth and the same bytes every time."""

from __future__ import annotations

import numpy as np
import pytest

from salience.app.glyphs import SYMBOLS, Glyphs, render
from salience.errors import ConfigError


@pytest.fixture(scope="module")
def glyphs() -> Glyphs:
    return render(1000, seed=3)


def test_shares_are_exact(glyphs: Glyphs):
    assert len(glyphs) == 1000
    assert (glyphs.copy_of >= 0).sum() == 150
    assert glyphs.wrong.sum() == 50
    assert glyphs.hard.sum() == 100


def test_arrays_have_the_stated_types_and_shapes(glyphs: Glyphs):
    assert glyphs.images.shape == (1000, 32, 32)
    assert glyphs.images.dtype == np.uint8
    assert glyphs.labels.dtype == glyphs.true_labels.dtype == glyphs.copy_of.dtype == np.int64
    assert glyphs.wrong.dtype == glyphs.hard.dtype == np.bool_


def test_a_label_is_wrong_exactly_where_it_is_marked_wrong(glyphs: Glyphs):
    np.testing.assert_array_equal(glyphs.labels != glyphs.true_labels, glyphs.wrong)
    assert 0 <= glyphs.labels.min() <= glyphs.labels.max() < 10


def test_wrong_labels_fall_on_every_other_class_alike():
    set_ = render(8000, classes=4, wrong=0.5, copies=0, hard=0, size=16)
    steps = np.bincount(((set_.labels - set_.true_labels) % 4)[set_.wrong], minlength=4)
    assert steps[0] == 0
    assert abs(steps[1:] / 4000 - 1 / 3).max() < 4 * np.sqrt(2 / 9 / 4000)


def test_originals_are_plain_and_copies_share_their_labels(glyphs: Glyphs):
    copies = np.flatnonzero(glyphs.copy_of >= 0)
    originals = glyphs.copy_of[copies]
    assert (glyphs.copy_of[originals] == -1).all()
    assert not glyphs.hard[originals].any()
    assert not glyphs.wrong[originals].any()
    assert not glyphs.hard[copies].any()
    np.testing.assert_array_equal(glyphs.true_labels[copies], glyphs.true_labels[originals])
    right = ~glyphs.wrong[copies]
    np.testing.assert_array_equal(glyphs.labels[copies][right], glyphs.labels[originals][right])


def test_a_copy_is_near_its_original_but_not_identical(glyphs: Glyphs):
    copies = np.flatnonzero(glyphs.copy_of >= 0)
    images = glyphs.images.astype(np.float32)
    originals, others = images[glyphs.copy_of[copies]], images[np.roll(glyphs.copy_of[copies], 1)]
    to_own = np.abs(images[copies] - originals).mean((1, 2))
    to_other = np.abs(images[copies] - others).mean((1, 2))
    assert (to_own > 0).all()
    assert (to_own < to_other).mean() > 0.97
    assert to_own.mean() < to_other.mean() / 3


def test_classes_are_equally_frequent():
    counts = np.bincount(render(360, classes=36, copies=0, size=16).true_labels)
    assert counts.tolist() == [10] * 36


def test_the_same_arguments_give_the_same_bytes(glyphs: Glyphs):
    again = render(1000, seed=3)
    for field in ("images", "labels", "true_labels", "wrong", "hard", "copy_of"):
        np.testing.assert_array_equal(getattr(glyphs, field), getattr(again, field))


def test_the_global_random_state_is_neither_read_nor_set():
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    render(10)
    np.testing.assert_array_equal(before, np.random.get_state()[1])  # noqa: NPY002


def test_an_image_does_not_depend_on_how_many_are_rendered():
    few, many = (render(n, copies=0, wrong=0, hard=0) for n in (70, 700))
    np.testing.assert_array_equal(few.images, many.images[:70])
    np.testing.assert_array_equal(few.labels, many.labels[:70])


def test_splits_and_seeds_draw_different_images():
    one, other, third = (
        render(50, seed=seed, split=split) for seed, split in ((0, "train"), (0, "test"), (1, "train"))
    )
    assert (one.images != other.images).any((1, 2)).all()
    assert (one.images != third.images).any((1, 2)).all()


def test_hard_images_have_less_contrast_than_plain_ones(glyphs: Glyphs):
    spread = glyphs.images.astype(np.float32).std((1, 2))
    assert spread[glyphs.hard].mean() < spread[~glyphs.hard].mean()


@pytest.mark.parametrize("n", [0, 1, 2, 257])
def test_any_number_of_images_can_be_rendered(n: int):
    set_ = render(n, size=16)
    assert set_.images.shape == (n, 16, 16)
    assert set_.copy_of.max(initial=-1) < n


def test_progress_counts_up_to_the_total():
    calls: list[tuple[int, int]] = []
    render(600, size=16, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(256, 600), (512, 600), (600, 600)]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"n": -1}, "n=-1"),
        ({"classes": 1}, "classes=1"),
        ({"classes": len(SYMBOLS) + 1}, "classes=37"),
        ({"size": 8}, "size=8"),
        ({"seed": -1}, "seed=-1"),
        ({"wrong": 1.5}, r"wrong=1\.5"),
        ({"copies": 0.5, "hard": 0.5, "wrong": 0.5}, "more than 1"),
        ({"n": 1, "copies": 1.0, "hard": 0, "wrong": 0}, "no plain image"),
    ],
)
def test_impossible_arguments_are_refused_by_name(options: dict[str, float], named: str):
    with pytest.raises(ConfigError, match=named):
        render(**{"n": 10, **options})  # pyright: ignore[reportArgumentType]
