"""Cases with worker processes: seeds, order, errors, and what a worker knows of itself."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from both import Case, check
from torch.utils.data import Dataset, get_worker_info


class Numbers(Dataset):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, i: int) -> Any:
        return i


class ManyDrawn(Dataset):
    def __len__(self) -> int:
        return 60

    def __getitem__(self, i: int) -> tuple[int, float]:
        return i, float(torch.rand(()))


class Worker(Numbers):
    """Which worker read it, with which seed, of which data set."""

    opened = 0

    def __getitem__(self, i: int) -> tuple[int, int, int, str, int]:
        info = get_worker_info()
        return i, info.id, info.seed, type(info.dataset).__name__, info.dataset.opened


class Drawn(Numbers):
    def __getitem__(self, i: int) -> tuple[int, float, float, float]:
        return i, random.random(), float(np.random.random()), float(torch.rand(()))  # noqa: NPY002


class Fragile(Numbers):
    def __getitem__(self, i: int) -> int:
        if i == 7:
            raise OSError("sample 7 is broken")
        return i


def opens(worker: int) -> None:
    get_worker_info().dataset.opened = 10 + worker


def fails(worker: int) -> None:
    raise RuntimeError("no connection")


def twice(loader: Any) -> Any:
    return [list(loader), list(loader)]


def broken_off(loader: Any) -> Any:
    return [next(iter(loader)), list(loader)]


def peeks(loader: Any) -> Any:
    seen = []
    for k, batch in enumerate(loader):
        seen.append(batch)
        if k == 2:
            seen.append(next(iter(loader)))
    return seen


def to_len_with_unused(loader: Any) -> Any:
    seen = []
    for _ in range(3):
        it = iter(loader)
        it = iter(loader)
        seen += [next(it) for _ in range(len(loader))]
    return seen


def zipped(loader: Any) -> Any:
    return list(zip(loader, loader, strict=True))


def past_errors(loader: Any) -> Any:
    it, seen = iter(loader), []
    while True:
        try:
            seen.append(next(it))
        except StopIteration:
            return seen
        except OSError:
            seen.append("error")


def more_workers(loader: Any) -> Any:
    before = list(loader)
    loader.num_workers = 3
    return before, loader.num_workers, list(loader)


TWO = {"batch_size": 3, "num_workers": 2}
CASES = [
    Case("two epochs", Numbers, twice, TWO),
    Case("in order", Numbers, twice, TWO, ordered=True),
    Case("what workers know of themselves", Worker, twice, TWO),
    Case("worker_init_fn opens the user's data set", Worker, twice, {**TWO, "worker_init_fn": opens}),
    Case("worker_init_fn fails", Numbers, twice, {**TWO, "worker_init_fn": fails}),
    Case("random numbers of samples", Drawn, twice, TWO),
    Case("random numbers, persistent", Drawn, twice, {**TWO, "persistent_workers": True}),
    Case("random numbers, persistent, in order", Drawn, twice, {**TWO, "persistent_workers": True}, ordered=True),
    Case("random numbers of peeks", ManyDrawn, peeks, TWO),
    Case("random numbers of two iterators at once", Drawn, zipped, TWO),
    Case("stops at len, unused iter", ManyDrawn, to_len_with_unused, TWO),
    Case("num_workers can be set", Worker, more_workers, TWO),
    Case("broken off", Numbers, broken_off, TWO),
    Case("broken off, persistent", Numbers, broken_off, {**TWO, "persistent_workers": True}),
    Case("goes on after an error", Fragile, past_errors, TWO),
    Case("prefetch_factor, timeout", Numbers, twice, {**TWO, "prefetch_factor": 4, "timeout": 60}),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_workers_do_what_those_of_a_dataloader_do(case):
    check(case)
