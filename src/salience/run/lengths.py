"""The length of every sample, in tokens: given as an array or a column, known to the data set, or measured once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from torch import Tensor
from torch.utils.data import Subset

from salience.errors import ConfigError, DataError
from salience.feed.dataset import SourceDataset

Lengths = npt.NDArray[np.int64]
PASS = "pass lengths=, the number of tokens of every sample, [n]"


def lengths_of(dataset: Any, given: npt.ArrayLike | str | None) -> Lengths:
    """Tokens of every sample, int64 [n].

    `given` is an array, or the name of a column of numbers or of token lists. None: the attribute `lengths` of the data set,
    or one pass over it, in which the first sequence of every sample is measured.
    """
    n = len(dataset)
    if isinstance(given, str):
        found = _column(dataset, given)
    elif given is not None:
        found = np.asarray(given)
    elif isinstance(dataset, SourceDataset):
        raise ConfigError(f"batch_tokens= needs to know how long the samples of this source are; {PASS}.")
    else:
        found = _known(dataset)
        found = np.array([_measured(dataset[i], i) for i in range(n)]) if found is None else found
    if found.shape != (n,) or found.dtype.kind not in "iuf":
        raise ConfigError(f"lengths are {found.dtype} of shape {found.shape}; {PASS.replace('[n]', f'[{n}]')}.")
    numbers = found.astype(np.float64)
    if not np.isfinite(numbers).all() or (numbers < 0).any() or (numbers != np.floor(numbers)).any():
        wrong = int(np.flatnonzero(~(np.isfinite(numbers) & (numbers >= 0) & (numbers == np.floor(numbers))))[0])
        raise ConfigError(f"lengths has {numbers[wrong]:g} for sample {wrong}; it must be a whole number of tokens.")
    return numbers.astype(np.int64)


def check_fit(lengths: Lengths, batch_tokens: Any) -> None:
    """Raise ConfigError unless every sample fits into a batch of `batch_tokens`."""
    if not isinstance(batch_tokens, int) or isinstance(batch_tokens, bool) or batch_tokens < 1:
        raise ConfigError(f"batch_tokens is {batch_tokens!r}; it must be an integer of at least 1: tokens per batch.")
    longest = int(lengths.argmax())
    if lengths[longest] > batch_tokens:
        more = int((lengths > batch_tokens).sum())
        raise ConfigError(
            f"{more} of {len(lengths)} samples are longer than batch_tokens = {batch_tokens} (sample {longest} has "
            f"{lengths[longest]}); truncate them, and pass the lengths they then have, or raise batch_tokens."
        )


def _column(dataset: Any, name: str) -> npt.NDArray[Any]:
    if isinstance(dataset, Subset):
        return _column(dataset.dataset, name)[np.asarray(dataset.indices, dtype=np.int64)]
    names = getattr(dataset, "column_names", None)
    if isinstance(names, Sequence) and name not in names:
        raise ConfigError(f"lengths names the column {name!r}, which the data set lacks; it has {', '.join(names)}.")
    try:
        column = dataset[name]
    except (TypeError, KeyError, IndexError, ValueError) as cause:
        raise ConfigError(f"lengths is {name!r}, and {type(dataset).__name__} has no such column; {PASS}.") from cause
    values = list(column)
    lists = bool(values) and isinstance(values[0], (list, tuple, Tensor, np.ndarray)) and np.ndim(values[0]) > 0
    return np.array([len(value) for value in values] if lists else values)


def _known(dataset: Any) -> npt.NDArray[Any] | None:
    if isinstance(dataset, Subset):
        inner = _known(dataset.dataset)
        return None if inner is None else inner[np.asarray(dataset.indices, dtype=np.int64)]
    known = getattr(dataset, "lengths", None)
    return None if known is None or callable(known) else np.asarray(known)


def _measured(sample: Any, index: int) -> int:
    """Length of the first sequence in a sample: itself, the first field of a tuple, or `input_ids` of a dict."""
    part = sample
    if isinstance(part, Mapping):
        fields = cast("Mapping[Any, Any]", part)
        part = fields.get("input_ids", next(iter(fields.values()), None))
    elif isinstance(part, tuple) and part:
        part = cast("tuple[Any, ...]", part)[0]
    if isinstance(part, (Tensor, np.ndarray, list)) and np.ndim(cast("Any", part)) > 0:
        return len(cast("Any", part))
    raise DataError(f"Sample {index} is a {type(sample).__name__} without a sequence of tokens to measure; {PASS}.")
