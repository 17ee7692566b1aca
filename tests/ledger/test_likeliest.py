"""The likeliest classes of many samples at once, and how votes are averaged over visits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from salience.ledger.ledger import averaged_votes
from salience.ledger.likeliest import likeliest, strongest
from salience.ledger.statistics import LOGIT_ROWS, MAX_CLASSES_TRANSPOSED, NO_CLASS_LOG_P, reduce_batch


@pytest.mark.parametrize("classes", [4, 5, 10, 13, 256])
def test_the_four_likeliest_are_those_of_topk(classes):
    log_p = torch.log_softmax(3 * torch.randn(classes, 500, generator=torch.Generator().manual_seed(0)), 0)
    values, which = likeliest(log_p.numpy())
    wanted, order = log_p.topk(4, 0)
    np.testing.assert_array_equal(values, wanted.numpy())
    np.testing.assert_array_equal(which, order.numpy())


def test_of_equal_classes_the_first_ones_are_taken():
    _, which = likeliest(np.full((9, 3), -2.0, dtype=np.float32))
    assert which.T.tolist() == [[0, 1, 2, 3]] * 3
    _, which = strongest(np.zeros((5, 2), dtype=np.float32), np.tile(np.int32([[8], [3], [5], [1], [9]]), 2))
    assert which.T.tolist() == [[1, 3, 5, 8]] * 2


def test_certainty_and_impossibility_have_their_places():
    log_p = np.array([[-1e4], [0.0], [-1e4], [-0.0], [-1e-30]], dtype=np.float32)
    values, which = likeliest(log_p)
    assert which[:, 0].tolist() == [1, 3, 4, 0]
    np.testing.assert_array_equal(values[:, 0], np.float32([0, 0, -1e-30, -1e4]))


@pytest.mark.parametrize("classes", [1, 2, 3])
def test_fewer_classes_than_votes_leave_votes_without_probability(classes):
    logits, targets = torch.randn(6, classes), torch.zeros(6, dtype=torch.int64)
    _, values = reduce_batch(torch.ones(6), logits, targets)
    rows = dict(zip(LOGIT_ROWS, values, strict=True))
    for k in range(4):
        assert bool((rows[f"log_{k}"] == NO_CLASS_LOG_P).all()) == (k >= classes)
        assert rows[f"class_{k}"].max() < classes


@pytest.mark.parametrize("classes", [2, 40])
def test_few_classes_and_many_give_the_same_statistics(classes):
    g = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(64, classes, generator=g), torch.randint(0, classes, (64,), generator=g)
    none = torch.full((64, MAX_CLASSES_TRANSPOSED), -torch.inf)
    _, few = reduce_batch(torch.ones(64), logits, targets)
    _, many = reduce_batch(torch.ones(64), torch.cat((logits, none), 1), targets)
    at = [k for k, name in enumerate(LOGIT_ROWS) if name not in ("log_2", "log_3", "class_2", "class_3")]
    torch.testing.assert_close(few[at], many[at])


def test_votes_are_an_average_over_the_classes_that_either_side_names():
    rng = np.random.default_rng(0)
    t = np.zeros((12, 200))
    vote, strength = np.zeros((4, 200), dtype=np.int32), np.zeros((4, 200), dtype=np.float32)
    for visit in range(6):
        p = rng.dirichlet(np.full(12, 0.3), 200).T
        decay = rng.uniform(0.3, 0.9, 200).astype(np.float32)
        top = np.argsort(-p, axis=0)[:4]
        cut = np.where((p[:, None] >= np.take_along_axis(p, top[3:], 0)[None])[:, 0], p, 0)
        t = cut if visit == 0 else decay * t + (1 - decay) * cut
        named = np.argsort(-t, axis=0)[:4]
        t = np.where(np.isin(np.arange(12)[:, None] + 12 * np.arange(200), named + 12 * np.arange(200)), t, 0)
        seen = np.take_along_axis(p, top, 0).astype(np.float32)
        vote, strength = averaged_votes(vote, strength, top.astype(np.int32), seen, decay)
        np.testing.assert_array_equal(vote, named)
        np.testing.assert_allclose(strength, np.take_along_axis(t, named, 0), rtol=1e-5)
