"""Ray (2.51 or newer): `tuner` for searches over one feed and one ledger, `report` and `restore` for Ray Train.

tuner             a ray.tune.Tuner: ASHA stops trials at window edges, and what a stopped trial held of the feed is free
Trial             what the training function of a trial gets: its data, its Loader, its checkpoints
report, restore   in the loop of a TorchTrainer: a Loader's state in Ray's checkpoints, with that of the model
compared          the trials of a search in one table, with what they knew when they started
"""

from __future__ import annotations

import copy
import logging
import secrets
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from salience.errors import ConfigError, MissingExtra, StateError
from salience.frameworks.ledgers import Snapshot, TrialBoard, TrialsLedger, started
from salience.ledger.sharing import SharedLedger
from salience.loader import Loader
from salience.report.console import columns

try:
    import ray
    import ray.train
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler, FIFOScheduler
    from ray.tune.search.sample import Domain
except ImportError as cause:
    raise MissingExtra.of("ray", "ray", "salience.frameworks.ray") from cause

CHECKPOINT = "salience.pt"
"""File of a checkpoint that holds the states of all parts."""
LOADER = "loader"
"""Name of the Loader among the parts of a trial."""


class HasState(Protocol):
    """A Loader, a model, an optimizer, a schedule."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


Train = Callable[[dict[str, Any], "Trial"], Any]


class _ScoutIsBack(Exception):
    """Ends the training function of a scout."""


def tuner(
    train: Train,
    *,
    param_space: Mapping[str, Any],
    data: Any = None,
    ledger: str | SharedLedger | None = None,
    scout: int = 1,
    metric: str = "accuracy",
    mode: str = "max",
    windows: int = 100,
    num_samples: int = 1,
    resources: Mapping[str, float] | None = None,
    scheduler: Any = None,
    run_config: Any = None,
    **tune_config: Any,
) -> Any:
    """A `ray.tune.Tuner` whose trials share `data`, and with `ledger="share"` what is known of the samples.

        def train(config, trial):
            loader = trial.loader(batch_size=128, epochs=10, select="default", seed=config["seed"])
            trial.restore(model=model, optimizer=optimizer)
            for epoch in range(loader.epoch, 10):
                ...
                trial.report({"accuracy": tested}, model=model, optimizer=optimizer)

        results = tuner(train, param_space={...}, data=feed, ledger="share", windows=10).fit()

    Each `report` ends a window. There ASHA (or another `scheduler`) stops trials whose `metric` is not among the best third
    (`mode` "max") after 1, 3, 9, ... windows, before the last of `windows`. `resources` are those of a trial, by default one
    CPU.

    With `ledger`, all trials start from the same knowledge, so that none has an advantage: that of earlier searches, if a
    `SharedLedger` has any, or else that of a scout, which trains for `scout` windows with the middle of every grid before
    `tuner` returns. What the trials learn is collected in the folder while they run, for the next search. Other arguments are
    those of a `ray.tune.TuneConfig`.
    """
    if not ray.is_initialized():
        ray.init(include_dashboard=False)
    wanted = dict(resources or {"cpu": 1})
    run_config = copy.copy(run_config) or tune.RunConfig(verbose=0)  # it may be given a name
    shared = None
    if ledger is not None:
        shared = _shared(_folder(ledger, run_config), train, param_space, data, scout, wanted)
    trainable = tune.with_parameters(_as_trial(train), data=data, shared=shared)
    settings: dict[str, Any] = {
        "metric": metric, "mode": mode, "num_samples": num_samples,
        "scheduler": scheduler or asha(windows), **tune_config,
    }  # fmt: skip
    made: Any = tune.Tuner(
        tune.with_resources(trainable, wanted),
        param_space=dict(param_space),
        tune_config=tune.TuneConfig(**settings),
        run_config=run_config,
    )
    made.ledger = shared  # the actor lives as long as somebody here refers to it
    return made


def asha(windows: int) -> Any:
    """ASHA that compares trials after 1, 3, 9, ... windows and has the best third go on.

    Not in the last window: a trial that has come so far ends by itself, and writes what it writes at its end.
    """
    if windows < 2:
        return FIFOScheduler()
    return ASHAScheduler(max_t=windows - 1, grace_period=1, reduction_factor=3, stop_last_trials=False)


def _folder(ledger: str | SharedLedger, run_config: Any) -> SharedLedger:
    """Where what the trials learn is collected."""
    if isinstance(ledger, SharedLedger):
        return ledger
    if ledger != "share":
        raise ConfigError(f'ledger is {ledger!r}; it must be "share", a SharedLedger, or None.')
    if "://" in str(run_config.storage_path):
        raise ConfigError(
            f"The results go to {run_config.storage_path!r}, where no ledgers can be kept; pass ledger=SharedLedger(folder)."
        )
    run_config.name = run_config.name or f"salience-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    root = run_config.storage_path or Path.home() / "ray_results"
    return SharedLedger(Path(root).expanduser() / run_config.name / "ledgers")


def _shared(
    folder: SharedLedger, train: Train, space: Mapping[str, Any], data: Any, scout: int, resources: Mapping[str, float]
) -> TrialsLedger:
    """What all trials of this search start from; a scout finds it out if nobody did before."""
    comparison = folder.comparison or f"search-{secrets.token_hex(4)}"
    at = str(folder.folder.resolve())
    known = SharedLedger(at).begin()
    collector = started(at)
    if known.ledger is None and scout > 0:
        nothing = TrialsLedger(start=Snapshot.of(known), collector=collector)
        needs = {**resources}
        task: Any = ray.remote(_scout).options(
            num_cpus=needs.pop("cpu", 1), num_gpus=needs.pop("gpu", 0), resources=needs or None, max_retries=1
        )
        ray.get(task.remote(train, middle(space), data, nothing, scout))
    known = SharedLedger(at, comparison=comparison).begin()
    return TrialsLedger(start=Snapshot.of(known), collector=collector)


def _scout(train: Train, config: dict[str, Any], data: Any, nothing: TrialsLedger, windows: int) -> None:
    """Train for a few windows, and leave what was learnt."""
    board = TrialBoard(nothing, "scout")
    trial = Trial(data, board, scouts=windows)
    try:
        train(config, trial)
    except _ScoutIsBack:
        pass
    finally:
        trial.close()
    board.wait()


def middle(space: Mapping[str, Any]) -> dict[str, Any]:
    """The middle of every grid, and a value from every other search space."""
    found: dict[str, Any] = {}
    for name, value in space.items():
        if isinstance(value, Mapping):
            inner = cast("Mapping[str, Any]", value)
            grid = inner.get("grid_search")
            found[name] = middle(inner) if grid is None else grid[len(grid) // 2]
        else:
            found[name] = value.sample(random_state=0) if isinstance(value, Domain) else value
    return found


def _as_trial(train: Train) -> Callable[..., Any]:
    """The training function as Ray Tune calls it."""

    def trial(config: dict[str, Any], data: Any, shared: TrialsLedger | None) -> Any:
        name = tune.get_context().get_trial_id() or "trial"
        this = Trial(data, None if shared is None else TrialBoard(shared, name))
        try:
            return train(config, this)
        finally:  # Ray ends a stopped trial by SystemExit from report()
            this.close()

    trial.__name__ = getattr(train, "__name__", "train")
    return trial


class Trial:
    """One trial of a search: made by `tuner`, passed to the training function."""

    def __init__(self, data: Any, board: TrialBoard | None, *, scouts: int = 0) -> None:
        """`scouts` > 0: the windows after which a scout has seen enough."""
        self.data = data
        """What was given to `tuner`."""
        self._board, self._scouts = board, scouts
        self._loader: Loader | None = None
        self._windows = 0

    @property
    def known(self) -> str:
        """Digest of what this trial started from; empty if ledgers are not shared."""
        return "" if self._board is None else self._board.digest

    def loader(self, dataset: Any = None, batch_size: int = 1, **options: Any) -> Loader:
        """The Loader of this trial, over `dataset` (default: the `data` given to `tuner`), with the options of a Loader."""
        if self._loader is not None:
            raise ConfigError("This trial has a loader already; keep the one that trial.loader() returned.")
        if self._board is not None:
            options.setdefault("ledger", self._board)
        self._loader = Loader(self.data if dataset is None else dataset, batch_size, **options)
        return self._loader

    @property
    def ledger(self) -> TrialBoard | None:
        """For a Loader that is made elsewhere, as its `ledger=`; None if ledgers are not shared."""
        return self._board

    @property
    def scouting(self) -> bool:
        """True if this is no trial but the scout, whose result does not count."""
        return self._scouts > 0

    def follow(self, loader: Loader) -> None:
        """Use a loader that was made elsewhere, with `ledger=trial.ledger`."""
        self._loader = loader

    def restore(self, **parts: HasState) -> bool:
        """Continue from the checkpoint of this trial, the loader included; False if there is none."""
        found = None if self._scouts else tune.get_checkpoint()
        return _restore(found, self._with_loader(parts))

    def report(self, metrics: Mapping[str, float], **parts: HasState) -> None:
        """Report the end of a window, and save a checkpoint of the loader and `parts` if there are any.

        Here the trial may end. `window`, `visits` and `knowledge` are added to the metrics.
        """
        loader = self._loader
        if loader is None:
            raise ConfigError("report() comes after trial.loader(): trials are compared at the edges of its windows.")
        if not loader.between_windows:
            raise ConfigError(
                "report() was called in the middle of a window; trials are compared, and stopped, where one ends. Shorter "
                "windows: trial.loader(window=...)."
            )
        self._windows += 1
        if self._scouts:
            if self._windows >= self._scouts:
                raise _ScoutIsBack
            return
        told: dict[str, Any] = {**metrics, "window": loader.epoch, "visits": loader.visits, "knowledge": self.known}
        with ExitStack() as stack:
            folder = _saved(self._with_loader(parts), stack) if parts else None
            tune.report(told, checkpoint=None if folder is None else tune.Checkpoint.from_directory(folder))

    def close(self) -> None:
        """Leave the feed: what this trial held of it is free for others."""
        if self._loader is not None:
            self._loader.close()
        if self._board is not None:
            try:
                self._board.wait()
            except Exception as cause:  # the actor is lost for good: the trial is not
                logging.getLogger("salience").warning("What this trial has learnt last did not arrive: %s", cause)

    def _with_loader(self, parts: Mapping[str, HasState]) -> dict[str, HasState]:
        if LOADER in parts or self._loader is None:
            raise ConfigError(f"trial.loader() comes first, and its state is saved as {LOADER!r} without being named.")
        return {LOADER: self._loader, **parts}


# ---------------------------------------------------------------- Ray Train


def report(metrics: Mapping[str, Any], **parts: HasState) -> None:
    """`ray.train.report` with a checkpoint of these parts (loader=loader, model=model, ...). Every rank must call it."""
    with ExitStack() as stack:
        states = {name: part.state_dict() for name, part in parts.items()}  # collective for a Loader
        checkpoint = None
        if ray.train.get_context().get_world_rank() == 0 and parts:
            checkpoint = ray.train.Checkpoint.from_directory(_written(states, stack))
        ray.train.report(dict(metrics), checkpoint=checkpoint)


def restore(**parts: HasState) -> bool:
    """Continue every part from Ray Train's checkpoint; False if there is none. Every rank must call it."""
    return _restore(ray.train.get_checkpoint(), parts)


