"""Ways in which code goes through a loader, and what it reads off it or sets on it."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from both import Case, check
from torch.utils.data import DataLoader, Dataset

import salience


class Numbers(Dataset):
    def __init__(self, n: int = 20) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> int:
        return i


class Fragile(Numbers):
    """Two samples cannot be read."""

    def __getitem__(self, i: int) -> int:
        if i in (3, 11):
            raise OSError(f"sample {i} is broken")
        return i


class Drawn(Numbers):
    """Transforms that use every global generator."""

    def __getitem__(self, i: int) -> tuple[float, float, float]:
        return random.random(), float(np.random.random()), float(torch.rand(()))  # noqa: NPY002


class Reading(Numbers):
    """Has attributes that salience's own data sets have too."""

    takes_orders = True
    seconds = "none"
    sampler = fingerprints = source = handle = None

    def take(self, order: Any) -> None:
        raise AssertionError("take is the user's own")

    def state_dict(self) -> None:
        raise AssertionError("there is no load_state_dict, so this is something else")


class Timed(list):
    """A sample that has a field named seconds."""

    seconds = 12.5


class Videos(Numbers):
    """Returns samples many at a time, in a list with names that we use inside."""

    def __getitems__(self, ids: list[int]) -> Timed:
        return Timed(ids)


def whole(loader: Any) -> Any:
    return list(loader)


def thrice(loader: Any) -> Any:
    return [list(loader) for _ in range(3)]


def until(count: int) -> Callable[[Any], Any]:
    def loop(loader: Any) -> Any:
        seen = []
        for _ in range(3):
            for k, batch in enumerate(loader):
                if k == count:
                    break
                seen.append(batch)
        return seen

    return loop


def to_len(loader: Any) -> Any:
    seen = []
    for _ in range(3):
        it = iter(loader)
        seen += [next(it) for _ in range(len(loader))]
    return seen


def unused_iter(loader: Any) -> Any:
    iter(loader)
    iter(loader)
    return [list(loader), list(loader)]


def to_len_with_unused(loader: Any) -> Any:
    seen = []
    for _ in range(4):
        it = iter(loader)
        it = iter(loader)
        seen += [next(it) for _ in range(len(loader))]
    return seen


def unused_in_mid_epoch(loader: Any) -> Any:
    seen, held = [], []
    for k in range(3):
        for number, batch in enumerate(loader):
            seen.append(batch)
            if number == k:
                held.append(iter(loader))
    return seen, [next(it) for it in held], list(loader)


def a_held_one_goes_on(loader: Any) -> Any:
    first = iter(loader)
    next(first)
    second = iter(loader)
    rest = list(first)
    del first
    return rest, list(second), list(loader)


def peeks(loader: Any) -> Any:
    seen = []
    for _ in range(2):
        for k, batch in enumerate(loader):
            seen.append(batch)
            if k % 2:
                seen.append(next(iter(loader)))
    return seen


def first_alone(loader: Any) -> Any:
    return [next(iter(loader)) for _ in range(3)]


def nested(loader: Any) -> Any:
    return [(a, [b for b in loader]) for a in loader]  # noqa: C416


def unused_and_held(loader: Any) -> Any:
    held = [iter(loader), iter(loader)]
    return [list(loader), list(loader)], len(held)


def an_older_one_is_held(loader: Any) -> Any:
    seen = []
    for _ in range(3):
        it = iter(loader)  # the last epoch's is still there while this one is made
        seen += [len(it), *it]
    return seen


def zipped(loader: Any) -> Any:
    return list(zip(loader, loader, strict=True))


def peek_first(loader: Any) -> Any:
    held, peek = iter(loader), iter(loader)
    return [next(peek), next(held), next(peek), list(held)]


def beyond_the_end(loader: Any) -> Any:
    it = iter(loader)
    seen = list(it)
    return seen, next(it, "over"), next(it, "still over")


def past_errors(loader: Any) -> Any:
    seen = []
    for _ in range(2):
        it = iter(loader)
        while True:
            try:
                seen.append(next(it))
            except StopIteration:
                break
            except OSError as error:
                seen.append(f"error: {error}")
    return seen


def past_errors_of_several(loader: Any) -> Any:
    """The first one's batch cannot be read, others are taken meanwhile, and it goes on where it was."""
    seen: list[Any] = []

    def take(it: Any) -> None:
        try:
            seen.append(next(it))
        except OSError as error:
            seen.append(str(error))

    first = iter(loader)
    take(first)
    take(iter(loader))
    second = iter(loader)
    for it in (second, first, first, second, first):
        take(it)
    return seen


def draws_before_the_first_batch(loader: Any) -> Any:
    it = iter(loader)
    weights = torch.rand(3)  # a model is made between iter() and the first batch
    return weights, list(it), torch.rand(3)


def lens(loader: Any) -> Any:
    it = iter(loader)
    found = [len(loader), len(it)]
    next(it)
    return [*found, len(loader), len(list(it)), len(loader)]


