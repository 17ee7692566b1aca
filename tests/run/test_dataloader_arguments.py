"""Arguments that code forwards to a DataLoader, and attributes that code reads off one."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset, default_collate

import salience
from salience.errors import ConfigError

DATA = TensorDataset(torch.arange(20))


@pytest.mark.parametrize("given", [{"shuffle": True}, {"shuffle": None}, {"sampler": None}, {"batch_sampler": None}])
def test_defaults_that_code_forwards_are_accepted(given):
    assert len(list(salience.Loader(DATA, 5, **given))) == 4


@pytest.mark.parametrize("given", [{"sampler": range(20)}, {"batch_sampler": [[0]]}])
def test_what_would_set_another_order_is_refused_with_a_way_out(given):
    with pytest.raises(ConfigError, match="takes no"):
        salience.Loader(DATA, 5, **given)


def test_attributes_that_code_reads_off_a_dataloader_are_honest():
    given = {"num_workers": 2, "prefetch_factor": 3, "persistent_workers": True, "timeout": 7, "pin_memory": False}
    ours, plain = salience.Loader(DATA, 5, **given), DataLoader(DATA, 5, **given)
    for name in (*given, "multiprocessing_context", "in_order", "pin_memory_device"):
        assert getattr(ours, name) == getattr(plain, name), name
    assert (ours.batch_size, ours.drop_last, ours.collate_fn, ours.dataset) == (5, False, default_collate, DATA)
    with pytest.raises(AttributeError, match="num_workers"):
        ours.num_worker  # noqa: B018
