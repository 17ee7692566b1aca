"""From loss() to the ledger: the same as if every batch had been entered at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from salience.errors import Misattributed
from salience.ledger import Ledger, Recorder
from salience.ledger.recorder import SAMPLES_ENTERED_TOGETHER
from salience.ledger.statistics import LOGIT_ROWS, finish, reduce_batch

MANY = 2 * SAMPLES_ENTERED_TOGETHER // 16 + 3
"""Batches of 16."""


def test_statistics_match_their_formulas():
    g = torch.Generator().manual_seed(0)
    for classes in (5, 100):  # both memory layouts
        z = torch.randn(32, classes, generator=g)
        y = torch.randint(0, classes, (32,), generator=g)
        losses = torch.nn.functional.cross_entropy(z, y, reduction="none")
        names, values = reduce_batch(losses, z, y)
        assert names == LOGIT_ROWS
        rows = finish(dict(zip(names, values.numpy(), strict=True)))
        got = {name: torch.from_numpy(row) for name, row in rows.items()}
        p = z.softmax(1)
        onehot = torch.nn.functional.one_hot(y, classes)
        others = z.masked_fill(onehot.bool(), float("-inf")).amax(1)
        torch.testing.assert_close(got["margin"], z[range(32), y] - others)
        torch.testing.assert_close(got["el2n"], (p - onehot).norm(dim=1))
        torch.testing.assert_close(got["entropy"], torch.distributions.Categorical(p).entropy())
        torch.testing.assert_close(got["confidence"], p[range(32), y])
        assert (got["guess"] == z.argmax(1)).all()


def test_a_logit_of_minus_infinity_leaves_the_entropy_finite():
    z = torch.tensor([[0.0, 1.0, float("-inf")]])
    _, values = reduce_batch(torch.tensor([1.0]), z, torch.tensor([0]))
    assert torch.isfinite(values).all()


@pytest.mark.parametrize("overlap", [False, True])
def test_entering_late_and_together_equals_entering_at_once(overlap):
    g = torch.Generator().manual_seed(0)
    late, at_once = Ledger(16 * MANY), Ledger(16 * MANY)
    recorder = Recorder(late)
    for k in range(MANY):
        ids = torch.randint(0, 2000, (16,), generator=g).numpy() if overlap else np.arange(16 * k, 16 * k + 16)
        losses = torch.rand(16, generator=g)
        recorder.record(ids, losses, window=1)
        direct = Recorder(at_once)
        direct.record(ids, losses, window=1)
        direct.flush()
    recorder.flush()
    for name in late:
        np.testing.assert_array_equal(late[name], at_once[name], err_msg=name)


def test_half_precision_losses_do_not_touch_ids():
    ledger = Ledger(70_000)
    recorder = Recorder(ledger)
    ids = np.array([0, 257, 65_537, 69_999])  # none but 0 and 257 would survive bfloat16
    recorder.record(ids, torch.ones(4, dtype=torch.bfloat16), window=0)
    recorder.flush()
    assert np.flatnonzero(ledger.seen).tolist() == ids.tolist()


def test_the_tensor_of_losses_may_be_changed_after_it_was_recorded():
    ledger = Ledger(2)
    recorder = Recorder(ledger)
    losses = torch.tensor([1.0, 2.0])
    recorder.record(np.array([0, 1]), losses, window=0)
    losses.zero_()
    recorder.flush()
    assert ledger.last_loss.tolist() == [1.0, 2.0]


def test_targets_of_another_batch_are_caught_at_once_and_remapped_ones_are_not():
    y = torch.tensor([0, 1, 0, 1])
    recorder = Recorder(Ledger(4))
    recorder.record(np.arange(4), torch.ones(4), None, y + 7, window=0, hint=y)
    with pytest.raises(Misattributed, match="with_ids"):
        Recorder(Ledger(4)).record(np.arange(4), torch.ones(4), None, torch.tensor([1, 1, 0, 0]), window=0, hint=y)


def test_batches_reduced_together_are_recorded_as_if_each_were_reduced_alone():
    g = torch.Generator().manual_seed(0)
    together, alone = Ledger(600), Ledger(600)
    recorders = Recorder(together, together=4), Recorder(alone)
    for k in range(11):  # the last ones are fewer than four
        ids = torch.randperm(600, generator=g)[: 16 if k % 3 else 9].numpy()
        logits = torch.randn(len(ids), 5, generator=g) if k != 6 else None  # another kind in between
        targets = torch.from_numpy(ids % 5)
        losses = torch.rand(len(ids), generator=g)
        for recorder in recorders:
            recorder.record(ids, losses, logits, targets, window=1, trained=k != 8)
            if k == 8:
                recorder.trained(ids, torch.tensor([0, 2]), window=1)
        losses.zero_()  # the caller may do what it likes with its tensors
    for recorder in recorders:
        recorder.flush()
    assert together.seen.sum() > 0
    for name in together:
        np.testing.assert_array_equal(together[name], alone[name], err_msg=name)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_recording_from_a_gpu_waits_for_nothing_until_the_flush():
    device = torch.device("cuda")
    g = torch.Generator().manual_seed(0)
    on_gpu, on_host = Recorder(Ledger(MANY * 16)), Recorder(Ledger(MANY * 16))
    order = torch.randperm(MANY * 16, generator=g).numpy().reshape(MANY, 16)
    logits = torch.randn(MANY, 16, 10, generator=g)
    targets = torch.from_numpy(order % 10)
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    moved = [part.to(device) for part in (losses, logits, targets)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for k in range(MANY):
            on_gpu.record(order[k], *(part[k] for part in moved), window=0, number=k, hint=targets[k])
            on_gpu.features(order[k], moved[1][k].repeat(1, 13)[:, :128], window=0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for k in range(MANY):
        on_host.record(order[k], losses[k], logits[k], targets[k], window=0, number=k)
    for recorder in (on_gpu, on_host):
        recorder.flush()
    assert (on_gpu.ledger.seen == 1).all()
    np.testing.assert_array_equal(on_gpu.ledger.guess, on_host.ledger.guess)
    np.testing.assert_allclose(on_gpu.ledger.margin, on_host.ledger.margin, rtol=1e-4, atol=1e-5)
