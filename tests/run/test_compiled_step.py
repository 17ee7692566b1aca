"""loader.loss inside a compiled step: one graph, no recompilation, the same run."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter

import salience

from conftest import make_model


def run(problem, select, compiled, counter=None):
    loader = salience.Loader(problem, 32, epochs=4, select=select)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, y):
        logits = model(x)
        return loader.loss(F.cross_entropy(logits, y, reduction="none"), logits, y)

    if compiled:
        step = torch.compile(step, backend=counter, fullgraph=True, dynamic=False)
    for _ in range(4):
        for x, y in loader:
            loss = step(x, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model, loader


@pytest.mark.parametrize("select", [None, "default"])
def test_a_compiled_step_gives_the_same_run_with_one_graph(problem, select):
    torch._dynamo.reset()
    counter = CompileCounter()
    (plain, one), (compiled, two) = run(problem, select, False), run(problem, select, True, counter)
    torch.testing.assert_close(plain.weight, compiled.weight)
    np.testing.assert_array_equal(one.ledger.seen, two.ledger.seen)
    np.testing.assert_allclose(one.ledger.mean_loss, two.ledger.mean_loss, rtol=1e-4)
    # Observing has a short last batch, and so a second shape; a plan that selects has one shape.
    assert counter.frame_count == (2 if select is None else 1)
