"""Penultimate features: the last Linear's input, short, of norm 1, of the right batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import salience
from salience.signals import Attached
from salience.signals.features import features_of


def given(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_narrow_features_are_filled_up_and_scaled_to_norm_1():
    x = given(5, 10)
    features = features_of(x)
    assert features.shape == (5, 128)
    torch.testing.assert_close(features[:, :10], x / x.norm(dim=1, keepdim=True))
    assert not features[:, 10:].any()


def test_wide_features_keep_their_angles_and_need_no_global_generator():
    x = given(200, 512)
    before = torch.get_rng_state()
    features = features_of(x)
    assert torch.equal(torch.get_rng_state(), before)
    torch.testing.assert_close(features.norm(dim=1), torch.ones(200))
    apart = F.normalize(x, dim=1) @ F.normalize(x, dim=1).T - features @ features.T
    assert apart.fill_diagonal_(0).std() < 1.1 / 128**0.5  # the standard deviation of a projected cosine
    near = F.normalize(x[:1] + 0.1 * x[1:2], dim=1)
    assert (features_of(near) @ features[0]).item() > 0.98


def test_sequences_are_averaged_and_half_precision_becomes_float32():
    x = given(3, 4, 2, 20).bfloat16()
    features = features_of(x)
    assert features.dtype == torch.float32
    torch.testing.assert_close(features, features_of(x.float().mean((1, 2))))


def test_they_are_of_the_batch_whose_losses_came_last():
    data = TensorDataset(given(24, 6), torch.arange(24) % 4)
    model = nn.Sequential(nn.Linear(6, 100), nn.Tanh(), nn.Linear(100, 4), nn.Identity())
    attached = Attached(model, features=True)
    assert attached.take_features() is None
    for number, (x, y) in enumerate([data[:8], data[8:16]]):
        attached.deliver(number)
        assert attached.take_features() is None
        attached.watch(F.cross_entropy(model(x), y, reduction="none"), torch.arange(8).numpy(), window=0)
        with torch.no_grad():
            model(x.flip(0))
        model(x.flip(0))
        features = attached.take_features()
        assert not features.requires_grad
        torch.testing.assert_close(features, features_of(model[:2](x)))
        assert attached.take_features() is None


def test_they_reach_the_samples_they_belong_to():
    data = TensorDataset(given(24, 6), torch.arange(24) % 4)
    model = nn.Sequential(nn.Linear(6, 100), nn.Tanh(), nn.Linear(100, 4))
    loader = salience.Loader(data, 8)
    loader.attach(model, features=True)
    for x, y in loader:
        loader.loss(F.cross_entropy(model(x), y, reduction="none")).backward()
    assert np.isnan(loader.ledger.grad_norm).all(), "norms were not asked for"
    kept = loader._run.copying.search.embeddings
    torch.testing.assert_close(
        torch.from_numpy(kept.mean).float(), features_of(model[:2](data[:][0])), atol=1e-3, rtol=0
    )
    assert (kept.visits == 1).all()


@pytest.mark.parametrize("grad_norm", [None, "last"])
def test_norms_and_features_do_not_need_each_other(grad_norm):
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Flatten(), nn.Linear(8, 3))
    attached = Attached(model, grad_norm=grad_norm, every=2, features=True)
    for number in range(3):
        attached.deliver(number)
        losses = model(given(4, 1, 2, 2)).logsumexp(1)
        attached.watch(losses, torch.arange(4).numpy(), window=0)
        losses.sum().backward()
        assert attached.take_features().shape == (4, 128)
        assert len(attached.take()) == (grad_norm is not None and number % 2 == 0)
