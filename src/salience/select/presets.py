"""Named pipelines: what `select="default"` and the other names stand for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from salience.config import Fetching, SelectConfig, Use
from salience.errors import ConfigError, did_you_mean


def _use(name: str, **options: Any) -> Use:
    return Use(name=name, options=options)


def _hardest(score: str, *, explore: float = 0.0) -> SelectConfig:
    """A preset of the samples with the highest scores. As in `default`, both ends keep everything: only the rule differs."""
    return SelectConfig(
        scores=(Use(name=score),),
        sampler=_use("ratio", explore=explore),
        keep=_use("all_less_all", share=0.4, warmup=2, end=0.2),
    )


_DEFAULT = SelectConfig(
    filters=(_use("redundancy", full=False), _use("noise")),
    scores=(Use(name="unsureness"),),
    sampler=_use("unsure", floor=0.1, temper=0.5),
    keep=_use("all_less_all", share=0.5, warmup=2, end=0.1),
    robust="auto",
)

PRESETS: dict[str, SelectConfig] = {
    "default": _DEFAULT,
    # `default`, where reading the samples is what takes the time: Loader(source, cache=...).
    "io": replace(_DEFAULT, fetch=Fetching()),
    # The control: any samples, equally likely.
    "uniform": SelectConfig(keep=_use("constant", share=0.5)),
    # Published rules with their published settings (docs/scores.md has the sources).
    "infobatch": SelectConfig(
        scores=(Use(name="loss"),),
        sampler=_use("prune_rescale", drop=0.5, start=3.0),
        keep=_use("step", share=0.5, end=0.125),
    ),
    "kakurenbo": SelectConfig(
        scores=(Use(name="loss"),),
        sampler=_use("hide", confidence=0.7),
        keep=_use("constant", share=0.7),
    ),
    "seta": SelectConfig(
        scores=(Use(name="loss"),),
        sampler=_use("window", drop=0.1, groups=5, width=0.9),
        keep=_use("step", share=0.5, end=0.125),
    ),
    "el2n": _hardest("el2n"),
    "grand": _hardest("grand"),
    "forgetting": _hardest("forgetting"),
    "epsilon_greedy": _hardest("ema_loss", explore=0.1),
    "ucb": _hardest("ucb"),
    # Everything goes forward; the harder half of each batch goes backward (loss() picks it, or the loop by pick()).
    "selective_backprop": SelectConfig(pick=0.5),
    # Rules that ask another model: Loader(..., reference=...).
    "rho": _hardest("rho"),
    "proxy": SelectConfig(
        scores=(Use(name="proxy"),), sampler=_use("ratio", explore=0.0), keep=_use("constant", share=0.5)
    ),
    # Data fine-pruning: for a few epochs at a time, the highest losses rest.
    "fine_pruning": SelectConfig(
        scores=(Use(name="loss"),),
        sampler=_use("lowest"),
        keep=_use("alternate", drop=0.25, prune=4, regular=3),
    ),
    # Ours: the easiest of every class by the reference go once and for all, the rest is selected window by window.
    "coarse_to_fine": SelectConfig(
        filters=(_use("coarse", drop=0.3),),
        scores=(Use(name="ema_loss"),),
        sampler=_use("ratio", explore=0.05),
        keep=_use("all_less_all", share=0.4, warmup=2, end=0.2),
    ),
    # Ours: easy to hard.
    "window": SelectConfig(
        scores=(Use(name="ema_loss"),),
        sampler=_use("slide", begin=0.0, until=0.8),
        keep=_use("all_less_all", share=0.5, warmup=2, end=0.2),
    ),
}


def preset(name: str) -> SelectConfig:
    if name not in PRESETS:
        raise ConfigError(f"There is no preset {name!r}.{did_you_mean(name, PRESETS)}")
    return PRESETS[name]


def preset_name(select: Mapping[str, Any]) -> str:
    """Name of the preset that equals a resolved selection, as a table; empty if there is none."""
    same = json.dumps(select, sort_keys=True)
    return next((name for name in PRESETS if json.dumps(preset(name).to_dict(), sort_keys=True) == same), "")
