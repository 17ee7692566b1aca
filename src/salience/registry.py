"""Plug-ins found by name: a literal table of built-ins plus entry points. Installed is not enabled."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from salience.errors import ConfigError, PluginError, did_you_mean

PluginFunction = Callable[..., Any]
P = TypeVar("P", bound=PluginFunction)


def _of(module: str, *names: str) -> dict[str, str]:
    """name -> "module:function", for functions of one module of `select`."""
    return {name: f"salience.select.{module}:{name}" for name in names}


BUILT_IN: dict[str, dict[str, str]] = {
    "filters": {
        **_of("filters", "warmup", "age_cap", "class_floor", "tail", "coarse"), **_of("noise", "noise"),
        **_of("experts", "panel"), **_of("redundancy", "redundancy"), **_of("quality", "quality"),
    },
    "scores": _of(
        "scores", "loss", "ema_loss", "difficulty", "unsureness", "staleness", "el2n", "grand", "margin", "aum", "forgetting",
        "variance", "entropy", "confidence", "ucb", "uncertainty", "rho", "proxy", "cscore",
    ),
    "samplers": _of(
        "samplers", "uniform", "ratio", "threshold", "probability", "unsure", "prune_rescale", "hide", "window", "slide",
        "lowest",
    ),
    "curves": _of("curves", "constant", "step", "cosine", "all_less_all", "alternate", "auto"),
}  # fmt: skip
"""kind -> name -> "module:function"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """What the framework must know about a plug-in besides its result."""

    needs: tuple[str, ...] = ()
    """Ledger columns it reads that are empty unless `loss()` is given more than the losses, e.g. `margin`; "reference":
    the opinion of another model, from `reference=`; "copies": near-copies among the samples, in `view.copies`, found with the
    plug-in's options `ratio` and `visits` if it has them; "trial": the outcomes of trials on hard samples, in `view.trial`;
    "quality": the column of the user's own in `view.quality`, from `quality=`."""
    unbiased: bool = False
    """Samplers: the stated inclusion probabilities are exact, so weights 1/p give the full gradient in expectation."""
    exact: bool = True
    """The number of visits in a window follows from the config alone, so `total_steps` is known in advance."""


def card(**facts: Any) -> Callable[[P], P]:
    """Attach a Card to a plug-in: `@card(needs=("margin",))`. Plug-ins without one get `Card()`."""

    def attach(plugin: P) -> P:
        plugin.__salience_card__ = Card(**facts)  # pyright: ignore[reportFunctionMemberAccess]
        return plugin

    return attach


def card_of(plugin: PluginFunction) -> Card:
    return getattr(plugin, "__salience_card__", Card())


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Where a plug-in comes from."""

    kind: str
    name: str
    target: str
    """"module:function"."""
    package: str
    """The distribution that ships it, with its version; "salience" for built-ins."""


@functools.cache
def _installed(kind: str) -> Mapping[str, Origin]:
    table = {
        name: Origin(kind=kind, name=name, target=target, package="salience") for name, target in BUILT_IN[kind].items()
    }
    for point in entry_points(group=f"salience.{kind}"):
        package = f"{point.dist.name} {point.dist.version}" if point.dist else "unknown"
        if point.name in table:
            raise PluginError(
                f"{kind[:-1]} {point.name!r} is provided twice, by {table[point.name].package} "
                f"and by {package}; uninstall one of them or rename its entry point."
            )
        table[point.name] = Origin(kind=kind, name=point.name, target=point.value, package=package)
    return table


def forget_installed() -> None:
    """Read the installed entry points again, for tests and for packages installed while running."""
    _installed.cache_clear()


def kinds() -> tuple[str, ...]:
    return tuple(BUILT_IN)


def catalogue(kind: str) -> list[Origin]:
    """Every plug-in of a kind, built in or installed, by name."""
    if kind not in BUILT_IN:
        raise ConfigError(f"There is no plug-in kind {kind!r}.{did_you_mean(kind, BUILT_IN)}")
    return [origin for _, origin in sorted(_installed(kind).items())]


def find(kind: str, name: str | PluginFunction) -> PluginFunction:
    """The plug-in with that name; a callable is returned unchanged."""
    if not isinstance(name, str):
        return name
    table = _installed(kind)
    if name not in table:
        raise PluginError(f"There is no {kind[:-1]} {name!r}.{did_you_mean(name, table)}")
    origin = table[name]
    try:
        found = EntryPoint(name, origin.target, f"salience.{kind}").load()
    except Exception as cause:
        raise PluginError(
            f"{kind[:-1]} {name!r} of {origin.package} cannot be loaded from {origin.target!r}: {cause}"
        ) from cause
    if not callable(found):
        raise PluginError(f"{kind[:-1]} {name!r} of {origin.package} is {found!r}, which cannot be called.")
    return found


def check_options(kind: str, name: str, plugin: PluginFunction, options: Mapping[str, Any]) -> None:
    """Raise ConfigError if an option is not a keyword-only argument of the plug-in."""
    parameters = inspect.signature(plugin).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    allowed = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    for option in options:
        if option not in allowed:
            raise ConfigError(f"{kind[:-1]} {name!r} has no option {option!r}.{did_you_mean(option, allowed)}")


def summary(plugin: PluginFunction) -> str:
    """The first line of the plug-in's docstring."""
    return (inspect.getdoc(plugin) or "").partition("\n")[0]
