"""Every preset trains, skips what it says, and resumes exactly."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import salience
from salience.select import PRESETS

from conftest import make_model

EPOCHS = 8


def run(problem, name, stop=None, state=None):
    reference = problem.tensors[0][:, 0].abs()  # of another model, for presets that ask one
    loader = salience.Loader(problem, 50, epochs=EPOCHS, select=name, with_ids=True, strict=True, reference=reference)
    model = make_model()
    loader.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if state:
        loader.load_state_dict(state[0])
        model.load_state_dict(state[1])
    seen = []
    for _ in range(loader.epoch, EPOCHS):
        for ids, (x, y) in loader:
            logits = model(x)
            loss = loader.loss(F.cross_entropy(logits, y, reduction="none"), logits, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(ids.tolist())
            if len(seen) == stop:
                return seen, (loader.state_dict(), model.state_dict())
    return seen, loader


@pytest.mark.parametrize("name", PRESETS)
def test_preset(problem, name):
    whole, loader = run(problem, name)
    visits = sum(map(len, whole))
    assert visits == loader.ledger.seen.sum()
    assert loader.ledger.trained.sum() < EPOCHS * len(problem), "nothing was skipped"
    assert loader.progress == pytest.approx(1)
    assert np.isfinite(loader.ledger.mean_loss[loader.ledger.seen > 0]).all()
    first, state = run(problem, name, stop=len(whole) // 2)
    second, resumed = run(problem, name, state=state)
    assert first + second == whole
    for column in ("mean_loss", "trained", "grad_norm"):
        np.testing.assert_array_equal(resumed.ledger[column], loader.ledger[column])