def iterator_is_its_own(loader: Any) -> Any:
    it = iter(loader)
    return iter(it) is it, isinstance(it, type(iter(loader)))


def enumerated(loader: Any) -> Any:
    return [(k, batch) for k, batch in enumerate(loader, start=1)]


def read(*names: str) -> Callable[[Any], Any]:
    return lambda loader: [getattr(loader, name) for name in names]


def of_sampler(loader: Any) -> Any:
    return (
        len(loader.sampler),
        len(loader.batch_sampler),
        loader.batch_sampler.batch_size,
        loader.batch_sampler.drop_last,
    )


def type_of(name: str) -> Callable[[Any], Any]:
    return lambda loader: type(getattr(loader, name)).__name__


def then_set(name: str, value: Any, loop: Callable[[Any], Any] = whole) -> Callable[[Any], Any]:
    def set_and_loop(loader: Any) -> Any:
        before = next(iter(loader))
        setattr(loader, name, value)
        return before, getattr(loader, name), loop(loader)

    return set_and_loop


def subscribed(loader: Any) -> Any:
    return type(loader)[int] is not None


def truth(loader: Any) -> Any:
    return bool(loader), hasattr(loader, "nothing_of_the_sort"), hasattr(loader, "dataset")


def global_state(loader: Any) -> Any:
    torch.manual_seed(3)
    seen = [list(loader), iter(loader), torch.rand(3), list(loader), torch.rand(3)]
    return [seen[0], *seen[2:]]


