"""Echo in the Loader: fewer samples read, every view different, each sample counted once."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

import salience
from salience import Stage, Treat
from salience.plan import REUSED, STORED, VIEW_SHIFT

N, BATCH = 600, 10


class Rows(Dataset):
    """Sample i is (a row of i, i); how often each was read is counted in shared memory."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.read, self.seconds = torch.zeros(N, dtype=torch.int64).share_memory_(), seconds

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        self.read[i] += 1
        time.sleep(self.seconds)
        return torch.full((4,), float(i)), i


def jitter(x: Tensor) -> Tensor:
    return x + torch.rand(1)


def loader_of(views=2, data=None, kind="echo", **more):
    return salience.Loader(
        Rows() if data is None else data, BATCH, epochs=6, augment=[Stage(torch.neg, random=False), jitter],
        treat=Treat(kind, views=views, distance=1, split=1), seed=3, **more,
    )  # fmt: skip


def window_of(loader, losses=None):
    """Batches as lists of (id, tensor), and the sum of weights by sample."""
    batches, weights = [], np.zeros(N)
    for x, y in loader:
        given = (torch.ones(len(y)) if losses is None else losses[y]).requires_grad_()
        loader.loss(given).backward()
        np.add.at(weights, y.numpy(), given.grad.numpy() * len(y))
        batches.append(list(zip(y.tolist(), x, strict=True)))
    return batches, weights


@pytest.mark.parametrize("workers", [0, 2])
def test_every_sample_is_read_once_for_its_views_and_all_take_turns(workers):
    data = Rows()
    loader = loader_of(data=data, num_workers=workers)
    steps, read = [], []
    for _ in range(2):
        before = data.read.clone()
        steps.append(len(window_of(loader)[0]))
        read.append((data.read - before).numpy())
    assert steps == [N // BATCH] * 2, "a window makes as many steps as before"
    first, second = read[0] > 0, read[1] > 0
    assert abs(first.sum() - N // 2) < 20  # the rehearsal reads a few more
    assert (first | second).all()
    if not workers:
        assert second.sum() == N // 2
        assert read[1].max() == 1


def test_views_differ_and_are_never_in_neighbouring_batches():
    batches, _ = window_of(loader_of())
    places: dict[int, list[int]] = {}
    tensors: dict[int, list[Tensor]] = {}
    for k, batch in enumerate(batches):
        for i, x in batch:
            places.setdefault(i, []).append(k)
            tensors.setdefault(i, []).append(x)
    assert len(places) == N // 2
    for i, found in places.items():
        assert len(found) == 2
        assert found[1] - found[0] >= 1
        assert not torch.equal(*tensors[i])
    assert np.mean([b - a for a, b in places.values()]) > 2


def test_a_sample_counts_once_in_the_weights_and_in_the_ledger():
    loader = loader_of()
    window_of(loader)
    losses = torch.arange(N).float()  # from now on the important ones have more views
    _, weights = window_of(loader, losses)
    _, weights = window_of(loader, losses)
    ids, times = np.unique(loader.plan.ids, return_counts=True)
    assert set(times) >= {1, 3}
    important = loader.ledger.mean_loss[ids]
    assert important[times == 3].mean() > important[times == 1].mean()
    np.testing.assert_allclose(weights[ids], N / len(ids), rtol=0.05)
    assert loader.plan.weights.mean() == pytest.approx(1, abs=1e-3)
    assert (loader.ledger.seen[ids] <= 3).all()
    counts = loader._run.staging.treating.counts
    assert loader.ledger.seen.sum() == counts["fresh"] + counts["stored"] == counts["visits"] - counts["reused"]


def test_views_follow_in_the_levels_of_the_plan():
    loader = loader_of(views=3)
    window_of(loader)
    plan = loader.plan
    assert plan.views.max() == 2
    assert ((plan.level & 3 == STORED) == (plan.views == 0)).mean() > 0.99
    assert (plan.level[plan.views > 0] & 3 == REUSED).all()
    assert (plan.level >> VIEW_SHIFT == plan.views).all()


def test_workers_and_a_resume_change_no_tensor():
    def flat(batches):
        return torch.stack([x for batch in batches for _, x in batch])

    whole = loader_of()
    a = [flat(window_of(whole)[0]) for _ in range(3)]
    first = loader_of(num_workers=2)
    b = [flat(window_of(first)[0])]
    some = []
    for k, (x, y) in enumerate(first):
        first.loss(torch.ones(len(y)))
        some.append(list(zip(y.tolist(), x, strict=True)))
        if k == 20:
            state = first.state_dict()
            break
    second = loader_of()
    second.load_state_dict(state)
    rest = window_of(second)[0]
    b += [flat([*some, *rest]), flat(window_of(second)[0])]
    for one, two in zip(a, b, strict=True):
        assert torch.equal(one, two)


def test_losses_of_a_batch_that_was_fetched_ahead_find_their_batch():
    loader = loader_of(with_ids=True)
    held = None
    for ids, _ in loader:
        if held is not None:
            loader.loss(torch.ones(len(held)), ids=held)
        held = ids
    assert loader.ledger.seen.sum() > 0


@pytest.mark.parametrize(
    ("read", "step", "kind"),
    [(0.001, 0.0, "echo"), (0.0, 0.02, "fresh")],
    ids=["reading is slow", "the model is slow"],
)
def test_auto_echoes_where_reading_is_the_bottleneck_and_nothing_else(read, step, kind):
    loader = loader_of("auto", data=Rows(read), kind="auto")
    for _ in loader:
        time.sleep(step)
    next(iter(loader))
    assert loader._run.staging.treating.kind == kind
    assert (loader._run.staging.treating.views > 1) == (kind == "echo")


def test_near_copies_that_were_left_out_give_their_views_to_the_one_that_is_visited():
    data = torch.randn(N, 64, generator=torch.Generator().manual_seed(0))
    data[450:] = data[:150]
    loader = salience.Loader(
        TensorDataset(data, torch.arange(N) % 2), 2, epochs=4, augment=[jitter], seed=3, embeddings=data.numpy(),
        treat=Treat("echo", views=2, distance=1, split=0), select={"filters": [{"name": "redundancy"}]},
    )  # fmt: skip
    for _ in range(2):
        for _, y in loader:
            loader.loss(torch.ones(len(y)))
    found = loader.copies
    assert found is not None
    ids, times = np.unique(loader.plan.ids, return_counts=True)
    grouped = found.group[ids] >= 0
    assert 20 < grouped.sum() < len(ids) - 20
    assert times[grouped].mean() > times[~grouped].mean() + 0.8
