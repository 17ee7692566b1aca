"""Settings as frozen dataclasses, in Python first and TOML second, with the same names in both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from salience.errors import ConfigError, did_you_mean

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Use:
    """One plug-in as used in a pipeline: its name (or the callable itself), its weight, its options."""

    name: str | Callable[..., Any]
    weight: float = 1.0
    """Scores only: share of this score in the sum of rank-normalised scores."""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def label(self) -> str:
        return self.name if isinstance(self.name, str) else getattr(self.name, "__name__", repr(self.name))

    def to_dict(self) -> dict[str, Any]:
        weight = {} if self.weight == 1.0 else {"weight": self.weight}
        return {"name": self.label, **weight, **self.options}


def use(spec: str | Callable[..., Any] | Mapping[str, Any] | Use) -> Use:
    """A Use from what people write: "loss", a function, or {"name": "loss", "weight": 2, option: value}."""
    if isinstance(spec, Use):
        return spec
    if isinstance(spec, str) or callable(spec):
        return Use(name=spec)
    if not isinstance(spec, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"A plug-in is written as a name, a function or a table with a name, not {spec!r}.")
    options = dict(spec)
    if "name" not in options:
        raise ConfigError(f"{options!r} names no plug-in; write e.g. {{name = 'loss', weight = 1.0}}.")
    name, weight = options.pop("name"), options.pop("weight", 1.0)
    if not isinstance(weight, (int, float)) or weight < 0:
        raise ConfigError(f"The weight of {name!r} is {weight!r}; it must be a number of at least 0.")
    return Use(name=name, weight=float(weight), options=options)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetching:
    """How far a plan may deviate towards samples that are cheap to fetch; needs a Loader with a cache."""

    top: float = 0.7
    """Share of the samples that count as important: only the others are exchanged."""
    refresh: float = 0.25
    """Share of the unpicked samples that are visited in addition, those with the least certain ranks first."""
    tolerance: float = 0.1
    """The number of samples of a class may change by this share of the samples exchanged."""
    max_age: int = 12
    """Windows after which an unimportant sample takes precedence over those that are cheaper to fetch."""

    def __post_init__(self) -> None:
        for name in ("top", "refresh", "tolerance"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"select.fetch.{name} is {getattr(self, name)}; it must be from 0 to 1.")
        if self.max_age < 1:
            raise ConfigError(f"select.fetch.max_age is {self.max_age}; it must be at least 1.")


def fetching(table: Any) -> Fetching | None:
    """A Fetching from a table; None if there is no table."""
    if table is None or isinstance(table, Fetching):
        return table
    if not isinstance(table, Mapping):
        raise ConfigError(f"select.fetch must be a table, not {table!r}.")
    return Fetching(**checked("select.fetch", cast("Mapping[str, Any]", table), _default_types(Fetching())))


_WORDS: dict[type, tuple[Any, str]] = {
    bool: (bool, "true or false"), int: (int, "a whole number"), float: ((int, float), "a number"), str: (str, "text"),
}  # fmt: skip
"""Type of a setting -> what may be given, and that in words."""


def checked(where: str, table: Mapping[str, Any], types: Mapping[str, type]) -> dict[str, Any]:
    """The settings in a table, each checked for its name and type; those of type `object` may have any value."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        if key not in types:
            raise ConfigError(f"{where} has no setting {key!r}.{did_you_mean(key, types)}")
        wanted = types[key]
        if wanted is not object:
            given, words = _WORDS[wanted]
            if not isinstance(value, given) or (isinstance(value, bool) and wanted is not bool):
                raise ConfigError(f"{where}.{key} is {value!r}; it must be {words}.")
        found[key] = float(value) if wanted is float else value
    return found


def _default_types(settings: Any) -> dict[str, type]:
    return {f.name: type(getattr(settings, f.name)) for f in fields(settings)}