def seeded(loop: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def seeds_then(loader: Any) -> Any:
        torch.manual_seed(5)
        return loop(loader), torch.rand(2)

    return seeds_then


def drawn(loader: Any, loop: Callable[[Any], Any] = whole) -> Any:
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    return [loop(loader), torch.rand(2), random.random()]


def drawn_with_peeks(loader: Any) -> Any:
    return drawn(loader, peeks)


BY_FIVE = {"batch_size": 5}
CASES = [
    Case("three epochs", Numbers, thrice, BY_FIVE),
    Case("three epochs in order", Numbers, thrice, BY_FIVE, ordered=True),
    Case("break at once", Numbers, until(0), BY_FIVE),
    Case("break after one batch", Numbers, until(1), BY_FIVE),
    Case("break at the last batch", Numbers, until(3), BY_FIVE),
    Case("break that never comes", Numbers, until(9), BY_FIVE),
    Case("stops at len", Numbers, to_len, BY_FIVE),
    Case("stops at len, short last batch", lambda: Numbers(22), to_len, BY_FIVE),
    Case("unused iter", Numbers, unused_iter, BY_FIVE),
    Case("unused iter in order", Numbers, unused_iter, BY_FIVE, ordered=True),
    Case("peeks", Numbers, peeks, BY_FIVE),
    Case("peeks in order", Numbers, peeks, BY_FIVE, ordered=True),
    Case("next(iter()) again and again", Numbers, first_alone, BY_FIVE),
    Case("a loop in a loop", Numbers, nested, BY_FIVE),
    Case("stops at len, unused iter", Numbers, to_len_with_unused, BY_FIVE),
    Case("stops at len, unused iter, short last batch", lambda: Numbers(22), to_len_with_unused, BY_FIVE),
    Case("stops at len, unused iter, in order", Numbers, to_len_with_unused, BY_FIVE, ordered=True),
    Case("unused iter in mid-epoch", Numbers, unused_in_mid_epoch, BY_FIVE),
    Case("unused iter in mid-epoch, in order", Numbers, unused_in_mid_epoch, BY_FIVE, ordered=True),
    Case("an iterator of mid-epoch goes on afterwards", Numbers, a_held_one_goes_on, BY_FIVE),
    Case("unused iterators that are held", Numbers, unused_and_held, BY_FIVE),
    Case("an older iterator is held", Numbers, an_older_one_is_held, BY_FIVE),
    Case("zip", Numbers, zipped, BY_FIVE),
    Case("zip in order", Numbers, zipped, BY_FIVE, ordered=True),
    Case("the second of two iterators begins", Numbers, peek_first, BY_FIVE),
    Case("next past the end", Numbers, beyond_the_end, BY_FIVE),
    Case("goes on after errors", Fragile, past_errors, BY_FIVE),
    Case("goes on after errors in order", Fragile, past_errors, BY_FIVE, ordered=True),
    Case("an error ends a for loop", Fragile, whole, BY_FIVE),
    Case("goes on after an error beside others", Fragile, past_errors_of_several, BY_FIVE),
    Case("goes on after an error beside others in order", Fragile, past_errors_of_several, BY_FIVE, ordered=True),
    Case("random numbers before the first batch", Numbers, seeded(draws_before_the_first_batch),
         {**BY_FIVE, "generator": torch.default_generator}),
    Case("random numbers after an unused iter", Numbers, seeded(lambda loader: (iter(loader), torch.rand(3))[1]),
         {**BY_FIVE, "generator": torch.default_generator}),
    Case("two whole epochs at once, short last batch", lambda: Numbers(22),
         lambda loader: (list(zip(loader, loader, strict=True)), list(loader)), BY_FIVE),
    Case("shuffle=0", Numbers, whole, {**BY_FIVE, "shuffle": 0}),
    Case("shuffle=numpy.False_", Numbers, whole, {**BY_FIVE, "shuffle": np.False_}),
    Case("len before, inside and after", Numbers, lens, BY_FIVE),
    Case("an iterator is its own iterator", Numbers, iterator_is_its_own, BY_FIVE),
    Case("enumerate", Numbers, enumerated, BY_FIVE),
    Case("random numbers of samples", Drawn, drawn, BY_FIVE),
    Case("random numbers of samples in order", Drawn, drawn, BY_FIVE, ordered=True),
    Case("the global generator stays as it is", Numbers, global_state, BY_FIVE),
    Case("generator=torch.default_generator", Numbers, seeded(thrice), {**BY_FIVE, "generator": torch.default_generator}),
    Case("generator=torch.default_generator, unused", Numbers, seeded(unused_iter),
         {**BY_FIVE, "generator": torch.default_generator}),
    Case("generator=torch.default_generator, random samples, short last batch", lambda: Drawn(22), drawn_with_peeks,
         {**BY_FIVE, "generator": torch.default_generator}),
    Case("names that salience uses itself", Reading, thrice, BY_FIVE),
    Case("lists with names that salience uses itself", Videos, thrice, BY_FIVE),
    Case("attributes of batches", Numbers, read("batch_size", "drop_last", "num_workers", "pin_memory", "timeout"), BY_FIVE),
    Case("attributes of workers", Numbers, read("prefetch_factor", "persistent_workers", "multiprocessing_context",
         "worker_init_fn", "in_order", "pin_memory_device"), BY_FIVE),
    Case("collate_fn", Numbers, read("collate_fn"), BY_FIVE),
    Case("type of the data set", Numbers, type_of("dataset"), BY_FIVE),
    Case("type of the generator", Numbers, type_of("generator"), BY_FIVE),
    Case("lengths of the samplers", Numbers, of_sampler, BY_FIVE),
    Case("lengths of the samplers, drop_last", lambda: Numbers(22), of_sampler, {**BY_FIVE, "drop_last": True}),
    Case("Loader[T]", Numbers, subscribed, BY_FIVE),
    Case("truth and hasattr", Numbers, truth, BY_FIVE),
    *(Case(f"{name} cannot be set", Numbers, then_set(name, value), BY_FIVE) for name, value in {
        "dataset": [1, 2], "batch_size": 3, "drop_last": True, "sampler": None, "batch_sampler": None,
        "persistent_workers": True}.items()),
    Case("collate_fn can be set", Numbers, then_set("collate_fn", list), BY_FIVE),
    Case("timeout can be set", Numbers, then_set("timeout", 5), {**BY_FIVE, "num_workers": 0, "timeout": 0}),
    Case("worker_init_fn can be set", Numbers, then_set("worker_init_fn", print), BY_FIVE),
    Case("a name of the user's own can be set", Numbers, then_set("my_name", 5), BY_FIVE),
    *(Case(f"refused: {options}", Numbers, whole, options) for options in (
        {"batch_size": 0}, {"batch_size": -1}, {"num_workers": -1}, {"timeout": -1}, {"prefetch_factor": 2},
        {"persistent_workers": True}, {"num_workers": 1, "prefetch_factor": -1},
        {"num_workers": 1, "multiprocessing_context": "no such"}, {"batch_size": 5, "sampler": range(20)})),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_loops_see_what_they_would_see_of_a_dataloader(case):
    check(case)


def test_shuffle_may_be_the_third_argument_as_in_a_dataloader():
    def order(make):
        return [batch.tolist() for batch in make(Numbers(), 5, True, generator=torch.Generator().manual_seed(2))]

    assert order(salience.Loader) == order(DataLoader)


@pytest.mark.parametrize(
    "loop", [thrice, draws_before_the_first_batch, unused_iter, first_alone, until(1), to_len, peeks]
)
def test_without_a_generator_a_script_keeps_its_order_by_asking_for_the_global_one(loop):
    plain = seeded(loop)(DataLoader(Numbers(), 5, shuffle=True))
    ours = seeded(loop)(salience.Loader(Numbers(), 5, generator="global"))
    assert repr(ours) == repr(plain)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_loader_that_cannot_be_copied_says_why(copied):
    with pytest.raises(salience.errors.StateError, match=r"owns a run.*state_dict"):
        copied(salience.Loader(Numbers(), 5))
    with pytest.raises(salience.errors.StateError, match=r"owns a run.*state_dict"):
        copied(salience.Selector(20))
    with pytest.raises(salience.errors.StateError, match=r"call iter\(loader\)"):
        copied(iter(salience.Loader(Numbers(), 5)))
