"""Stopped after any batch and resumed, a loader delivers what DataLoader would have delivered without the stop."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import salience

N, EPOCHS = 22, 3


class Numbers(Dataset):
    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> int:
        return i


class Counting(Numbers):
    """Its samples depend on how many were read before."""

    def __init__(self) -> None:
        self.read = 0

    def __getitem__(self, i: int) -> tuple[int, int]:
        self.read += 1
        return i, self.read

    def state_dict(self) -> dict[str, int]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.read = state["read"]


def listed(batch: Any) -> Any:
    return [part.tolist() for part in batch] if isinstance(batch, list) else batch.tolist()


def batches(loader: Any, epochs: int = EPOCHS) -> list[Any]:
    return [listed(batch) for _ in range(epochs) for batch in loader]


def saved(loader: Any) -> Any:
    """A state as it comes back from a file."""
    file = io.BytesIO()
    torch.save(loader.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def endless(loader: Any) -> Iterator[Any]:
    for _ in range(loader.epoch, EPOCHS):
        yield from loader


OPTIONS = {
    "batches of 5": {"batch_size": 5},
    "batches of 11": {"batch_size": 11},
    "drop_last": {"batch_size": 5, "drop_last": True},
    "batch_size 1": {"batch_size": 1},
    "in order": {"batch_size": 5, "shuffle": False},
    "in order, drop_last": {"batch_size": 4, "shuffle": False, "drop_last": True},
}
STOPS = (0, 1, 3, 5, 6, 9)


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_run_stopped_anywhere_goes_on_as_a_dataloader_would_have(options, stop):
    def generator() -> torch.Generator:
        return torch.Generator().manual_seed(4)

    expected = batches(DataLoader(Numbers(), **{"shuffle": True, **options}, generator=generator()))
    stop = min(stop, len(expected))
    first = salience.Loader(Numbers(), epochs=EPOCHS, generator=generator(), **options)
    stream = endless(first)
    seen = [listed(next(stream)) for _ in range(stop)]
    second = salience.Loader(Numbers(), epochs=EPOCHS, **options)
    second.load_state_dict(saved(first))
    seen += [listed(batch) for batch in endless(second)]
    assert seen == expected


@pytest.mark.parametrize("kind", ["global", "default_generator"])
def test_a_run_on_the_global_generator_brings_it_back(kind):
    given = "global" if kind == "global" else torch.default_generator
    torch.manual_seed(3)
    plain = DataLoader(Numbers(), 5, shuffle=True, generator=None if kind == "global" else torch.default_generator)
    expected = batches(plain)
    torch.manual_seed(3)
    first = salience.Loader(Numbers(), 5, epochs=EPOCHS, generator=given)
    stream = endless(first)
    seen = [listed(next(stream)) for _ in range(7)]
    state = saved(first)
    torch.manual_seed(99)
    second = salience.Loader(Numbers(), 5, epochs=EPOCHS, generator=given)
    second.load_state_dict(state)
    assert [*seen, *(listed(batch) for batch in endless(second))] == expected


@pytest.mark.parametrize("stop", [0, 1, 4, 5, 7])
def test_a_data_set_with_a_state_of_its_own_goes_on_where_it_was(stop):
    plain = DataLoader(Counting(), 5, shuffle=True, generator=torch.Generator().manual_seed(0))
    expected = batches(plain)
    first = salience.Loader(Counting(), 5, epochs=EPOCHS)
    stream = endless(first)
    seen = [listed(next(stream)) for _ in range(stop)]
    second = salience.Loader(Counting(), 5, epochs=EPOCHS)
    second.load_state_dict(saved(first))
    assert [*seen, *(listed(batch) for batch in endless(second))] == expected


def test_a_data_set_with_a_state_that_workers_change_says_that_it_is_not_saved():
    loader = salience.Loader(Counting(), 5, epochs=EPOCHS, num_workers=1)
    assert "dataset" not in loader.state_dict()
    assert "it is not saved" in loader.events.recent[-1]["text"]


def test_saving_a_state_changes_nothing():
    plain = batches(DataLoader(Numbers(), 5, shuffle=True, generator=torch.Generator().manual_seed(0)))
    loader, seen = salience.Loader(Numbers(), 5, epochs=EPOCHS), []
    for batch in endless(loader):
        seen.append(listed(batch))
        loader.state_dict()
        loader.state_dict()
    assert seen == plain


def test_a_state_saved_after_iter_and_before_the_first_batch_starts_the_epoch():
    loader = salience.Loader(Numbers(), 5, epochs=EPOCHS)
    it = iter(loader)
    state = saved(loader)
    again = salience.Loader(Numbers(), 5, epochs=EPOCHS)
    again.load_state_dict(state)
    assert [listed(batch) for batch in again] == [listed(batch) for batch in it]


def test_workers_may_be_other_in_number_after_a_resume():
    expected = batches(DataLoader(Numbers(), 5, shuffle=True, generator=torch.Generator().manual_seed(0)))
    first = salience.Loader(Numbers(), 5, epochs=EPOCHS, num_workers=2)
    stream = endless(first)
    seen = [listed(next(stream)) for _ in range(2)]
    state = saved(first)
    del stream
    second = salience.Loader(Numbers(), 5, epochs=EPOCHS)
    second.load_state_dict(state)
    assert [*seen, *(listed(batch) for batch in endless(second))] == expected


def by_length(loader: Any, first: int = 0) -> Iterator[Any]:
    """A loop that never runs into the end of an epoch; from batch `first` on."""
    for done in range(first, EPOCHS * 4):
        if done == first or done % 4 == 0:
            it = iter(loader)
        yield listed(next(it))


@pytest.mark.parametrize("stop", [3, 5, 8, 9])
def test_a_loop_that_stops_at_len_is_resumed_as_one(stop):
    """Whether the sampler draws once more at the end of an epoch is told by the epoch before."""
    data = range(20)
    expected = list(by_length(DataLoader(data, 5, shuffle=True, generator=torch.Generator().manual_seed(0))))
    first = salience.Loader(data, 5, epochs=EPOCHS)
    stream = by_length(first)
    seen = [next(stream) for _ in range(stop)]
    for _ in range(2):  # one that was resumed and saved at once says the same
        second = salience.Loader(data, 5, epochs=EPOCHS)
        second.load_state_dict(saved(first))
        first = second
    assert [*seen, *by_length(second, stop)] == expected
