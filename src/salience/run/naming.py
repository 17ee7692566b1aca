"""The key of every sample: given, in a column or field, made from its content, or its place in the innermost data set."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset

from salience.errors import ConfigError, DataError
from salience.ledger.keys import checked_key

KeysGiven = str | int | Callable[[Any], Any] | Sequence[Any] | None
"""A field of every sample, "content", "positions", a function of a sample, or the keys themselves."""
WEBDATASET_KEY = "__key__"
"""The field in which WebDataset pipelines have the name of a sample."""


def keys_of(dataset: Any, given: KeysGiven) -> list[Hashable]:
    """The keys of a map-style data set, by position.

    `given` is a sequence with one key per sample, the name of a column or field, "positions" (in the innermost data set,
    through Subset and ConcatDataset), "content" (a hash of each sample) or a function of a sample. The last two, and a field,
    read every sample once.
    """
    n = len(dataset)
    if given == "positions":
        return _positions(dataset)
    if isinstance(given, str) and given != "content":
        found = column_of(dataset, given)
        if found is not None:
            return [checked_key(key) for key in found]
    if given is None or isinstance(given, (str, int)) or callable(given):
        name = keyed_by(given)
        return [name(dataset[i]) for i in range(n)]
    keys = [checked_key(key) for key in given]
    if len(keys) != n:
        raise ConfigError(
            f"There are {len(keys)} keys for {n} samples; pass one per sample, in the order of the data set."
        )
    return keys


def keyed_by(given: str | int | Callable[[Any], Any] | None) -> Callable[[Any], Hashable]:
    """The function that names a sample. None: its "__key__", which WebDataset gives, or else its content."""
    if given is None:
        return _named_or_content
    if given == "content":
        return content_key
    if callable(given):
        return lambda sample: checked_key(given(sample))
    return lambda sample: checked_key(_field(sample, given))


def content_key(sample: Any) -> str:
    """128 bits of BLAKE2 of a sample's content: equal samples have equal keys, whatever run reads them."""
    digest = hashlib.blake2b(digest_size=16)
    _enter(digest.update, sample)
    return digest.hexdigest()


def _named_or_content(sample: Any) -> Hashable:
    if isinstance(sample, Mapping) and WEBDATASET_KEY in sample:
        return checked_key(cast("Mapping[Any, Any]", sample)[WEBDATASET_KEY])
    return content_key(sample)


def _field(sample: Any, name: str | int) -> Any:
    try:
        return sample[name]
    except (KeyError, IndexError, TypeError) as cause:
        fields = sorted(map(str, cast("Mapping[Any, Any]", sample))) if isinstance(sample, Mapping) else []
        has = f"it has {', '.join(fields)}" if fields else f"it is a {type(sample).__name__}"
        raise DataError(
            f"A sample has no field {name!r} to be its key ({has}); pass keys= another field, or a function."
        ) from cause


def _enter(update: Callable[[bytes], Any], part: Any) -> None:
    """Pass the type and the content of a sample to a hash, so that different samples never look alike."""
    if isinstance(part, Mapping):
        items = sorted(cast("Mapping[Any, Any]", part).items(), key=lambda item: str(item[0]))
        update(f"d{len(items)}:".encode())
        for name, value in items:
            _enter(update, str(name))
            _enter(update, value)
    elif isinstance(part, (list, tuple)):
        parts = cast("Sequence[Any]", part)
        update(f"l{len(parts)}:".encode())
        for value in parts:
            _enter(update, value)
    elif isinstance(part, (str, bytes)):
        data = part if isinstance(part, bytes) else part.encode()
        update(f"{'b' if isinstance(part, bytes) else 's'}{len(data)}:".encode() + data)
    elif part is None or isinstance(part, (bool, int, float)):
        update(f"n{part!r}:".encode())
    elif isinstance(part, (Tensor, np.ndarray, np.generic)):
        array = (
            part.detach().cpu().contiguous().view(torch.uint8).numpy()
            if isinstance(part, Tensor) and part.dim()
            else part
        )
        array = np.ascontiguousarray(array)
        shape = tuple(part.shape)
        update(f"a{part.dtype}{shape}:".encode() + array.tobytes())
    else:
        raise DataError(
            f"A sample holds a {type(part).__name__}, whose content has no stable hash; pass keys=, a field of the sample or a "
            "function that names it."
        )


def column_of(dataset: Any, name: str) -> list[Any] | None:
    """A column of a data set that has columns, also behind a Subset; None for others."""
    if isinstance(dataset, Subset):
        inner = column_of(dataset.dataset, name)
        return None if inner is None else [inner[i] for i in dataset.indices]
    if isinstance(dataset, ConcatDataset):
        parts = [column_of(part, name) for part in dataset.datasets]
        return None if any(part is None for part in parts) else [key for part in parts for key in part or ()]
    names = getattr(dataset, "column_names", None)
    return list(dataset[name]) if isinstance(names, Sequence) and name in names else None


def _positions(dataset: Any) -> list[Hashable]:
    """Positions in the innermost data set, with the number of its part under a ConcatDataset."""
    if isinstance(dataset, Subset):
        inner = _positions(dataset.dataset)
        return [inner[i] for i in dataset.indices]
    if isinstance(dataset, ConcatDataset):
        return [f"{number}/{key}" for number, part in enumerate(dataset.datasets) for key in _positions(part)]
    return list(range(len(dataset)))
