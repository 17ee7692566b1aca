"""Each rule on an example small enough to check by hand."""

from __future__ import annotations

import math

import pytest
import torch

from salience.gradients import rules


@pytest.mark.parametrize("offset", [0, 3, 17])
@pytest.mark.parametrize("k", [1, 500, 3_000])
def test_the_guessed_threshold_finds_exactly_the_largest(k, offset):
    scores = torch.randn(100_003, generator=torch.Generator().manual_seed(0)).abs()
    found = rules.largest(scores, k, offset)
    assert set(found.tolist()) == set(scores.topk(k).indices.tolist())


@pytest.mark.parametrize("scores", [torch.zeros(50_000), torch.ones(50_000), torch.arange(50_000.0)])
def test_ties_and_sorted_scores_still_give_exactly_k_different_positions(scores):
    found = rules.largest(scores, 700)
    assert len(set(found.tolist())) == 700


def test_a_spike_the_sample_misses_is_still_found():
    scores = torch.zeros(80_000)
    scores[12_345] = 9.0
    assert 12_345 in rules.largest(scores, 10).tolist()


def test_what_is_taken_and_what_is_left_add_up_to_what_was_there():
    pool = torch.tensor([3.0, -1.001, 0.5, 7.0])
    before = pool.clone()
    sent = rules.take(pool, torch.tensor([1, 3]), 1)
    assert sent.dtype is torch.bfloat16
    back = torch.zeros(4)
    back[[1, 3]] = sent.float()
    torch.testing.assert_close(pool + back, before, atol=0, rtol=0)
    assert pool[1] != 0, "1.001 has no bfloat16; its rounding error stays"


def test_whole_kernels_are_scored_by_their_norm_and_taken_whole():
    kernels = torch.tensor([[1.0, 1, 1, 1], [0, 3, 0, 0], [1, 0, 0, 0]])
    assert rules.unit_scores(kernels.flatten(), 4).tolist() == [2, 3, 1]
    pool = kernels.flatten().clone()
    assert rules.take(pool, torch.tensor([1]), 4).tolist() == [0, 3, 0, 0]
    assert pool.view(3, 4)[1].tolist() == [0, 0, 0, 0]
    assert pool.view(3, 4)[0].tolist() == [1, 1, 1, 1]


def test_momentum_gathers_before_anything_is_chosen():
    velocity = torch.tensor([1.0, 0.0])
    rules.correct_momentum(velocity, torch.tensor([1.0, 2.0]), 0.5)
    assert velocity.tolist() == [1.5, 2.0]


def test_the_rate_falls_from_a_quarter_by_a_constant_factor():
    assert rules.warm_rate(0.01, 0, 2) == 0.25
    assert rules.warm_rate(0.01, 1, 2) == pytest.approx(0.05)  # sqrt(0.25 * 0.01)
    assert rules.warm_rate(0.01, 2, 2) == 0.01


def test_layers_share_the_budget_by_size_and_norm():
    # Wishes 10 * 1 and 20 * 2; of 1% of 500 that is 1 and 4.
    assert rules.layer_counts(0.01, [100, 400], [1.0, 2.0]) == [1, 4]
    # All of the norm in the first: at most four times the mean share of 1%, at least a quarter of it.
    assert rules.layer_counts(0.01, [1000, 4000], [1.0, 0.0]) == [40, 10]
    assert rules.layer_counts(0.01, [1000, 3], [0.0, 0.0]) == [10, 1]
    assert rules.layer_counts(0.01, [1000, 1000], [math.nan, 1.0]) == [2, 20]


def test_a_matrix_is_worth_low_rank_where_that_at_least_halves_it():
    assert rules.matrix_shape((8, 8), 2) == (8, 8)  # 2 * 2 * 16 = 64 <= 64
    assert rules.matrix_shape((8, 8), 3) is None
    assert rules.matrix_shape((64, 16, 3, 3), 1) == (64, 144)
    assert rules.matrix_shape((4096,), 1) is None


def test_columns_become_orthonormal_and_zeros_do_no_harm():
    q = rules.orthonormal(torch.tensor([[3.0, 1.0], [4.0, 1.0]]))
    torch.testing.assert_close(q.T @ q, torch.eye(2), atol=1e-6, rtol=0)
    torch.testing.assert_close(q[:, 0], torch.tensor([0.6, 0.8]))
    assert rules.orthonormal(torch.zeros(3, 2)).tolist() == [[0, 0]] * 3


def test_a_layer_waits_until_it_has_gathered_enough_or_is_too_old():
    assert not rules.travels(1.0, 1.0, 1, threshold=1.5, tau=4)
    assert rules.travels(1.5, 1.0, 1, threshold=1.5, tau=4)
    assert rules.travels(0.0, 1.0, 4, threshold=1.5, tau=4)
    assert rules.travels(math.nan, 1.0, 1, threshold=1.5, tau=4)


def test_local_steps_grow_with_the_inverse_square_of_the_rate():
    assert rules.local_steps(4, 0.0175, 0.008, 1000) == 4  # (2.1875)^2 = 4.78
    assert rules.local_steps(4, 0.0175, 0.001, 1000) == 306  # 17.5^2 = 306.25
    assert rules.local_steps(4, 0.0175, 0.0, 1000) == 1000
    assert rules.local_steps(4, None, 0.001, 1000) == 4
