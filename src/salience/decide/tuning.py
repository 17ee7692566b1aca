"""Tunes settings of a selection on validation results by short runs: optuna proposes, statistics decide.

    first run     the default, on half of the validation set: how small a difference could be seen?
    search        optuna proposes settings, each gets a short run, and the gain per second is reported back
    confirmation  the best and the default on fresh seeds, on the other half of the validation set, sample by sample
    decision      the best, if it is better by more than chance explains; otherwise the default stays

A search always finds something that looks better, so data and seeds that the search has not seen decide.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from salience.config import SelectConfig, Use
from salience.errors import ConfigError, MissingExtra, did_you_mean
from salience.registry import find
from salience.select import preset
from salience.stats import t_quantile

Results = npt.NDArray[np.float64]
"""A number per validation sample, higher is better: 1 if the model is right, or minus its loss, float64 [n]."""
Train = Callable[[SelectConfig, int], Any]
"""A short run with this selection and seed; returns `Results`, or these and the cost of the run."""
Bounds = tuple[float, float]

SPACES: dict[str, dict[str, Bounds]] = {
    "unsure": {"floor": (0.02, 0.6), "temper": (0.0, 1.0), "power": (0.5, 2.0)},
    "ratio": {"explore": (0.0, 0.6)},
    "probability": {"floor": (0.02, 0.6), "power": (0.25, 2.0)},
    "slide": {"begin": (0.0, 0.5), "until": (0.55, 1.0)},
    "window": {"width": (0.5, 1.0), "drop": (0.0, 0.3)},
    "prune_rescale": {"drop": (0.2, 0.8)},
    "hide": {"confidence": (0.5, 0.95)},
}
"""Sampler -> its settings to tune and their bounds: exploration, and offset and width of sliding windows."""
MIN_GAIN = 0.01
"""Smallest difference worth finding; a validation set that cannot show it cannot decide."""
CONFIRMATIONS = 3
"""Number of new seeds on which the best and the default are compared."""
LEVEL = 0.9
"""Level of two-sided intervals: 5% on each side."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """One short run of the search."""

    settings: Mapping[str, float]
    metric: float
    """Mean result on the half of the validation set used by the search."""
    seconds: float
    reward: float
    """Gain over the start per second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuned:
    """The result of a search."""

    config: SelectConfig
    """The config to train with: the best that was found, or the default."""
    settings: Mapping[str, float]
    """The settings that were found; empty if the default stays."""
    reason: str
    gain: float = 0.0
    """Mean difference from the default on new seeds and the other half of the validation set."""
    interval: tuple[float, float] = (0.0, 0.0)
    """Its interval, two-sided at 90%."""
    detectable: float = 0.0
    """Smallest difference that the validation set can show."""
    tried: tuple[Tried, ...] = field(default=())

    @property
    def kept_default(self) -> bool:
        return not self.settings


