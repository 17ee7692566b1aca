"""Influence against inner products of gradients by autograd, and on labels that are known to be wrong."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from salience.errors import ConfigError, DataError
from salience.signals.influence import Influence, influence_on, validation_direction

CLASSES = 4


def blobs(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % CLASSES
    return torch.randn(n, 6, generator=g) + 4 * F.one_hot(y, 6), y


def test_one_validation_sample_is_an_inner_product_of_two_gradients():
    g = torch.Generator().manual_seed(0)
    h, weight = torch.randn(3, 5, generator=g), torch.randn(CLASSES, 5, generator=g)
    vh, y, vy = torch.randn(2, 5, generator=g), torch.tensor([0, 1, 2]), torch.tensor([3, 1])
    direction, centre = validation_direction(vh, vy, CLASSES)
    found = influence_on(direction, centre, h, h @ weight.T, y)

    def gradient(vector: torch.Tensor, by: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        """Of cross-entropy in the layer `by` at a centred vector; the prediction is that at the vector itself."""
        layer = by.clone().requires_grad_()
        logits = layer @ (vector - centre)
        shift = (by @ centre).detach()
        (grad,) = torch.autograd.grad(F.cross_entropy((logits + shift)[None], label[None]), layer)
        return F.normalize(grad.flatten(), dim=0)

    for i in range(3):
        theirs = [gradient(vh[v], torch.zeros(CLASSES, 5), vy[v]) for v in range(2)]  # zeros: a uniform prediction
        wanted = torch.stack([gradient(h[i], weight, y[i]) @ other for other in theirs]).mean()
        torch.testing.assert_close(found[i], wanted)


def test_planted_wrong_labels_come_first_on_a_run_that_learns():
    (x, right), validation = blobs(400, 1), blobs(60, 2)
    wrong = np.zeros(400, dtype=bool)
    wrong[np.random.default_rng(0).permutation(400)[:60]] = True
    given = torch.where(torch.from_numpy(wrong), (right + 1) % CLASSES, right)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, CLASSES))
    optimizer, found = torch.optim.SGD(model.parameters(), 0.1), Influence(400)
    for _ in range(3):
        for ids in torch.arange(400).split(50):
            loss = F.cross_entropy(model(x[ids]), given[ids])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        found.add(model, [(np.arange(400), x, given)], [validation])
    first = np.argsort(-found.score)[:60]
    assert wrong[first].mean() > 0.9
    assert model.training
    assert not any(module._forward_hooks for module in model.modules())


def test_what_was_never_asked_is_unknown_and_too_few_validation_samples_are_refused():
    model = nn.Linear(6, CLASSES)
    x, y = blobs(8, 0)
    found = Influence(10)
    found.add(model, [(np.arange(8), x, y)], [blobs(40, 1)])
    assert np.isnan(found.score).tolist() == [False] * 8 + [True] * 2
    with pytest.raises(DataError, match="needs validation samples"):
        found.add(model, [], [])
    with pytest.raises(ConfigError, match="a class has 2 validation samples"):
        found.add(model, [], [blobs(8, 1)])
    with pytest.raises(ConfigError, match=r"one nn\.Linear"):
        found.add(nn.Sequential(nn.Unflatten(1, (6, 1)), nn.Conv1d(6, CLASSES, 1), nn.Flatten()), [], [blobs(40, 1)])
    with pytest.raises(ConfigError, match="class 3 is not among the model's 2 classes"):
        found.add(nn.Linear(6, 2), [], [blobs(40, 1)])
