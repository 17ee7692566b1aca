"""The settings that may differ from window to window, those available in this run, and the most that each change could gain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from pathlib import Path

from salience import events
from salience.errors import ConfigError
from salience.events import SettingsChanged, StepCosts
from salience.watch.model import MAX_WAIT_WHEN_FINE, Lever, ceiling, more_workers

PREFETCH_TIMES = 4
"""A deeper prefetch is so many times what it was."""
REUSED_SHARE = 0.75
"""Largest share of the visits that reuse an intermediate: one is made for every four visits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The settings of one window."""

    workers: int = 0
    cache: int = 0
    """Bytes of the cache; 0 = no cache."""
    treat: bool = False
    """True if intermediates are reused."""
    select: bool = False
    """True if fewer samples are visited."""
    resolution: bool = False
    """True if images are smaller in a part of the run."""
    prefetch: int = 0
    """Batches that each worker makes ahead; 0 = as given."""
    pin: bool = False
    """True if batches are copied to pinned memory, although that was left open."""

    @property
    def lossy(self) -> bool:
        """True if this can change the trained model."""
        return self.treat or self.select or self.resolution

    @property
    def numbers(self) -> list[float]:
        """The settings as numbers, for the other ranks."""
        return [float(value) for value in astuple(self)]

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Settings:
        workers, cache, treat, select, resolution, prefetch, pin = numbers
        return cls(
            workers=int(workers), cache=int(cache), treat=bool(treat), select=bool(select), resolution=bool(resolution),
            prefetch=int(prefetch), pin=bool(pin),
        )  # fmt: skip


def recorded(path: str | Path) -> dict[int, Settings]:
    """The settings in an event log (or a run folder with one), by the first window of each."""
    path = Path(path)
    path = path / "run.jsonl" if path.is_dir() else path
    names = [field.name for field in fields(Settings)]
    try:
        found = {
            data.window: Settings(**{name: getattr(data, name) for name in names})
            for data in (event.data for event in events.read(path))
            if isinstance(data, SettingsChanged)
        }
    except OSError as cause:
        raise ConfigError(
            f"auto is {str(path)!r}, which cannot be read ({cause.strerror}); it is True, 'lossy' or the event log of a run."
        ) from cause
    if not found:
        raise ConfigError(f"The event log {str(path)!r} has no settings to replay; it must be of a run with auto.")
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class AvailableLevers:
    """What can be switched on in this run."""

    cores: int = 1
    """Cores for the workers of one rank; 0 if the number of workers must not change."""
    cache: int = 0
    """Possible size of a cache in bytes; 0 if there can be none."""
    share: float = 1.0
    """Share of the source that fits into that cache."""
    reusable: tuple[str, ...] = ()
    """Stages whose results could be reused."""
    keep: Sequence[float] = ()
    """Share of the samples that a selection would visit, by window; empty where none can be switched on."""
    prefetch: int = 0
    """Batches that each worker makes ahead now; 0 if that must not change."""
    pin: bool = False
    """True if batches could be copied to pinned memory."""
    pixels: Sequence[float] = ()
    """Computation with smaller images relative to full size, by epoch; empty where there are no images."""
    refused: Mapping[str, str] = field(default_factory=dict[str, str])
    """Levers that cannot be tried, and why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One lever that could be switched on now."""

    name: str
    """Its name as the user would write it."""
    exact: bool
    """True if the result of training stays exactly the same."""
    remembers: bool
    """True if its gain builds up over a window, so that alternating windows say nothing."""
    settings: Settings
    """The settings with this lever on."""
    predicted: float
    """Largest possible speed-up."""

    @classmethod
    def of(cls, costs: StepCosts, lever: Lever, settings: Settings, *, remembers: bool = False) -> Option:
        predicted = ceiling(costs, lever).speedup or 1.0
        return cls(name=lever.name, exact=lever.exact, remembers=remembers, settings=settings, predicted=predicted)


def cache_lever(size: int, share: float) -> Lever:
    """The lever for a cache of `size` bytes, which holds a share of the source."""
    return Lever(name=f"cache={size}", exact=True, saves={"fetch": share})


def _exact(name: str, settings: Settings, predicted: float) -> Option:
    return Option(name=name, exact=True, remembers=False, settings=settings, predicted=predicted)


def options(costs: StepCosts, now: Settings, available: AvailableLevers, window: int) -> list[Option]:
    """Every lever that is off and could be on from `window` onwards."""
    found: list[Option] = []
    if (lever := more_workers(costs, available.cores)) is not None:
        found.append(Option.of(costs, lever, replace(now, workers=int(lever.name.partition("=")[2]))))
    if available.cache and not now.cache:
        lever = cache_lever(available.cache, available.share)
        found.append(Option.of(costs, lever, replace(now, cache=available.cache), remembers=True))
    # Fast enough on average, and waited for all the same.
    bursts = costs.input < costs.compute and costs.waiting > MAX_WAIT_WHEN_FINE
    if bursts and available.prefetch and not now.prefetch and now.workers:
        deeper = PREFETCH_TIMES * available.prefetch
        smooth = costs.step / max(costs.input, costs.compute)
        found.append(_exact(f"prefetch_factor={deeper}", replace(now, prefetch=deeper), smooth))
    if available.pin and not now.pin and costs.copy > 0:
        saved = costs.step / max(1e-9, costs.step - costs.copy)
        found.append(_exact("pin_memory=True", replace(now, pin=True), saved))
    if available.reusable and not now.treat:
        lever = Lever(name='treat="reuse"', exact=False, saves=dict.fromkeys(available.reusable, REUSED_SHARE))
        found.append(Option.of(costs, lever, replace(now, treat=True), remembers=True))
    left = available.keep[window:]
    if left and left[0] < 1 and not now.select:  # and not before the curve takes anything away
        saved = 1 - sum(left) / len(left)
        lever = Lever(name='select="default"', exact=False, saves={"input": saved, "compute": saved})
        found.append(Option.of(costs, lever, replace(now, select=True)))
    left = available.pixels[window:]
    if left and left[0] < 1 and not now.resolution:
        lever = Lever(name='treat="resolution"', exact=False, saves={"compute": 1 - sum(left) / len(left)})
        found.append(Option.of(costs, lever, replace(now, resolution=True)))
    return found