def tune_select(
    train: Train,
    select: str | SelectConfig = "default",
    *,
    space: Mapping[str, Bounds] | None = None,
    trials: int = 12,
    start: float = 0.0,
    min_gain: float = MIN_GAIN,
    seed: int = 0,
) -> Tuned:
    """Tune settings of `select` on validation results; the default stays unless another is better by more than chance.

    `train(select, seed)` makes a short run and returns a number per validation sample, higher is better (1 where the model is
    right), always for the same samples in the same order; or these and the cost of the run, which then replaces its seconds
    (visits, for instance, on a shared machine). `space` maps settings to (low, high): "sampler.floor",
    "keep.share", "scores.0.weight", ...; by default the settings of the sampler. The reward of a run is (mean result -
    `start`) per second. If the validation set cannot show a difference of `min_gain`, there is no search.
    Needs `pip install 'salience[tune]'`.
    """
    base = preset(select) if isinstance(select, str) else select
    wanted = dict(space) if space is not None else default_space(base)
    if not wanted:
        raise ConfigError(f"Sampler {base.sampler.label!r} has nothing to tune by itself; pass space=.")
    if trials < 1:
        raise ConfigError(f"trials is {trials}; it must be at least 1.")
    usual = {name: read_setting(base, name) for name in wanted}
    for name, (low, high) in wanted.items():
        if not low < high:
            raise ConfigError(f"space: {name} goes from {low} to {high}; the first must be lower.")
        with_settings(base, {name: low})  # a misspelt one is said before the first run
    first, seconds = _run(train, base, seed)
    search, judge = halves(len(first), seed)
    smallest = detectable(first[judge])
    if smallest > min_gain:
        reason = (
            f"the validation set has {len(first):,} samples, of which half judge: they show a difference of {smallest:.3g} at "
            f"best, and {min_gain:.3g} is wanted; the default stays"
        )
        return Tuned(config=base, settings={}, reason=reason, detectable=smallest)
    tried = [_tried(usual, first[search], seconds, start)]
    tried += _searched(train, base, wanted, usual, tried[0], search, trials=trials, start=start, seed=seed)
    best = max(tried, key=lambda one: one.reward)
    if best is tried[0]:
        reason = "no other setting gained as much per second in the search; the default stays"
        return Tuned(config=base, settings={}, reason=reason, detectable=smallest, tried=tuple(tried))
    chosen = with_settings(base, best.settings)
    pairs = [(_run(train, base, s)[0][judge], _run(train, chosen, s)[0][judge]) for s in _fresh(seed)]
    gain, low, high = paired_gain(pairs)
    kept = low <= 0
    where = f"{gain:+.3g} ({low:+.3g} to {high:+.3g}) on {CONFIRMATIONS} fresh seeds and {len(judge):,} samples"
    return Tuned(
        config=base if kept else chosen, settings={} if kept else dict(best.settings), gain=gain, interval=(low, high),
        reason=f"{where}: {'that may be chance; the default stays' if kept else 'better by more than chance explains'}",
        detectable=smallest, tried=tuple(tried),
    )  # fmt: skip


