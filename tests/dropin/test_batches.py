"""What is in a batch: every kind of sample, collate function and option gives what DataLoader gives."""

from __future__ import annotations

import collections
import dataclasses
import warnings
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from both import Case, check
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, default_collate, random_split


class Point(NamedTuple):
    x: torch.Tensor
    y: int


@dataclasses.dataclass
class Sample:
    value: int


class Parts:
    """A batch type of the user's own."""

    def __init__(self, parts: Any) -> None:
        self.parts = parts


class Made(Dataset):
    """`make(i)` for i of n."""

    def __init__(self, make: Any, n: int = 23) -> None:
        self.make, self.n = make, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Any:
        return self.make(i)


class Many(Made):
    """Read many at a time; single reads would give something else."""

    def __getitems__(self, ids: list[int]) -> list[Any]:
        assert all(type(i) is int for i in ids)
        return [100 + i for i in ids]


class Other(collections.OrderedDict):
    """A mapping type of the user's own."""


class Words(collections.abc.Sequence):
    """A plain sequence, no Dataset."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, i: int) -> str:
        return "abcdefghijk"[i]


def fails(i: int) -> int:
    if i == 4:
        raise KeyError("sample 4")
    return i


def epoch(loader: Any) -> list[Any]:
    return list(loader)


def epochs(loader: Any) -> list[Any]:
    return [list(loader) for _ in range(3)]


def length(loader: Any) -> tuple[int, int]:
    return len(loader), len(list(loader))


def kept_even(samples: list[int]) -> torch.Tensor:
    return torch.tensor([s for s in samples if s % 2 == 0])


def quantized(samples: list[int]) -> torch.Tensor:
    with warnings.catch_warnings(action="ignore"):  # deprecated in torch, and still in use
        return torch.quantize_per_tensor(torch.tensor(samples).float(), 1.0, 0, torch.quint8)


def of_kind(make: Any, n: int = 23) -> Any:
    return lambda: Made(make, n)


SAMPLES = {
    "ints": lambda i: i,
    "floats": lambda i: i / 3,
    "bools": lambda i: i % 2 == 0,
    "strings": lambda i: f"sample {i}",
    "bytes": lambda i: bytes([i]),
    "tensors": lambda i: torch.full((2, 3), i),
    "scalar tensors": lambda i: torch.tensor(i),
    "float16 tensors": lambda i: torch.tensor([i], dtype=torch.float16),
    "bool tensors": lambda i: torch.tensor([i % 2 == 0]),
    "empty tensors": lambda i: torch.empty(0),
    "arrays": lambda i: np.full(3, i, dtype=np.float32),
    "int arrays": lambda i: np.full(3, i, dtype=np.int32),
    "numpy scalars": lambda i: np.float64(i),
    "uint8 scalars": lambda i: np.uint8(i),
    "tuples": lambda i: (torch.tensor([i]), i),
    "tuples of one": lambda i: (i,),
    "lists": lambda i: [i, i + 1],
    "dicts": lambda i: {"x": torch.tensor([i]), "y": i},
    "nested dicts": lambda i: {"a": {"b": (i, [i])}, "c": "word"},
    "ordered dicts": lambda i: collections.OrderedDict(b=i, a=i),
    "own mappings": lambda i: Other(b=i),
    "named tuples": lambda i: Point(torch.tensor([i]), i),
    "three integer fields": lambda i: (i, i % 2, i % 3),
    "a uint8 label beside int64": lambda i: {"domain": i, "label": torch.tensor(i % 3, dtype=torch.uint8)},
    "lists of unequal lengths fail": lambda i: [i] * (1 + i % 2),
    "tensors of unequal shapes fail": lambda i: torch.zeros(i + 1),
    "objects fail": Sample,
    "None fails": lambda i: None,
    "arrays of objects fail": lambda i: np.array([object()]),
    "a sample that fails": fails,
}

COLLATES = {
    "a list": list,
    "the samples themselves": lambda samples: samples,
    "a tuple": tuple,
    "an object": Parts,
    "a number": len,
    "None": lambda samples: None,
    "a string": lambda samples: "batch",
    "a generator's list": lambda samples: [s + 1 for s in samples],
    "rows dropped": kept_even,
    "rows repeated": lambda samples: torch.tensor(samples * 2),
    "rows reversed": lambda samples: torch.tensor(samples[::-1]),
    "a dict that has _ids": lambda samples: {"_ids": torch.tensor(samples), "x": default_collate(samples)},
    "a ragged nested tensor": lambda samples: (
        torch.nested.nested_tensor([torch.zeros(1 + s % 3) for s in samples], layout=torch.jagged).sum(),
        torch.tensor(samples),
    ),
    "a sparse tensor": lambda samples: [torch.tensor(samples).to_sparse().to_dense(), torch.tensor(samples)],
    "complex numbers": lambda samples: torch.tensor(samples) + 1j,
    "quantized tensors": quantized,
    "a meta value": lambda samples: {"shape": torch.tensor(samples).shape},
    "an error": lambda samples: 1 / 0,
}

NUMBERS = of_kind(lambda i: i)

OPTIONS = {
    "batch_size left out": {},
    "batch_size 1": {"batch_size": 1},
    "batch_size 23": {"batch_size": 23},
    "batch_size above the number of samples": {"batch_size": 50},
    "drop_last": {"batch_size": 5, "drop_last": True},
    "drop_last that fits": {"batch_size": 23, "drop_last": True},
    "drop_last of everything": {"batch_size": 50, "drop_last": True},
    "drop_last and one sample more": {"batch_size": 11, "drop_last": True},
    "defaults forwarded": {"batch_size": 4, "sampler": None, "batch_sampler": None, "collate_fn": None, "timeout": 0},
    "worker options forwarded": {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False},
    "pin_memory without a device": {"batch_size": 4, "pin_memory": False},
    "worker_init_fn without workers": {"batch_size": 4, "worker_init_fn": print},
    "multiprocessing_context None": {"batch_size": 4, "multiprocessing_context": None},
    "in_order": {"batch_size": 4, "in_order": True},
}

DATA = {
    "TensorDataset": lambda: TensorDataset(torch.arange(17), torch.arange(17) % 3),
    "Subset": lambda: Subset(Made(lambda i: i), [5, 3, 5, 8, 1, 2, 4]),
    "ConcatDataset": lambda: ConcatDataset([Made(lambda i: i), Made(lambda i: -i, 9)]),
    "random_split": lambda: random_split(Made(lambda i: i), [13, 10], torch.Generator().manual_seed(1))[1],
    "a list": lambda: [3, 1, 4, 1, 5, 9, 2, 6],
    "a tuple": lambda: ("a", "b", "c"),
    "a range": lambda: range(13),
    "a string": lambda: "abcdef",
    "a tensor": lambda: torch.arange(12).reshape(6, 2),
    "an array": lambda: np.arange(12).reshape(6, 2),
    "a sequence": Words,
    "__getitems__": lambda: Many(lambda i: i),
    "Subset of __getitems__": lambda: Subset(Many(lambda i: i), range(3, 12)),
    "one sample": lambda: [7],
}

CASES = [
    *(Case(f"samples: {name}", of_kind(make), epoch, {"batch_size": 4}) for name, make in SAMPLES.items()),
    *(Case(f"collate: {name}", NUMBERS, epoch, {"batch_size": 4, "collate_fn": f}) for name, f in COLLATES.items()),
    *(Case(f"options: {name}", NUMBERS, epochs, options) for name, options in OPTIONS.items()),
    *(Case(f"len: {name}", NUMBERS, length, options) for name, options in OPTIONS.items()),
    *(Case(f"in order: {name}", NUMBERS, epochs, options, ordered=True) for name, options in OPTIONS.items()),
    *(Case(f"data: {name}", make, epochs, {"batch_size": 3}) for name, make in DATA.items()),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_batches_are_those_of_a_dataloader(case):
    check(case)
