"""One plug-in of a pipeline: found by name, with checked results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from salience.config import Use
from salience.errors import ConfigError, PluginError
from salience.ledger import COLUMNS
from salience.registry import Card, card_of, check_options, find
from salience.select.view import Candidates, Clock, Draw, Floats, Verdict, View


@dataclass(frozen=True, kw_only=True, slots=True)
class Plugin:
    """One plug-in of a pipeline, with its weight and options."""

    kind: str
    name: str
    call: Callable[..., Any]
    options: Mapping[str, Any]
    weight: float
    card: Card

    @property
    def key(self) -> str:
        return f"{self.kind}/{self.name}"

    def __call__(self, *given: Any) -> Any:
        """Call the plug-in; raises PluginError (for a curve, ConfigError) if the result breaks the contract of its kind."""
        return _CHECKS[self.kind](self, self.call(*given, **self.options), *given)


def plugin_of(kind: str, used: Use) -> Plugin:
    """The plug-in that a config names; raises ConfigError if there is none, or if it has no such options."""
    call = find(kind, used.name)
    check_options(kind, used.label, call, used.options)
    return Plugin(kind=kind, name=used.label, call=call, options=used.options, weight=used.weight, card=card_of(call))


def _verdict(plugin: Plugin, verdict: Any, view: View) -> Verdict:
    n = view.n
    if not isinstance(verdict, Verdict):
        raise PluginError(f"it must return a Verdict, not {type(verdict).__name__}")
    for name in ("keep", "force"):
        mask = getattr(verdict, name)
        if mask is not None and (mask.shape != (n,) or mask.dtype != np.bool_):
            raise PluginError(f"Verdict.{name} has shape {mask.shape} of {mask.dtype}; it must be bool [{n}]")
    factor = verdict.factor
    if factor is not None and (factor.shape != (n,) or not (factor >= 0).all()):
        raise PluginError(f"Verdict.factor has shape {factor.shape}; it must be {n} numbers of at least 0")
    return verdict


def _score(plugin: Plugin, score: Any, view: View) -> Floats:
    score, n = np.asarray(score), view.n
    if score.shape != (n,) or score.dtype.kind not in "fiu":
        raise PluginError(f"it returned shape {score.shape} of {score.dtype}; a score is one number per sample, [{n}]")
    missing = [column for column in plugin.card.needs if column in COLUMNS and COLUMNS[column].needs_logits]
    if missing and np.isnan(score).all() and not view.unseen.all():
        raise PluginError(f"nothing is known of {', '.join(missing)}; pass logits and targets to loss()")
    return score.astype(np.float32, copy=False)


def _draw(plugin: Plugin, draw: Any, candidates: Candidates, budget: int, rng: Any) -> Draw:
    if not isinstance(draw, Draw):
        raise PluginError(f"it must return a Draw, not {type(draw).__name__}")
    positions, inclusion = draw.positions, draw.inclusion
    if plugin.card.exact and len(positions) != budget:
        raise PluginError(
            f"it drew {len(positions)} samples for a budget of {budget}; say @card(exact=False) if that is meant"
        )
    if len(positions) and (positions.min() < 0 or positions.max() >= len(candidates)):
        raise PluginError(f"it drew positions outside 0 to {len(candidates) - 1}")
    taken = np.zeros(len(candidates), dtype=bool)
    taken[positions] = True
    if int(np.count_nonzero(taken)) != len(positions):
        raise PluginError("it drew a sample twice")
    if inclusion is None:
        if plugin.card.unbiased:
            raise PluginError("an unbiased sampler states its inclusion probabilities")
    elif inclusion.shape != positions.shape or not ((inclusion > 0) & (inclusion <= 1 + 1e-6)).all():
        raise PluginError("its inclusion probabilities must be above 0 and at most 1, one for each sample drawn")
    return draw


def _share(plugin: Plugin, share: Any, clock: Clock) -> float:
    if not 0 < share <= 1:
        raise ConfigError(f"The curve {plugin.name!r} gave {share} for window {clock.window}; allowed: (0, 1].")
    return float(share)


_CHECKS: dict[str, Callable[..., Any]] = {"filters": _verdict, "scores": _score, "samplers": _draw, "curves": _share}
