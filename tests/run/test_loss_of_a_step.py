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


def test_counts_that_are_refused_leave_the_batch_without_a_loss(problem):
    loader = salience.Loader(problem, 10)
    next(iter(loader))
    with pytest.raises(salience.LossError, match="counts are a list"):
        loader.loss(torch.ones(10), counts=[1] * 10)
    assert loader.loss(torch.ones(10), counts=torch.ones(10)) == 1


def test_many_items_do_not_overflow_losses_in_half_precision(problem):
    loader = salience.Loader(problem, 10)
    next(iter(loader))
    assert loader.loss(torch.full((10,), 8.0, dtype=torch.float16), counts=torch.full((10,), 2048)) == 8


@pytest.mark.parametrize("select", [None, "selective_backprop"])
def test_a_batch_of_which_collate_left_nothing_has_loss_zero(problem, select):
    def collate(samples):
        return salience.Collated((torch.empty(0, 8), torch.empty(0, dtype=torch.int64)), [])

    loader, model = salience.Loader(problem, 100, epochs=1, select=select, collate_fn=collate), make_model()
    for inputs, targets in loader:
        logits = model(inputs)
        losses = F.cross_entropy(logits, targets, reduction="none")
        if select is not None:
            assert len(loader.pick(losses, logits, targets)) == 0
        loss = loader.loss(losses, logits, targets)
        loss.backward()
        assert loss == 0
    assert loader.ledger.seen.sum() == 0
