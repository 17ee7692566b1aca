"""An Observer records what somebody else drew: the same ledger as a Loader's, and nothing of the loop is touched."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import socket
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import salience
from salience.errors import StateError
from salience.ledger import COLUMNS

from conftest import make_model, require, train


def with_ids(problem: TensorDataset) -> TensorDataset:
    return TensorDataset(torch.arange(len(problem)), *problem.tensors)


def observed(observer: salience.Observer, data: TensorDataset, *, epochs: int, first: int = 0) -> torch.nn.Module:
    """A loop that shuffles by itself: what `Loader` does with the same generator."""
    model, generator = make_model(), torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(epochs):
        for ids, x, y in DataLoader(data, 32, shuffle=True, generator=generator):
            logits = model(x)
            losses = F.cross_entropy(logits, y, reduction="none")
            optimizer.zero_grad()
            losses.mean().backward()
            optimizer.step()
            if epoch >= first:
                observer.record(ids, losses, logits, y)
    return model


def test_an_observer_learns_what_a_loader_learns_from_the_same_batches(problem):
    loader, observer = salience.Loader(problem, 32), salience.Observer(len(problem))
    one = train(loader, loader.loss, epochs=4)
    two = observed(observer, with_ids(problem), epochs=4)
    torch.testing.assert_close(one.state_dict(), two.state_dict(), rtol=0, atol=0)
    for name in COLUMNS:
        if name != "cost_us":
            np.testing.assert_array_equal(loader.ledger[name], observer.ledger[name], err_msg=name)
    np.testing.assert_array_equal(loader.ledger.vote, observer.ledger.vote)
    assert observer.visits == 4 * len(problem)


def test_it_reports_and_logs_as_a_run_does(problem, tmp_path):
    observer = salience.Observer(len(problem), log=tmp_path / "events.jsonl")
    observed(observer, with_ids(problem), epochs=3)
    observer.evaluated(0.5, top5=0.9)
    text = observer.report()
    assert "300 of 300 samples seen, 900 visits" in text
    assert "an Observer does not know how long the run will be" in text
    kinds = [event["kind"] for event in map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())]
    assert kinds.count("window") == 3
    assert {"run", "evaluated", "findings", "observed"} <= set(kinds)


def test_its_page_tells_what_was_recorded(problem, tmp_path, monkeypatch):
    require(importlib.util.find_spec("jinja2") is not None, "jinja2")
    observer = salience.Observer(len(problem), log=tmp_path / "events.jsonl")
    observed(observer, with_ids(problem), epochs=3)
    observer.report(tmp_path / "x.html", names=lambda i: f"row {i}", classes=["ant", "bee", "cow", "doe"])
    page = (tmp_path / "x.html").read_text()
    assert "The loop drew its samples itself; 900 visits were recorded." in page
    assert "Training loss" in page
    assert "Accuracy in training, by class" in page
    assert re.search(r"row \d+</p>", page)
    assert "was visited in every epoch" not in page
    assert observer._repr_html_().startswith("<iframe sandbox")
    with pytest.raises(StateError, match="cannot be written"):
        observer.report(tmp_path / "events.jsonl" / "x.html")
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert observer._repr_html_() is None


def test_random_offsets_with_repeats_are_counted(problem):
    x, y = problem.tensors
    observer, g = salience.Observer(len(x)), torch.Generator().manual_seed(1)
    count = np.zeros(len(x), dtype=int)
    for _ in range(20):
        ids = torch.randint(len(x), (64,), generator=g)
        observer.record(ids, F.cross_entropy(make_model()(x[ids]), y[ids], reduction="none"))
        count += np.bincount(ids.numpy(), minlength=len(x))
    np.testing.assert_array_equal(observer.ledger.seen, count)
    np.testing.assert_array_equal(observer.ledger.trained, count)


def test_looked_at_is_not_trained_on(problem):
    observer = salience.Observer(10)
    observer.record([1, 2], torch.ones(2), trained=False)
    assert observer.ledger.seen.sum() == 2
    assert observer.ledger.trained.sum() == 0


def test_the_caller_may_reuse_its_ids_and_losses():
    observer, ids, losses = salience.Observer(4), np.array([0, 1]), torch.tensor([1.0, 2.0])
    observer.record(ids, losses)
    ids[:], losses[:] = 3, 9.0
    assert observer.ledger.last_loss[:2].tolist() == [1.0, 2.0]
    assert observer.ledger.seen.tolist() == [1, 1, 0, 0]


def test_priorities_follow_the_last_loss_and_the_unseen_come_first():
    observer = salience.Observer(4)
    np.testing.assert_allclose(observer.priorities(), 0.25)
    observer.record([0, 1, 2], torch.tensor([4.0, 1.0, 0.0]))
    p = observer.priorities(power=0.5)
    np.testing.assert_allclose(p[0] / p[1], 2, rtol=1e-5)
    assert p[3] == p[0]
    assert 0 < p[2] < p[1]
    np.testing.assert_allclose(p.sum(), 1, rtol=1e-6)
    np.testing.assert_allclose(observer.priorities(power=0), 0.25)
    with pytest.raises(salience.ConfigError, match="power is 2"):
        observer.priorities(power=2)


def test_a_slot_that_was_written_to_anew_is_forgotten():
    observer = salience.Observer(3)
    observer.record([0, 1], torch.tensor([0.1, 5.0]), torch.zeros(2, 4), torch.tensor([2, 3]))
    observer.forget([0])
    assert observer.ledger.seen.tolist() == [0, 1, 0]
    observer.record([0], torch.ones(1), torch.zeros(1, 4), torch.tensor([1]))  # another class than before
    assert observer.ledger.label.tolist() == [1, 3, -1]


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ([0, 5], "from 0 to 5; with 5 samples"),
        ([0.5, 1.0], "float64"),
        ([[0, 1]], r"shape \(1, 2\)"),
        ([0], "2 losses for"),
    ],
)
def test_ids_that_cannot_be_are_refused(ids, says):
    with pytest.raises(salience.LossError, match=says):
        salience.Observer(5).record(ids, torch.ones(2))


def test_a_saved_observer_goes_on(problem):
    data = with_ids(problem)
    whole, first, second = (salience.Observer(len(problem)) for _ in range(3))
    observed(whole, data, epochs=3)
    observed(first, data, epochs=2)
    second.load_state_dict(first.state_dict())
    observed(second, data, epochs=3, first=2)
    for name in COLUMNS:
        np.testing.assert_array_equal(whole.ledger[name], second.ledger[name], err_msg=name)
    assert whole.report() == second.report()
    with pytest.raises(salience.StateError, match="population 300"):
        salience.Observer(7).load_state_dict(first.state_dict())


def test_a_loader_that_only_records_leaves_the_loss_to_the_loop(problem):
    """`loader.loss(losses.detach(), ...)`: the gradient is the loop's own."""
    loader = salience.Loader(problem, 32)

    def reduce(losses, logits, y):
        loader.loss(losses.detach(), logits.detach(), y)
        return losses.mean()

    one = train(loader, reduce, epochs=2)
    two = train(
        DataLoader(problem, 32, shuffle=True, generator=torch.Generator().manual_seed(0)),
        lambda losses, *_: losses.mean(),
        epochs=2,
    )
    torch.testing.assert_close(one.state_dict(), two.state_dict(), rtol=0, atol=0)
    assert loader.ledger.seen.tolist() == [2] * len(problem)


def _rank(rank: int, port: int, out: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    x = torch.arange(40.0)
    observer = salience.Observer(40)
    for epoch in range(2):
        sampler = DistributedSampler(x, num_replicas=2, rank=rank)
        sampler.set_epoch(epoch)
        for ids in torch.tensor(list(sampler)).split(8):
            observer.record(ids, x[ids] + epoch)
        observer.flush()
    np.savez(f"{out}/{rank}.npz", seen=observer.ledger.seen, loss=observer.ledger.last_loss, visits=observer.visits)
    dist.barrier()
    dist.destroy_process_group()


def test_two_ranks_with_a_distributed_sampler_share_one_ledger(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_rank, args=(port, str(tmp_path)), nprocs=2)
    for rank in range(2):
        found = np.load(tmp_path / f"{rank}.npz")
        assert found["seen"].tolist() == [2] * 40
        np.testing.assert_array_equal(found["loss"], np.arange(40) + 1)
        assert found["visits"] == 80
