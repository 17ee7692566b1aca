"""Gradients of single samples: what is near zero in them, and the loss under which nearly all of it is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from salience.signals.nearzero import by_loss, learnt_loss, near_zero


def identity() -> nn.Linear:
    """Logits are the inputs: the gradient of the weight is (softmax - one-hot) times the input."""
    layer = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(2))
    return layer


def test_shares_are_those_of_gradients_computed_by_hand():
    # (20, 0) of class 0: softmax - one-hot is 2e-9. (0, 0): the input is 0. (1, 0): -0.27 and 0.27 in the first column.
    inputs = torch.tensor([[20.0, 0.0], [0.0, 0.0], [1.0, 0.0]])
    found = near_zero(identity(), inputs, torch.zeros(3, dtype=torch.int64))
    assert found.overall.tolist() == [1.0, 1.0, 0.5]
    np.testing.assert_allclose(found.losses, [2.1e-9, np.log(2), np.log(1 + np.exp(-1))], atol=1e-6)


def test_layers_count_as_backward_counts_one_sample_at_a_time():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 4)).eval()
    x, y = torch.randn(6, 1, 6, 6), torch.arange(6) % 4
    found = near_zero(model.train(), x, y, tiny=0.01)
    model.eval()
    for i in range(6):
        model.zero_grad()
        F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]).backward()
        for layer in ("0", "1", "4"):
            parts = [p.grad.abs().flatten() for p in model.get_submodule(layer).parameters()]
            assert found.shares[layer][i] == pytest.approx(float((torch.cat(parts) < 0.01).float().mean()))
    assert found.sizes == {"0": 30, "1": 6, "4": 196}


def test_the_model_stays_as_it_was():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    before, noise = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    near_zero(model, torch.randn(4, 2, generator=torch.Generator().manual_seed(0)), torch.zeros(4, dtype=torch.int64))
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), noise)


@pytest.mark.parametrize(
    ("shares", "loss"),
    [
        ([1.0, 0.95, 0.9, 0.2], 3.0),
        ([0.95, 0.85, 1.0, 0.2], 3.0),  # 0.85 and 1.0 out of order: 0.925 each
        ([0.95, 0.7, 1.0, 0.2], 1.0),  # 0.7 and 1.0 out of order: 0.85 each
        ([0.5, 0.4, 0.3, 0.2], None),
    ],
)
def test_learnt_is_what_lies_under_the_last_loss_with_nine_tenths_near_zero(shares, loss):
    order = np.array([2, 0, 3, 1])
    assert learnt_loss(np.array([1.0, 2.0, 3.0, 4.0])[order], np.array(shares)[order]) == loss


def test_groups_hold_as_many_samples_each_in_the_order_of_their_losses():
    losses, shares = by_loss(np.array([4.0, 1.0, 3.0, 2.0]), np.array([0.0, 1.0, 0.2, 0.6]), bins=2)
    assert losses == [1.5, 3.5]
    assert shares == pytest.approx([0.8, 0.1])