def _searched(
    train: Train, base: SelectConfig, wanted: Mapping[str, Bounds], usual: Mapping[str, float], first: Tried,
    search: npt.NDArray[np.int64], *, trials: int, start: float, seed: int,
) -> list[Tried]:  # fmt: skip
    try:
        import optuna  # pyright: ignore[reportMissingImports]
    except ImportError as cause:
        raise MissingExtra.of("optuna", "tune", "tuning a selection") from cause
    optuna = cast("Any", optuna)
    space = {name: optuna.distributions.FloatDistribution(low, high) for name, (low, high) in wanted.items()}
    sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=max(3, trials // 3))

    def asked(study: Any) -> list[Tried]:
        if all(low <= usual[name] <= high for name, (low, high) in wanted.items()):
            study.add_trial(optuna.trial.create_trial(params=dict(usual), distributions=space, value=first.reward))
        found: list[Tried] = []
        for _ in range(trials):
            trial = study.ask(space)
            settings = {name: float(value) for name, value in trial.params.items()}
            results, seconds = _run(train, with_settings(base, settings), seed)
            found.append(_tried(settings, results[search], seconds, start))
            study.tell(trial, found[-1].reward)
        return found

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # a search says what it found, and nothing else
    try:
        return asked(optuna.create_study(direction="maximize", sampler=sampler))
    finally:
        optuna.logging.set_verbosity(before)


def _run(train: Train, config: SelectConfig, seed: int) -> tuple[Results, float]:
    begin = time.perf_counter()
    given = train(config, seed)
    seconds = time.perf_counter() - begin
    if isinstance(given, tuple):
        given, seconds = cast("tuple[Any, float]", given)
    results = np.asarray(given, dtype=np.float64)
    if results.ndim != 1 or len(results) < 2 or not np.isfinite(results).all():
        raise ConfigError(
            f"train returned results of shape {results.shape}; it must be a finite number per validation sample, [n]."
        )
    return results, seconds


def _tried(settings: Mapping[str, float], results: Results, seconds: float, start: float) -> Tried:
    metric = float(results.mean())
    return Tried(settings=dict(settings), metric=metric, seconds=seconds, reward=(metric - start) / max(seconds, 1e-9))


def _fresh(seed: int) -> list[int]:
    return [seed + 1 + i for i in range(CONFIRMATIONS)]


def halves(n: int, seed: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Two halves of the validation set, drawn by the seed."""
    order = np.random.default_rng((seed, n)).permutation(n)
    return np.sort(order[: n // 2]), np.sort(order[n // 2 :])


def detectable(results: Results) -> float:
    """Smallest mean difference of two settings that these validation samples can show, one-sided at 95%: 1.645 * s / sqrt(n).

    s^2 is the variance of a sample's result, which equals that of the difference of two models with error correlation 0.5.
    More runs help little, since they share the samples.
    """
    return float(_quantile(len(results) - 1) * np.sqrt(results.var(ddof=1) / len(results)))


def paired_gain(pairs: Sequence[tuple[Results, Results]]) -> tuple[float, float, float]:
    """Mean of new - old over seeds and samples, and its interval, 5% on each side.

    Two sources of chance add up: which samples are in the validation set (the variance of a sample's mean difference over n),
    and which seeds were drawn (the variance between seeds over their number, with Student's t for so few).
    """
    differences = np.stack([new - old for old, new in pairs])
    of_samples, of_seeds = differences.mean(axis=0), differences.mean(axis=1)
    half = _quantile(len(of_samples) - 1) ** 2 * of_samples.var(ddof=1) / len(of_samples)
    if len(of_seeds) > 1:
        half += _quantile(len(of_seeds) - 1) ** 2 * of_seeds.var(ddof=1) / len(of_seeds)
    gain, half = float(differences.mean()), float(np.sqrt(half))
    return gain, gain - half, gain + half


def _quantile(dof: int) -> float:
    return t_quantile(LEVEL, min(max(1, dof), 200))


def default_space(config: SelectConfig) -> dict[str, Bounds]:
    """The settings of this selection that can be tuned without changing how many samples it visits."""
    found = {f"sampler.{name}": bounds for name, bounds in SPACES.get(config.sampler.label, {}).items()}
    if len(config.scores) > 1:
        found |= {f"scores.{i}.weight": (0.0, 2.0) for i in range(len(config.scores))}
    return found


def read_setting(config: SelectConfig, name: str) -> float:
    """The current value of a setting: its plug-in's default if it is not given, NaN if that is not a number."""
    used, option, _ = _place(config, name)
    if option == "weight" and name.startswith("scores."):
        return used.weight
    kind = {"sampler": "samplers", "keep": "curves"}.get(name.partition(".")[0], "scores")
    parameters = inspect.signature(find(kind, used.name)).parameters
    known = {name: one.default for name, one in parameters.items() if one.kind is one.KEYWORD_ONLY}
    if option not in known:
        raise ConfigError(f"space: {used.label!r} of {name!r} has no option {option!r}.{did_you_mean(option, known)}")
    value = used.options.get(option, known[option])
    return float(value) if isinstance(value, (int, float)) else np.nan


def with_settings(config: SelectConfig, settings: Mapping[str, float]) -> SelectConfig:
    """The selection with these settings in place of its own."""
    for name, value in settings.items():
        read_setting(config, name)  # a misspelt one is an error
        used, option, put = _place(config, name)
        weighs = option == "weight" and name.startswith("scores.")
        new = {"weight": value} if weighs else {"options": {**used.options, option: value}}
        config = put(replace(used, **cast("Any", new)))
    return config


def _place(config: SelectConfig, name: str) -> tuple[Use, str, Callable[[Use], SelectConfig]]:
    """The plug-in that has a setting, its name there, and a function that replaces the plug-in."""
    part, _, option = name.rpartition(".")
    if part in ("sampler", "keep"):
        return getattr(config, part), option, lambda new: replace(config, **cast("Any", {part: new}))
    at = part.removeprefix("scores.")
    if at == part or not at.isdecimal() or int(at) >= len(config.scores):
        raise ConfigError(
            f"space: there is no setting {name!r}; write sampler.X, keep.X or scores.0.weight (number of scores: "
            f"{len(config.scores)})."
        )
    i, scores = int(at), config.scores
    return scores[i], option, lambda new: replace(config, scores=(*scores[:i], new, *scores[i + 1 :]))
