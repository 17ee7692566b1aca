"""Intermediates in shared memory: what was put is got, by others too, and never by mistake."""

from __future__ import annotations

import multiprocessing

import numpy as np
import pytest
import torch
from PIL import Image

from salience.memory import Memory
from salience.treat.slots import Slots, stored_bytes

VALUES = [
    torch.arange(24.0).reshape(2, 3, 4),
    torch.arange(24, dtype=torch.uint8).reshape(4, 6).t(),
    torch.ones(3, dtype=torch.bfloat16),
    np.arange(10, dtype=np.float64)[::2],
    Image.new("RGB", (5, 7), (10, 20, 30)),
    Image.new("L", (3, 2), 9),
    Image.new("P", (3, 2), 1),
    b"bytes",
    (np.zeros((2, 2), np.uint8), 7, {"box": torch.ones(4)}),
]


def same(a, b) -> bool:
    if isinstance(a, tuple):
        return all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    return type(a) is type(b) and a == b


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_what_was_put_is_got_and_may_be_changed(value):
    size = stored_bytes(value)
    slots = Slots(Memory(3 * size))
    assert slots.put(2, size, 11, 5, value)
    assert same(slots.get(2, size, 11, 5)[0], value)
    got = slots.get(2, size, 11, 5)[0]
    if isinstance(got, (torch.Tensor, np.ndarray)):
        got += 1
        assert same(slots.get(2, size, 11, 5)[0], value), "a change reached the memory"


def test_an_image_keeps_what_its_file_said_of_it():
    image = Image.new("RGB", (4, 4))
    image.info["dpi"] = (72, 72)
    slots = Slots(Memory(4096))
    assert slots.put(0, stored_bytes(image), 0, 0, image)
    assert slots.get(0, stored_bytes(image), 0, 0)[0].info == {"dpi": (72, 72)}


def test_another_sample_another_window_or_an_empty_slot_gives_nothing():
    slots = Slots(Memory(4096))
    slots.put(0, 1024, 3, 1, b"three")
    assert slots.get(0, 1024, 4, 1) is None
    assert slots.get(0, 1024, 3, 2) is None
    assert slots.get(1, 1024, 0, 0) is None


def test_what_does_not_fit_or_cannot_be_taken_apart_is_not_kept():
    slots = Slots(Memory(4096))
    value = np.zeros(100, np.uint8)
    assert not slots.put(0, stored_bytes(value) - 1, 0, 0, value)
    assert not slots.put(0, 4096, 0, 0, lambda: None)
    assert slots.put(0, stored_bytes(value), 0, 0, value)


def _write(slots: Slots, k: int) -> None:
    slots.put(k, 1024, k, 0, torch.full((4,), float(k)))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_other_processes_write_what_this_one_reads_after_they_ended(method):
    slots = Slots(Memory(4096))
    context = multiprocessing.get_context(method)
    workers = [context.Process(target=_write, args=(slots, k)) for k in range(1 if method == "spawn" else 3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for k in range(len(workers)):
        assert torch.equal(slots.get(k, 1024, k, 0)[0], torch.full((4,), float(k)))
