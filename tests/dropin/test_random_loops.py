"""Loops put together at random, of epochs, breaks, peeks, zip, errors and resumes: a Loader does what a DataLoader does."""

from __future__ import annotations

import functools
import io
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from both import plain_values
from torch.utils.data import DataLoader, Dataset, RandomSampler

import salience

LOOPS, LOOPS_WITH_WORKERS, RESUMES = 150, 3, 200
"""Seeds 0, 1, 2, ... of each kind."""


class Samples(Dataset):
    """Of one of three kinds, some of which cannot be read; two kinds draw from global generators."""

    def __init__(self, n: int, kind: int, broken: set[int]) -> None:
        self.n, self.kind, self.broken = n, kind, broken

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Any:
        if i in self.broken:
            raise (OSError, ValueError, KeyError)[i % 3](f"sample {i}")
        if self.kind == 0:
            return i
        if self.kind == 1:
            return {"x": torch.full((2,), i), "r": torch.rand(())}
        return np.float32(i), [i, {"a": np.random.random()}], random.random()  # noqa: NPY002


def collate(samples: list[Any]) -> Any:
    if isinstance(samples[0], int) and sum(samples) % 7 == 0:
        raise RuntimeError("collate fails")
    return torch.utils.data.default_collate(samples)


class Log:
    """What a loop has seen."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def take(self, it: Iterator[Any]) -> bool:
        """The next batch, or what happened instead. False at the end."""
        try:
            self.seen.append(plain_values(next(it)))
        except StopIteration:
            self.seen.append("end")
            return False
        except salience.SalienceError:
            raise
        except Exception as error:
            self.seen.append(type(error).__name__)
        assert len(self.seen) < 3000, "a loop that does not end"
        return True

    def rest(self, it: Iterator[Any]) -> None:
        while self.take(it):
            pass


def full(loader: Any, log: Log, k: int, held: list[Any]) -> None:
    it = iter(loader)
    log.rest(it)
    log.take(it)


def broken_off(loader: Any, log: Log, k: int, held: list[Any]) -> None:
    it = iter(loader)
    for _ in range(k):
        log.take(it)


def for_loop(loader: Any, log: Log, k: int, held: list[Any]) -> None:
    try:
        for number, batch in enumerate(loader, k):
            log.seen.append((number, plain_values(batch)))
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        log.seen.append(type(error).__name__)


def unused(loader: Any, log: Log, k: int, held: list[Any]) -> None:
    for _ in range(k):
        iter(loader)


def draws_in_between(loader: Any, log: Log, k: int, held: list[Any]) -> None:
    it = iter(loader)
    log.seen.append(torch.rand(k).tolist())
    log.rest(it)


def to_len(loader: Any, log: Log, k: int, held: list[Any]) -> None:
    it = iter(loader)
    for _ in range(len(loader)):
        log.take(it)


def lengths(loader: Any, log: Log, k: int, held: list[Any]) -> None:
    log.seen += [len(loader), len(loader.sampler), len(loader.batch_sampler)]


def peeks(loader: Any, log: Log, k: int, held: list[Any]) -> None:
    it, number = iter(loader), 0
    while log.take(it):
        number += 1
        if number % k == 0:
            log.take(iter(loader))


def zipped(loader: Any, log: Log, k: int, held: list[Any]) -> None:
    one, other = iter(loader), iter(loader)
    while log.take(one) and log.take(other):
        pass


def whole_peek(loader: Any, log: Log, k: int, held: list[Any]) -> None:
    it = iter(loader)
    log.take(it)
    log.rest(iter(loader))
    log.rest(it)


def hold(loader: Any, log: Log, k: int, held: list[Any]) -> None:
    it = iter(loader)
    for _ in range(k):
        log.take(it)
    held.append(it)


def go_on_with_held(loader: Any, log: Log, k: int, held: list[Any]) -> None:
    for it in held:
        log.take(it)


ALONE = (full, full, broken_off, for_loop, unused, draws_in_between, to_len, lengths)
BESIDE = (peeks, zipped, whole_peek, hold, go_on_with_held)
"""A second iterator resets the first where workers are kept; where they are not, after an error it has other random numbers."""


def outcomes(seed: int, workers: int) -> tuple[Any, Any]:
    """Of a DataLoader and of a Loader."""
    rng = random.Random(seed)
    n, keeps = rng.randint(1, 24), workers > 0 and seed % 2 == 0
    options: dict[str, Any] = {"batch_size": rng.randint(1, 8), "drop_last": rng.random() < 0.3, "num_workers": workers}
    options |= {"persistent_workers": keeps, "prefetch_factor": rng.randint(1, 3)} if workers else {}
    options |= {"collate_fn": collate} if rng.random() < 0.5 else {}
    options["shuffle"] = rng.random() < 0.7
    broken = set(rng.sample(range(n), min(n, rng.choice([0, 0, 2]))))
    operations = ALONE if keeps or (workers and (broken or "collate_fn" in options)) else (*ALONE, *BESIDE)
    steps = [(rng.choice(operations), rng.randint(1, 5)) for _ in range(rng.randint(2, 7))]
    kind, drawn_from = rng.randint(0, 2), rng.choice(["own", "own", "global", "default"])

    def run(make: Callable[..., Any], without: Any) -> Any:
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        random.seed(seed)
        generator = {"own": torch.Generator().manual_seed(3), "default": torch.default_generator, "global": without}
        loader, log, held = make(Samples(n, kind, broken), generator=generator[drawn_from], **options), Log(), []
        for step, k in steps:
            log.seen.append(step.__name__)
            step(loader, log, k, held)
        after = torch.rand((), generator=generator["own"]).item()
        return log.seen, after, torch.rand(()).item(), random.random(), np.random.random()  # noqa: NPY002

    return run(DataLoader, None), run(salience.Loader, "global")


def test_any_loop_sees_and_draws_what_it_would_with_a_dataloader():
    for seed in range(LOOPS):
        plain, ours = outcomes(seed, workers=0)
        assert ours == plain, f"seed {seed}"


@pytest.mark.parametrize("workers", [2])
@pytest.mark.parametrize("seed", range(LOOPS_WITH_WORKERS))
def test_any_loop_with_workers_sees_and_draws_what_it_would_with_a_dataloader(seed, workers):
    plain, ours = outcomes(seed, workers)
    assert ours == plain


# --- resumed ---


def saved(loader: salience.Loader) -> Any:
    file = io.BytesIO()
    torch.save(loader.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def resumed(seed: int) -> tuple[list[Any], list[Any]]:
    """Batches of a DataLoader, and of a Loader that was saved inside an epoch and resumed by another one."""
    rng = random.Random(seed)
    n, size, kind = rng.randint(1, 30), rng.randint(1, 9), rng.choice(["own", "default", "global", "two"])
    drop_last, in_order = rng.random() < 0.3, kind != "two" and rng.random() < 0.2
    length = n // size if drop_last else -(-n // size)
    most = [rng.choice([None, rng.randint(1, 4)]) for _ in range(3)] if seed % 4 else [length] * 3
    one, two = (functools.partial(torch.Generator().manual_seed, k) for k in (5, 6))

    def plain() -> DataLoader:
        if kind == "two":
            sampler = RandomSampler(range(n), generator=two())
            return DataLoader(range(n), size, sampler=sampler, generator=one(), drop_last=drop_last)
        generator = {"own": one(), "default": torch.default_generator, "global": None}[kind]
        return DataLoader(range(n), size, shuffle=not in_order, generator=generator, drop_last=drop_last)

    def ours() -> salience.Loader:
        generator = {"own": one(), "default": torch.default_generator, "global": "global", "two": (one(), two())}[kind]
        return salience.Loader(range(n), size, shuffle=not in_order, generator=generator, drop_last=drop_last, epochs=3)

    def go(loader: Any, stop: int | None) -> list[Any]:
        seen: list[Any] = []
        torch.manual_seed(seed)
        for limit in most:
            it, done = iter(loader), 0
            while limit is None or done < limit:
                batch = next(it, None)
                if batch is None:
                    break
                seen.append(batch.tolist())
                done += 1
                if len(seen) == stop:
                    state = saved(loader)
                    torch.manual_seed(99)
                    loader = ours()
                    loader.load_state_dict(state)
                    it = iter(loader)
            del it
            seen.append("end of epoch")
        return seen

    expected = go(plain(), None)
    inside = [k + 1 for k, batch in enumerate(expected[:-1]) if "end of epoch" not in (batch, expected[k + 1])]
    return expected, go(ours(), rng.choice(inside) if inside else None)


def test_any_loop_saved_inside_an_epoch_goes_on_as_a_dataloader_that_was_not():
    for seed in range(RESUMES):
        expected, seen = resumed(seed)
        assert seen == expected, f"seed {seed}"
