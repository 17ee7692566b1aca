"""Named pipelines: what `select="default"` and the other names stand for."""

from __future__ import annotations

from salience.config import SelectConfig, Use
from salience.errors import ConfigError, did_you_mean

PRESETS: dict[str, SelectConfig] = {
    "default": SelectConfig(
        filters=(
            Use(name="class_floor", options={"share": 0.05}),
            Use(name="tail", options={"share": 0.02}),
            Use(name="age_cap", options={"windows": 10}),
        ),
        scores=(Use(name="ema_loss"),),
        sampler=Use(name="ratio", options={"explore": 0.1}),
        keep=Use(name="all_less_all", options={"share": 0.4, "warmup": 2, "end": 0.2}),
    ),
    "uniform": SelectConfig(keep=Use(name="constant", options={"share": 0.5})),
    "infobatch": SelectConfig(
        scores=(Use(name="loss"),),
        sampler=Use(name="prune_rescale", options={"drop": 0.5, "start": 3.0}),
        keep=Use(name="step", options={"share": 0.5, "end": 0.125}),
    ),
}


def preset(name: str) -> SelectConfig:
    if name not in PRESETS:
        raise ConfigError(f"There is no preset {name!r}.{did_you_mean(name, PRESETS)}")
    return PRESETS[name]
