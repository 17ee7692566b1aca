"""Stages: the steps from a sample of the data set to the input of the model, one callable each."""

from __future__ import annotations

import inspect
import multiprocessing
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from salience.errors import ConfigError
from salience.treat.curves import Curve, amount_at, check_curve


@dataclass(frozen=True, slots=True)
class Stage:
    """One step: a callable on the first element of a sample, or on the whole sample if it is not a tuple."""

    call: Callable[..., Any]
    random: bool | None = None
    """True if the result differs from call to call. None = not declared, which counts as random."""
    freeze: bool = False
    """True if its random draws may be kept with the intermediate, for up to `r_max` visits."""
    name: str | None = None
    curve: Curve | None = None
    """Its strength over the run's progress, from 0 to 1: "fade", "rise", "early" or a function. A stage with a keyword
    `strength` receives it; any other stage runs on that share of the samples."""

    def __post_init__(self) -> None:
        check_curve(self.curve)
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

    @property
    def changes(self) -> bool:
        """True if what it does depends on the run's progress."""
        return self.curve is not None or takes(self.call, "progress")


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
    """Raise ConfigError if workers start with a fresh interpreter and a stage cannot be sent to them."""
    context = dataloader.get("multiprocessing_context") or multiprocessing.get_context()
    method = context if isinstance(context, str) else context.get_start_method()
    if method == "fork" or not dataloader.get("num_workers"):
        return
    for stage in stages:
        try:
            pickle.dumps((stage.call, stage.curve))
        except Exception as cause:
            raise ConfigError(
                f"Stage {stage.label!r} cannot be sent to workers that are started by {method} ({cause}); define it at the "
                'top of a module, or pass multiprocessing_context="fork".'
            ) from cause


class Runner:
    """A stage as called by the worker: with a sample, its strength, the seed of its draws, and the progress of the run."""

    def __init__(self, stage: Stage, strength: bool, place: int = 0) -> None:
        self.label = stage.label
        self._call, self._curve, self._place = stage.call, stage.curve, place
        self._takes_strength = takes(stage.call, "strength")
        self._important = strength and self._takes_strength
        self._progress = takes(stage.call, "progress")
        self._album = type(stage.call).__module__.partition(".")[0] == "albumentations"

    def __call__(
        self, sample: Any, strength: float, seed: int, progress: float | None = None, adapted: float = 1.0
    ) -> Any:
        """Run the stage. `progress` is None if no stage needs it; `adapted` is the adaptive strength."""
        amount = 1.0
        if self._curve is not None:
            amount = amount_at(self._curve, progress) * adapted
            if not self._takes_strength and amount < 1 and unit(seed, self._place) >= amount:
                return sample
        options: dict[str, float] = {}
        if self._important or (self._curve is not None and self._takes_strength):
            options["strength"] = amount * (strength if self._important else 1.0)
        if self._progress:
            options["progress"] = progress or 0.0
        if self._album:  # called by keyword, gives a dictionary, and has generators of its own
            if hasattr(self._call, "set_random_seed"):
                self._call.set_random_seed(seed & 0xFFFFFFFF)  # pyright: ignore[reportFunctionMemberAccess]
            return self._call(image=sample)["image"]
        return self._call(sample, **options)


def takes(call: Callable[..., Any], keyword: str) -> bool:
    """True if a stage has this keyword."""
    try:
        return keyword in inspect.signature(call).parameters
    except (TypeError, ValueError):
        return False


def unit(seed: int, place: int) -> float:
    """A number in [0, 1) from a sample's seed and a stage's position, without using a generator (SplitMix64)."""
    z = (seed + 0x9E3779B97F4A7C15 * (place + 1)) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return ((z ^ (z >> 31)) >> 11) / (1 << 53)


def parts(sample: Any) -> tuple[Any, Any]:
    """The part of a sample that stages work on, and the sample into which the result goes."""
    return (sample[0], sample) if isinstance(sample, tuple) and sample else (sample, None)


def joined(first: Any, sample: Any) -> Any:
    """The sample with `first` in front."""
    if sample is None:
        return first
    if hasattr(sample, "_make"):
        return sample._make((first, *sample[1:]))
    return first, *sample[1:]
