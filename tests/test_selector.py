"""Ids and weights without a DataLoader."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import salience
from salience.errors import ConfigError

from conftest import make_model


def run(problem, **more):
    x, y = problem.tensors
    selector = salience.Selector(300, batch_size=32, epochs=10, labels=y.numpy(), **more)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    schedule = salience.ProgressLR(optimizer, selector)
    visits = 0
    for _ in range(10):
        for ids, weights in selector:
            logits = model(x[ids])
            losses = F.cross_entropy(logits, y[ids], reduction="none")
            loss = selector.loss(losses, logits, y[ids])
            torch.testing.assert_close(loss, (losses * weights).sum() / len(ids))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            visits += len(ids)
    accuracy = (model(x).argmax(1) == y).float().mean().item()
    return visits, accuracy, selector, optimizer


def test_a_selector_trains_on_fewer_samples_and_still_learns(problem):
    visits, accuracy, selector, optimizer = run(problem, select="epsilon_greedy")
    assert visits == selector.visits_expected == selector.ledger.seen.sum()
    assert 1800 < visits < 2000  # of 3000
    assert accuracy > 0.9
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0, abs=1e-9)  # the schedule ended with the run


def test_a_selector_and_a_loader_make_the_same_plans(problem):
    selector = salience.Selector(300, batch_size=32, epochs=4, select="default", seed=3)
    loader = salience.Loader(problem, 32, epochs=4, select="default", seed=3, with_ids=True)

    def visited(door):
        seen = []
        for ids, _ in door:
            door.loss(ids.float() % 7)
            seen.append(ids.tolist())
        return seen

    for _ in range(4):
        assert visited(selector) == visited(loader)


def test_labels_must_be_one_integer_a_sample():
    with pytest.raises(ConfigError, match="300 integers"):
        salience.Selector(300, labels=np.zeros(299, dtype=int))
    with pytest.raises(ConfigError, match="300 integers"):
        salience.Selector(300, labels=np.zeros(300))


def test_drop_last_keeps_batch_shapes_constant():
    selector = salience.Selector(300, batch_size=32, epochs=10, select="default", drop_last=True)
    for _ in range(4):
        for ids, _ in selector:
            assert len(ids) == 32
            selector.loss(ids.float())


@pytest.mark.parametrize("select", [True, False, 3])
def test_a_select_that_is_no_selection_is_one_sentence(select):
    with pytest.raises(ConfigError, match=r'^select is (True|False|3); name a preset \(select="default"\)'):
        salience.Selector(8, batch_size=2, select=select)
