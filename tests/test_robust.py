"""Early-learning regularisation: off unless asked for or noise is found, the published term, and only in what is learnt."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import salience
from salience.errors import ConfigError
from salience.ledger import Ledger, Recorder
from salience.run.losses import early_learning
from salience.select.weights import robust_strength as strength


def test_its_strength_follows_the_estimated_noise():
    assert [strength("auto", noise) for noise in (0.0, 0.15, float("nan"))] == [0, 0, 0]
    assert strength("auto", 0.25) == pytest.approx(1.0)
    assert strength("auto", 0.9) == 2
    assert strength(0.7, float("nan")) == 0.7


def test_the_term_is_that_of_the_paper():
    """t <- 0.7 t + 0.3 p, log(1 - <t, p>), with all four classes among the votes."""
    logits = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    y = torch.arange(6) % 4
    ledger = Ledger(6)
    recorder = Recorder(ledger)
    recorder.record(np.arange(6), F.cross_entropy(logits, y, reduction="none"), logits, y, window=0)
    recorder.flush()
    now = torch.randn(6, 4, generator=torch.Generator().manual_seed(1), requires_grad=True)
    p, before = now.softmax(1), logits.softmax(1)
    wanted = torch.log(1 - ((0.7 * before + 0.3 * p.detach()) * p).sum(1))
    got = early_learning(now, np.arange(6), ledger)
    torch.testing.assert_close(got, wanted, atol=2e-3, rtol=2e-3)
    (grad,) = torch.autograd.grad(got.sum(), now, retain_graph=True)
    (true,) = torch.autograd.grad(wanted.sum(), now)
    torch.testing.assert_close(grad, true, atol=5e-3, rtol=5e-3)


def test_the_loss_has_it_and_the_ledger_does_not():
    def run(robust: float | str) -> tuple[list[float], np.ndarray]:
        selector = salience.Selector(
            40, batch_size=10, epochs=3, select={"preset": "uniform", "robust": robust}, seed=1
        )
        g = torch.Generator().manual_seed(0)
        z, y = torch.randn(40, 5, generator=g), torch.arange(40) % 5
        losses = []
        for _ in range(3):
            for ids, _ in selector:
                each = F.cross_entropy(z[ids], y[ids], reduction="none")
                losses.append(float(selector.loss(each, z[ids], y[ids])))
        return losses, selector.ledger.mean_loss.copy()

    plain, recorded = run(0.0)
    with_term, same = run(1.0)
    np.testing.assert_array_equal(recorded, same)
    assert plain[:2] == with_term[:2], "a sample's first visit has nothing to compare with"
    assert sum(with_term) < sum(plain) - 0.1
    assert run("auto")[0] == plain


def test_a_wrong_setting_is_refused():
    for robust in (-1.0, "yes"):
        with pytest.raises(ConfigError, match=r"select\.robust"):
            salience.SelectConfig(robust=robust)
