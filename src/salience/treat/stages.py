"""Stages: the steps from what the data set gives to what the model is fed, one callable each."""

from __future__ import annotations

import inspect
import multiprocessing
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from salience.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Stage:
    """One step: a callable on the first element of a sample, or on the whole sample if it is not a tuple."""

    call: Callable[..., Any]
    random: bool | None = None
    """True if the result differs from call to call. None = not declared, which counts as random."""
    freeze: bool = False
    """Its draws may be kept with the intermediate, for up to `r_max` visits."""
    name: str | None = None

    def __post_init__(self) -> None:
        if not callable(self.call):
            raise ConfigError(
                f"A stage is a callable on the sample; {self.call!r} is a {type(self.call).__name__} and cannot be called."
            )

    @property
    def label(self) -> str:
        return self.name or getattr(self.call, "__name__", None) or type(self.call).__name__

    @property
    def reusable(self) -> bool:
        """True if its result may be kept."""
        return self.random is False or self.freeze


def as_stages(augment: Sequence[Stage | Callable[..., Any]]) -> tuple[Stage, ...]:
    if callable(augment):
        raise ConfigError("augment is one callable; pass a list of stages, augment=[...], so that each can be timed.")
    stages = tuple(part if isinstance(part, Stage) else Stage(part) for part in augment)
    labels = [stage.label for stage in stages]
    doubled = sorted({label for label in labels if labels.count(label) > 1})
    if doubled:
        raise ConfigError(f"Several stages are called {doubled[0]!r}; give them names: salience.Stage(call, name=...).")
    return stages


def check_picklable(stages: Sequence[Stage], dataloader: Mapping[str, Any]) -> None:
    """Raise ConfigError where workers are started with a fresh interpreter and a stage cannot be sent to them."""
    context = dataloader.get("multiprocessing_context") or multiprocessing.get_context()
    method = context if isinstance(context, str) else context.get_start_method()
    if method == "fork" or not dataloader.get("num_workers"):
        return
    for stage in stages:
        try:
            pickle.dumps(stage.call)
        except Exception as cause:
            raise ConfigError(
                f"Stage {stage.label!r} cannot be sent to workers that are started by {method} ({cause}); define it at the "
                'top of a module, or pass multiprocessing_context="fork".'
            ) from cause


class Runner:
    """A stage as the worker calls it: a sample, the strength meant for it, and the seed of its draws."""

    def __init__(self, stage: Stage, strength: bool) -> None:
        self.label = stage.label
        self._call = stage.call
        self._strength = strength and takes_strength(stage.call)
        self._album = type(stage.call).__module__.partition(".")[0] == "albumentations"

    def __call__(self, sample: Any, strength: float, seed: int) -> Any:
        if self._album:  # called by keyword, gives a dictionary, and has generators of its own
            if hasattr(self._call, "set_random_seed"):
                self._call.set_random_seed(seed & 0xFFFFFFFF)  # pyright: ignore[reportFunctionMemberAccess]
            return self._call(image=sample)["image"]
        return self._call(sample, strength=strength) if self._strength else self._call(sample)


def takes_strength(call: Callable[..., Any]) -> bool:
    """True if a stage has a keyword `strength`."""
    try:
        return "strength" in inspect.signature(call).parameters
    except (TypeError, ValueError):
        return False


def parts(sample: Any) -> tuple[Any, Any]:
    """What stages work on, and the sample to put the result back into."""
    return (sample[0], sample) if isinstance(sample, tuple) and sample else (sample, None)


def joined(first: Any, sample: Any) -> Any:
    """The sample with `first` in front."""
    if sample is None:
        return first
    if hasattr(sample, "_make"):
        return sample._make((first, *sample[1:]))
    return first, *sample[1:]