EPOCHS_SCORED = 5
"""Epochs that a static selection scores before it chooses its subset."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectConfig:
    """One selection pipeline: filters, scores, a sampler, and how much is kept when."""

    filters: tuple[Use, ...] = ()
    scores: tuple[Use, ...] = ()
    """Rank-normalised to [0, 1] and summed with their weights; without any, every sample is equally important."""
    sampler: Use = Use(name="uniform")
    keep: Use = Use(name="constant", options={"share": 1.0})
    """A curve over the run: which share of the samples a window visits; "auto" is steered by validation results."""
    pick: float = 1.0
    """Share of every batch that is trained on, chosen after the forward pass (selective backprop); 1 trains on all."""
    steps: str = "fewer"
    """"fewer": a window with fewer visits has fewer steps. "constant": the same number of steps, with smaller batches."""
    lr_power: float = 0.5
    """With constant steps the learning rate is multiplied by (batch / batch_size)^lr_power; 1 is linear scaling."""
    fetch: Fetching | None = None
    """How far plans may deviate towards samples that are cheap to fetch; None: not at all."""
    mode: str = "dynamic"
    """"dynamic": each window makes a new selection. "static": one fixed subset, after `after` epochs of scoring."""
    after: int | None = None
    """Static mode: epochs that visit everything before the subset is chosen; None: 5, or none with `ledgers`."""
    ledgers: tuple[str, ...] = ()
    """Static mode: ledger files (or run folders); the subset is chosen by their mean score instead of the run's own."""
    robust: float | str = 0.0
    """Strength of early-learning regularisation in `loss()`, which drops nothing; "auto" follows the estimated noise."""

    def __post_init__(self) -> None:
        if self.robust != "auto" and (not isinstance(self.robust, (int, float)) or self.robust < 0):
            raise ConfigError(f"select.robust is {self.robust!r}; it must be 'auto' or a number of at least 0.")
        if not 0 < self.pick <= 1:
            raise ConfigError(f"select.pick is {self.pick}; it must be above 0 and at most 1.")
        if self.steps not in ("fewer", "constant"):
            raise ConfigError(f"select.steps is {self.steps!r}; it must be 'fewer' or 'constant'.")
        if self.lr_power < 0:
            raise ConfigError(f"select.lr_power is {self.lr_power}; it must be at least 0.")
        self._check_mode()

    def _check_mode(self) -> None:
        if self.mode not in ("dynamic", "static"):
            raise ConfigError(f"select.mode is {self.mode!r}; it must be 'dynamic' or 'static'.")
        if self.mode == "dynamic" and (self.after is not None or self.ledgers):
            raise ConfigError("select.after and select.ledgers are for mode = 'static'; set it, or leave them out.")
        if self.after is not None and (isinstance(self.after, bool) or self.after < 0):
            raise ConfigError(f"select.after is {self.after!r}; it must be an integer of at least 0.")
        if self.mode == "static" and self.fetch is not None:
            raise ConfigError(
                "select.fetch exchanges samples of every plan, and mode = 'static' fixes them; leave one out."
            )

    @property
    def scored_for(self) -> int:
        """Static mode: epochs before the subset is chosen."""
        return self.after if self.after is not None else 0 if self.ledgers else EPOCHS_SCORED

    def to_dict(self) -> dict[str, Any]:
        return {
            "filters": [u.to_dict() for u in self.filters],
            "scores": [u.to_dict() for u in self.scores],
            "sampler": self.sampler.to_dict(),
            "keep": self.keep.to_dict(),
            "pick": self.pick,
            "steps": self.steps,
            "lr_power": self.lr_power,
            "robust": self.robust,
            "mode": self.mode,
            **({} if self.mode == "dynamic" else {"after": self.scored_for, "ledgers": list(self.ledgers)}),
            **({} if self.fetch is None else {"fetch": asdict(self.fetch)}),
        }

    def merged(self, table: Mapping[str, Any]) -> SelectConfig:
        """This config with the entries of a (TOML) table in place of its own."""
        plain: dict[str, type] = {"pick": float, "steps": str, "lr_power": float, "mode": str, "after": int}
        changes = checked("select", table, {f.name: plain.get(f.name, object) for f in fields(self)})
        for key, value in changes.items():
            if key in ("filters", "scores"):
                if isinstance(value, str) or not isinstance(value, Sequence):
                    raise ConfigError(f"select.{key} must be a list, not {value!r}.")
                changes[key] = tuple(use(item) for item in cast("Sequence[Any]", value))
            elif key == "keep" and isinstance(value, (int, float)):
                changes[key] = Use(name="constant", options={"share": float(value)})
            elif key in ("sampler", "keep"):
                changes[key] = use(value)
            elif key == "ledgers":
                changes[key] = tuple(map(str, [value] if isinstance(value, (str, Path)) else value))
            elif key == "fetch":
                changes[key] = fetching(value)
        return replace(self, **changes)


