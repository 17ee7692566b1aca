"""Accelerate takes a Loader as it is: one plan, its checkpoints, and no second division of it among processes."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

if os.environ.get("CI") != "true":  # there nothing may be skipped
    pytest.importorskip("accelerate")

from accelerate import Accelerator, skip_first_batches
from accelerate.data_loader import prepare_data_loader
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate_problem import N, data, train
from ranks_of_two import run_two

import salience


@pytest.fixture(autouse=True)
def fresh():
    """Accelerate keeps its state for the whole process."""
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def test_accumulated_batches_have_the_gradient_of_one():
    _, loader, four = train(4, 4)
    _, _, one = train(16)
    torch.testing.assert_close(one.weight, four.weight)
    assert loader.progress == 1
    assert loader.ledger.seen.tolist() == [5] * N


@pytest.mark.parametrize("select", [None, "default"])
@pytest.mark.parametrize("steps", [5, 8, 16])
def test_a_registered_loader_goes_on_where_it_was_saved(select, steps, tmp_path):
    _, whole, trained = train(8, select=select)
    train(8, select=select, save=(steps, tmp_path))
    _, resumed, again = train(8, select=select, load=tmp_path)
    torch.testing.assert_close(trained.weight, again.weight, rtol=0, atol=0)
    np.testing.assert_array_equal(whole.ledger.seen, resumed.ledger.seen)
    np.testing.assert_array_equal(whole.ledger.last_loss, resumed.ledger.last_loss)


def test_two_processes_train_as_one(tmp_path):
    cases = ["1:", "4:", "1:default"]
    run_two(Path(__file__).with_name("accelerate_problem.py"), tmp_path, *cases)
    for case in cases:
        group, select = case.split(":")
        found = [torch.load(tmp_path / f"{case}:{rank}.pt", weights_only=True) for rank in range(2)]
        _, loader, one = train(16 // int(group), int(group), select=select or None)
        torch.testing.assert_close(found[0]["parameters"], found[1]["parameters"], rtol=0, atol=0)
        torch.testing.assert_close(found[0]["parameters"], one.weight.detach(), rtol=1e-4, atol=1e-5)
        seen = found[0]["loader"]["parts"]["recording"]["ledger"]["seen"].numpy()
        np.testing.assert_array_equal(seen, loader.ledger.seen)


@pytest.mark.parametrize(
    "divide", [lambda one: prepare_data_loader(one, num_processes=2), lambda one: skip_first_batches(one, 2)]
)
def test_a_plan_is_not_divided_or_skipped_a_second_time(divide):
    """Before a window is planned there is nothing to divide; in its midst the first loss says so."""
    Accelerator(cpu=True)
    loader = salience.Loader(data(), 8)
    with pytest.raises(salience.StateError, match="No window is planned yet"):
        next(iter(divide(loader)))
    for x, _ in loader:
        loader.loss(torch.zeros(len(x)))
        break
    with pytest.raises(salience.LossError, match="loss"):
        for x, _ in divide(loader):
            loader.loss(torch.zeros(len(x)))


def test_a_table_of_datasets_is_read_with_one_take_per_batch(tmp_path):
    datasets = pytest.importorskip("datasets")
    x, y = data().tensors
    table = datasets.Dataset.from_dict({"x": x.tolist(), "y": y.tolist(), "unused": ["text"] * N}).with_format("torch")
    table = table.select_columns(["x", "y"])  # the other columns are not read
    takes = []

    class Counted:
        def __len__(self):
            return len(table)

        def __getitems__(self, ids):
            takes.append(len(ids))
            return table.__getitems__(ids)

    batches = list(salience.Loader(Counted(), 16, ids_key="_ids"))
    assert takes == [16] * 4
    for batch in batches:
        torch.testing.assert_close(batch["x"], x[batch["_ids"]])
        torch.testing.assert_close(batch["y"], y[batch["_ids"]])
    plain = [batch["y"] for batch in salience.Loader(table, 16)]  # the table itself has __getitems__
    torch.testing.assert_close(torch.cat(plain), torch.cat([batch["y"] for batch in batches]))
