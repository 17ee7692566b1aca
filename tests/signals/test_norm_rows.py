"""Norms arrive after their batch, and entering them late and among other batches changes nothing."""

from __future__ import annotations

import numpy as np
import torch

from salience.ledger import Ledger, Recorder
from salience.ledger.recorder import SAMPLES_ENTERED_TOGETHER

MANY = 2 * SAMPLES_ENTERED_TOGETHER // 16 + 3
"""Batches of 16."""


def test_norms_between_batches_change_no_other_column_and_the_last_one_stands():
    g = torch.Generator().manual_seed(0)
    plain, normed = Ledger(1000), Ledger(1000)
    recorders = [Recorder(plain), Recorder(normed)]
    wanted = np.full(1000, np.nan, dtype=np.float32)
    for _ in range(MANY):
        ids, losses = torch.randperm(1000, generator=g)[:16].numpy(), torch.rand(16, generator=g)
        for recorder in recorders:
            recorder.record(ids, losses, window=1)
        norms, scale = torch.rand(16, generator=g), 1 + torch.rand(16, generator=g)
        recorders[1].norms(ids, (norms * scale).square(), -scale, window=1)
        wanted[ids] = norms.numpy()
    for recorder in recorders:
        recorder.flush()
    np.testing.assert_allclose(normed.grad_norm, wanted, rtol=1e-5)
    for name in plain:
        if name != "grad_norm":
            np.testing.assert_array_equal(normed[name], plain[name], err_msg=name)


def test_what_is_not_finite_or_had_no_weight_leaves_the_old_value():
    ledger = Ledger(4)
    recorder = Recorder(ledger)
    recorder.norms(np.arange(4), torch.ones(4), torch.ones(4), window=0)
    squares, scale = torch.tensor([4.0, 0.0, 9.0, float("inf")]), torch.tensor([1.0, 0.0, 0.0, 1.0])
    recorder.norms(np.arange(4), squares, scale, window=0)
    recorder.norms(np.array([7, 7, 3]), torch.tensor([25.0]), torch.ones(1), torch.tensor([2]), window=0)
    recorder.flush()
    assert ledger.grad_norm.tolist() == [2, 1, 1, 5]
    assert ledger.seen.tolist() == ledger.trained.tolist() == [0] * 4
