"""What this run could be switched to, and what each switch could gain at most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from salience.decide.settings import Settings
from salience.watch.model import Costs, Lever, ceiling, more_workers

REUSED_SHARE = 0.75
"""Largest share of the visits that reuse an intermediate: one is made for four visits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AvailableLevers:
    """What can be switched on in this run."""

    cores: int = 1
    """Cores for the workers of one rank; 0 if the number of workers must not change."""
    cache: int = 0
    """Bytes that a cache could have; 0 if there can be none."""
    share: float = 1.0
    """Share of the source that would fit into that cache."""
    reusable: tuple[str, ...] = ()
    """Stages whose results could be reused."""
    keep: Sequence[float] = ()
    """Share of the samples that a selection would visit, by window; empty where none can be switched on."""
    refused: Mapping[str, str] = field(default_factory=dict[str, str])
    """Levers that cannot be tried, and why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One lever that could be switched on now."""

    name: str
    """As the user would write it."""
    exact: bool
    """True if the run stays exactly the same."""
    remembers: bool
    """True if its gain builds up over a window, so that switching it on and off in turn says nothing."""
    settings: Settings
    """The settings with this lever on."""
    predicted: float
    """Largest possible speed-up."""
    saves: Mapping[str, float] = field(default_factory=dict[str, float])
    """Stage -> largest share of its cost that is saved."""


def options(costs: Costs, now: Settings, available: AvailableLevers, window: int) -> list[Option]:
    """Every lever that is off and could be on from `window` onwards."""
    found: list[Option] = []

    def add(lever: Lever, settings: Settings, *, remembers: bool = False) -> None:
        predicted = ceiling(costs, lever).speedup
        found.append(
            Option(
                name=lever.name, exact=lever.exact, remembers=remembers, settings=settings,
                predicted=min(predicted, 99.0), saves=dict(lever.saves),
            )
        )  # fmt: skip

    if (lever := more_workers(costs, available.cores)) is not None:
        add(lever, replace(now, workers=int(lever.name.partition("=")[2])))
    if available.cache and not now.cache:
        lever = Lever(name=f"cache={available.cache}", exact=True, saves={"fetch": available.share})
        add(lever, replace(now, cache=available.cache), remembers=True)
    if available.reusable and not now.treat:
        lever = Lever(name='treat="reuse"', exact=False, saves=dict.fromkeys(available.reusable, REUSED_SHARE))
        add(lever, replace(now, treat=True), remembers=True)
    left = available.keep[window:]
    if left and left[0] < 1 and not now.select:  # and not before the curve takes anything away
        saved = 1 - sum(left) / len(left)
        lever = Lever(name='select="default"', exact=False, saves={"input": saved, "compute": saved})
        add(lever, replace(now, select=True))
    return found