def _restore(checkpoint: Any, parts: Mapping[str, HasState]) -> bool:
    if checkpoint is None:
        return False
    with checkpoint.as_directory() as folder:
        path = Path(folder) / CHECKPOINT
        if not path.exists():
            raise StateError(f"The checkpoint has no {CHECKPOINT}: it was not written by salience.frameworks.ray.")
        states: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
    missing = sorted(parts.keys() - states.keys())
    if missing:
        raise StateError(f"The checkpoint has no state of {', '.join(missing)}; it has {', '.join(sorted(states))}.")
    for name, part in parts.items():
        part.load_state_dict(states[name])
    return True


def _saved(parts: Mapping[str, HasState], stack: ExitStack) -> str:
    return _written({name: part.state_dict() for name, part in parts.items()}, stack)


def _written(states: Mapping[str, Any], stack: ExitStack) -> str:
    """A folder with these states, which is gone with the stack."""
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    torch.save(dict(states), Path(folder) / CHECKPOINT)
    return folder


# ---------------------------------------------------------------- in words


def compared(results: Any, *, metric: str = "accuracy", mode: str = "max") -> str:
    """The trials of a search as a table, the best first, and whether they may be compared."""
    rows = [
        ("trial", *(names := sorted({name for one in results for name in one.config})), metric, "windows", "visits")
    ]
    done = [one for one in results if one.metrics and metric in one.metrics]
    for one in sorted(done, key=lambda one: one.metrics[metric], reverse=mode == "max"):
        said, config = one.metrics, one.config
        rows.append((
            said["trial_id"], *(f"{config.get(name, '')}" for name in names), f"{said[metric]:.4g}",
            f"{said['training_iteration']}", f"{said.get('visits', 0):,}",
        ))  # fmt: skip
    failed = [one for one in results if one.error is not None]
    lines = [columns(rows, right=range(1, len(rows[0])))]
    if failed:
        lines.append(f"{len(failed)} of {len(results)} trials failed; the first said: {_last_line(failed[0].error)}")
    return "\n".join([*lines, fairness({one.metrics.get("knowledge", "") for one in done})])


def fairness(known: Collection[str]) -> str:
    """Whether all trials started from the same knowledge."""
    known = set(known)
    if known <= {""}:
        return "Ledgers were not shared: every trial started from nothing."
    if len(known) > 1:
        return f"Trials started from different knowledge ({', '.join(sorted(known))}), so they should not be compared."
    digest = known.pop()
    if digest == "nothing":
        return "Every trial started from nothing; what they learnt is there for the next search."
    return f"Every trial started from the same shared ledger ({digest}), and none from what another had just learnt."


def _last_line(error: Any) -> str:
    return str(error).strip().splitlines()[-1]