def _setting(default: T, text: str) -> T:
    """A field, with its text in `salience train --help`."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """What `salience train` does; each field is a command-line option of the same name."""

    data: str = _setting(
        "", "folder of images (class = directory), .tar/.tar.gz of one, packed shards, or their s3:// or https:// URL"
    )
    model: str = _setting("resnet9", "mlp, cnn, resnet9, resnet18, or pkg.module:factory")
    epochs: int = _setting(10, "passes over the data")
    batch_size: int = _setting(128, "images per step, over all ranks")
    lr: float = _setting(0.0, "peak learning rate; 0 = 0.4 * batch size / 512")
    weight_decay: float = _setting(0.0005, "weight decay, on weights but not on biases and norms")
    size: int = _setting(0, "pixels per side; 0 = the shorter side of the first image, at most 224")
    select: str = _setting("", "preset or TOML file that selects the samples to train on; without it, all")
    ledger: str = _setting(
        "", "ledger, or folder of a run, from which to start; 'share': one ledger for all jobs on --feed"
    )
    workers: int = _setting(2, "processes that decode images")
    cache: str = _setting("", "memory for image bytes, which are read ahead of the plan (4GiB); without it, none")
    feed: str = _setting(
        "",
        "name of a feed shared by jobs on this machine (auto: that of the data): images are read and decoded once for all",
    )
    treat: str = _setting("", "which images are decoded again: reuse, echo or auto; without it, all at every visit")
    max_broken: float = _setting(0.01, "share of the images that may be broken and replaced by others")
    balance: bool = _setting(False, "under torchrun: give each rank a part of every batch in proportion to its speed")
    sync: str = _setting(
        "", "under torchrun: how gradients are exchanged, a mode of salience.sync such as auto, bf16, topk or local"
    )
    zero: int = _setting(
        0, "under torchrun: divide optimizer state (1), also gradients (2) and parameters (3) among ranks; 0 = nothing"
    )
    remote_scores: bool = _setting(
        False, "use scores from `salience score`, a process near the data that watches --out"
    )
    auto: bool = _setting(False, "measure the run and keep what makes it faster; the same training, up to rounding")
    sinks: str = _setting(
        "", "where to send figures too: tensorboard:FOLDER, wandb:PROJECT, mlflow:URI; separated by commas"
    )
    seed: int = _setting(0, "same seed, same run")
    device: str = _setting("", "cpu, cuda, cuda:1, ...; without it, the best available")
    out: str = _setting("runs/train", "folder for checkpoints, ledger and event log")
    resume: bool = _setting(False, "continue from the newest whole checkpoint in --out")
    checkpoint_every: int = _setting(0, "batches between checkpoints, in addition to one after every epoch; 0 = none")


def train_config(table: Mapping[str, Any]) -> TrainConfig:
    """A TrainConfig from a table, every value checked for its name and type."""
    config = TrainConfig(**checked("train", table, _default_types(TrainConfig())))
    for name in ("epochs", "batch_size"):
        if getattr(config, name) < 1:
            raise ConfigError(f"train.{name} is {getattr(config, name)}; it must be at least 1.")
    for name in ("seed", "lr", "weight_decay", "size", "workers", "checkpoint_every", "max_broken", "zero"):
        if getattr(config, name) < 0:
            raise ConfigError(f"train.{name} is {getattr(config, name)}; it must be at least 0.")
    return config


def read_toml(path: str | Path) -> dict[str, Any]:
    """The tables of a settings file; only [select] and [train] are allowed at the top."""
    import tomllib

    try:
        with Path(path).open("rb") as file:
            tables = tomllib.load(file)
    except OSError as cause:
        raise ConfigError(f"The settings file {str(path)!r} cannot be read: {cause.strerror}.") from cause
    except tomllib.TOMLDecodeError as cause:
        raise ConfigError(f"{str(path)!r} is not valid TOML: {cause}.") from cause
    for name, table in tables.items():
        if name not in ("select", "train"):
            raise ConfigError(f"{str(path)!r} has an unknown table {name!r}.{did_you_mean(name, ('select', 'train'))}")
        if not isinstance(table, dict):
            raise ConfigError(f"{str(path)!r}: {name} must be a table ([{name}]), not {table!r}.")
    return tables
