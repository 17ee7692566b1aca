"""`loss(..., counts=, total=)`: one gradient for a step of several batches, whatever their sizes and lengths."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import salience

from conftest import make_model


def gradient(problem, batch_size: int, steps: int) -> torch.Tensor:
    """Of the first `steps * batch_size` samples of a plan, added up over `steps` batches."""
    lengths = torch.arange(len(problem)) % 5 + 1
    loader = salience.Loader(problem, batch_size, with_ids=True)
    model, ahead, epoch = make_model(), [], iter(loader)
    for _ in range(steps):
        ahead.append(next(epoch))
    total = torch.cat([lengths[ids] for ids, _ in ahead]).sum()
    for ids, (inputs, targets) in ahead:
        losses = F.cross_entropy(model(inputs), targets, reduction="none")
        loader.loss(losses, targets=targets, ids=ids, counts=lengths[ids], total=total).backward()
    return model.weight.grad


def test_a_step_of_several_batches_has_the_gradient_of_one(problem):
    torch.testing.assert_close(gradient(problem, 64, 1), gradient(problem, 16, 4))


def test_the_weights_of_the_plan_come_on_top(problem):
    loader, model = salience.Loader(problem, 30, epochs=4, select="infobatch"), make_model()
    for _ in range(2):
        for inputs, targets in loader:
            losses = F.cross_entropy(model(inputs), targets, reduction="none")
            loss = loader.loss(losses, counts=torch.full((len(losses),), 3), total=180)
    weights = torch.from_numpy(loader.plan.weights[-len(losses) :].copy())
    assert len(weights.unique()) > 1
    torch.testing.assert_close(loss, (weights * losses * 3).sum() / 180)


def test_short_last_batches_weigh_as_many_samples_as_they_have(problem):
    whole, parts = gradient(problem, 300, 1), gradient(problem, 128, 3)  # 128, 128, 44
    torch.testing.assert_close(whole, parts)


def test_counts_without_total_are_those_of_the_batch(problem):
    loader, model = salience.Loader(problem, 300), make_model()
    inputs, targets = next(iter(loader))
    losses, counts = F.cross_entropy(model(inputs), targets, reduction="none"), torch.arange(300)
    loss = loader.loss(losses, counts=counts)
    torch.testing.assert_close(loss, (losses * counts).sum() / counts.sum())
    torch.testing.assert_close(torch.from_numpy(loader.ledger.last_loss).sum(), losses.detach().sum())


def test_counts_of_another_batch_are_refused(problem):
    loader = salience.Loader(problem, 10)
    next(iter(loader))
    with pytest.raises(salience.LossError, match=r"counts have shape \(3,\)"):
        loader.loss(torch.ones(10), counts=torch.ones(3))
