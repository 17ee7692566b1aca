"""Samples come back from shared memory as they went in; what would not is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from salience.feed.sharing.codec import Unshareable, decode, encode


def there_and_back(sample: Any) -> Any:
    encoded = encode(sample)
    memory = bytearray(encoded.size)
    encoded.write(memoryview(memory))
    found = decode(memoryview(memory))
    memory[:] = b"\xff" * len(memory)  # what came back shares nothing with it
    return found


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]
)
def test_tensors_of_every_type_come_back(dtype: torch.dtype):
    tensor = (torch.randn(3, 4, generator=torch.Generator().manual_seed(0)) * 5).to(dtype)
    for sample in (tensor, tensor.t(), tensor[:0], tensor[0, 0]):
        found = there_and_back(sample)
        assert found.dtype == dtype
        assert torch.equal(found, sample)


def test_nested_samples_come_back():
    sample = {"x": (torch.ones(2), [1, 2.5, None, True, "é"]), "y": b"abc", "n": np.float32(3), "e": np.empty((0, 2))}
    found = there_and_back(sample)
    assert torch.equal(found["x"][0], sample["x"][0])
    assert found["x"][1] == sample["x"][1]
    assert found["y"] == b"abc"
    assert type(found["n"]) is np.float32
    assert found["e"].shape == (0, 2)
    array = there_and_back(np.arange(6).reshape(2, 3).T)
    np.testing.assert_array_equal(array, np.arange(6).reshape(2, 3).T)
    array += 1  # it may be written to


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA"])
def test_images_come_back(mode: str):
    image = Image.effect_noise((7, 5), 90).convert(mode)
    found = there_and_back(image)
    assert (found.mode, found.size, found.tobytes()) == (image.mode, image.size, image.tobytes())


@pytest.mark.parametrize(
    "sample",
    [
        object(), {1: 2}, np.array(["a"]), np.array([object()]), torch.ones(2, requires_grad=True), Image.new("P", (2, 2)),
        torch.nn.Parameter(torch.ones(1)), torch.eye(2).to_sparse(),
    ],
)  # fmt: skip
def test_what_would_not_come_back_the_same_is_refused(sample: Any):
    with pytest.raises(Unshareable):
        encode(sample)
