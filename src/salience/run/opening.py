"""What a user passes as data: whether it is a stream, and which options go with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import DataLoader, IterableDataset

from salience.config import SelectConfig
from salience.errors import ConfigError
from salience.feed.options import READING_OPTIONS, ReadingOptions
from salience.feed.sharing.shared import SharedFeed
from salience.feed.source import Source
from salience.run.lengths import Lengths, check_fit, lengths_of
from salience.run.naming import KeysGiven, keyed_by
from salience.run.part import parse_count
from salience.run.parts import Parts
from salience.run.streaming import BATCHES_OBSERVED, DEFAULT_WINDOW, Streaming
from salience.treat.stages import Stage

READING = (
    "num_workers",
    "prefetch_factor",
    "persistent_workers",
    "timeout",
    "multiprocessing_context",
    "worker_init_fn",
)
"""DataLoader's options that go to the workers which read a stream."""


def is_stream(dataset: Any) -> bool:
    """True for an IterableDataset, and for anything else that can be iterated over and not indexed."""
    kind = type(dataset)
    if isinstance(dataset, DataLoader):  # which is refused: its own workers and batches are in the way
        return False
    return isinstance(dataset, IterableDataset) or (hasattr(kind, "__iter__") and not hasattr(kind, "__getitem__"))


def check_stream(given: Mapping[str, Any]) -> None:
    """Raise ConfigError for options that need samples with positions, or a known number of them."""
    for name, value in given.items():
        if value is not None and value is not False:
            raise ConfigError(f"{name}= needs a data set with __getitem__ and __len__; leave it out for a stream.")


def open_stream(
    parts: Parts, stream: Any, keys: KeysGiven, *, window: int | str | None, epochs: int | None, options: dict[str, Any]
) -> Streaming:
    """The part that reads a stream. It takes from `options` what belongs to the workers that read."""
    if parts.setup.ranks is not None:
        raise ConfigError(
            "A stream is read by one process; with several ranks use a data set with __getitem__ and __len__."
        )
    if keys is not None and not isinstance(keys, (str, int)) and not callable(keys):
        raise ConfigError("keys of a stream are made of its samples: name a field, or pass a function of a sample.")
    if keys == "positions":
        raise ConfigError(
            'keys="positions" are for data sets with positions; name a field of the samples, or use "content".'
        )
    planning = parts.planning
    config = planning.config
    if config is not None and not isinstance(config, SelectConfig):
        raise ConfigError("A trace has ids of a data set with positions; it cannot be replayed over a stream.")
    if config is not None and (config.keep.name == "auto" or config.steps == "constant" or config.mode == "static"):
        raise ConfigError(
            'keep = "auto", steps = "constant" and mode = "static" need the length of the data; change select.'
        )
    size = DEFAULT_WINDOW if planning.pipeline is not None else BATCHES_OBSERVED * parts.setup.global_batch
    size = size if window is None else parse_count(window)
    if size < parts.setup.global_batch:
        raise ConfigError(f"window is {size} samples; it must be at least one batch, {parts.setup.global_batch}.")
    known = parts.recording.ledger.keys
    assert known is not None
    return Streaming(
        parts.setup, parts.voice, stream, keyed_by(keys), known, planning, window=size, epochs=epochs,
        options={name: options.pop(name) for name in READING if name in options},
    )  # fmt: skip


def lengths_for(
    dataset: Any, batch_tokens: int | None, lengths: npt.ArrayLike | str | None, *, batch_size: int, treat: Any
) -> Lengths | None:
    """Tokens of every sample, where batches are measured in them."""
    if batch_tokens is None:
        if lengths is not None:
            raise ConfigError(
                "lengths= are for batch_tokens=, the tokens per batch; costs= divides batches among ranks."
            )
        return None
    if batch_size != 1:
        raise ConfigError(
            f"batch_size={batch_size} and batch_tokens={batch_tokens} both say how large a batch is; choose one."
        )
    if treat is not None:
        raise ConfigError(
            "treat= orders visits by batches of equal size, which batch_tokens= does not make; leave one out."
        )
    found = lengths_of(dataset, lengths)
    check_fit(found, batch_tokens)
    return found


def with_reading(dataset: Any, options: dict[str, Any]) -> tuple[Any, ReadingOptions]:
    """The data set, and how it is read. Options of a Source that were given to the Loader are passed on to it."""
    given = {name: options.pop(name) for name in READING_OPTIONS if name in options}
    if isinstance(dataset, SharedFeed):
        elsewhere = sorted({*given} - {"decode", "max_broken"})
        if elsewhere:
            raise ConfigError(f"{elsewhere[0]}= is an option of the feed that jobs share; give it to the SharedFeed.")
        dataset = dataset.source
    if isinstance(dataset, Source):
        dataset = dataset.using(**given) if given else dataset
        return dataset, dataset.reading
    name = type(dataset).__name__
    if given.get("decode") is not None:
        raise ConfigError(f"decode= is for a salience.Source; a {name} decodes by itself.")
    if any(given.get(tier) is not None for tier in ("cache", "disk", "redis")):
        raise ConfigError(f"cache=, disk= and redis= are for a salience.Source, not for a {name}.")
    broken = {"max_broken": given["max_broken"]} if "max_broken" in given else {}
    return dataset, ReadingOptions(**broken).checked(np.empty(0, dtype=np.int64))


def shared_stages(reading: ReadingOptions, stages: tuple[Stage, ...]) -> tuple[ReadingOptions, tuple[Stage, ...]]:
    """What jobs of a feed share (decode, and the stages before the first random one), and each job's own stages."""
    own = next((k for k, stage in enumerate(stages) if stage.random is not False), len(stages))
    calls = tuple(stage.call for stage in stages[:own])
    if calls:
        from salience.feed.sharing.signature import InTurn

        reading = replace(reading, decode=InTurn((reading.decode, *calls) if reading.decode is not None else calls))
    return reading, stages[own:]
