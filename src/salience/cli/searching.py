"""A search of `salience tune`: trials by Ray Tune, one table while they run, and a comparison at the end."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import logging
import os
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from salience.app import checkpoint
from salience.app.data import AUTO, open_split
from salience.app.train import train
from salience.config import TrainConfig, train_config
from salience.errors import ConfigError, MissingExtra, StateError
from salience.feed.sharing import finding
from salience.feed.sizes import size
from salience.report.compared import compare, said_of
from salience.report.console import SECONDS_BETWEEN_UPDATES, columns, say
from salience.report.story import Story

Trials = Sequence[tuple[str, TrainConfig]]


@dataclass(slots=True)
class Row:
    """One trial as the table shows it."""

    state: str = "waiting"
    epoch: int = 0
    accuracy: float = float("nan")
    best: float = float("nan")
    visits: int = 0
    knowledge: str = ""
    seconds: float = 0.0

    def told(self, result: Mapping[str, Any]) -> None:
        """An epoch is over."""
        self.state, self.epoch = "running", int(result["training_iteration"])
        self.accuracy, self.visits = float(result["accuracy"]), int(result["visits"])
        self.best = max(self.accuracy, self.best) if self.best == self.best else self.accuracy
        self.knowledge, self.seconds = str(result["knowledge"]), float(result["time_total_s"])


def search(trials: Trials, args: argparse.Namespace) -> None:
    """Train the trials, show how they fare, and compare them."""
    quiet()
    try:
        from salience.frameworks import ray as frameworks
    except MissingExtra as cause:
        raise MissingExtra.of("ray", "ray", "`salience tune`") from cause
    import ray
    from ray import tune
    from ray.tune.schedulers import FIFOScheduler

    out = Path(args.out)
    taken = [name for name, config in trials if checkpoint.exists(Path(config.out))]
    if taken:
        raise StateError(f"{str(out / taken[0])!r} already holds a run; choose another --out. Nothing was changed.")
    first = trials[0][1]
    data = open_split(
        first.data, size=first.size, cache=first.cache, max_broken=first.max_broken, feed=args.feed or AUTO
    )
    name, one_pass = data.train.name, int(data.train.sizes.sum())
    rows = {name: Row() for name, _ in trials}
    say(f"{len(trials)} trials over {len(data):,} images of {len(data.classes)} classes, by the feed {name!r}.")
    cpus = os.cpu_count() or 1
    if not ray.is_initialized():
        ray.init(
            num_cpus=max(cpus, int(args.cpus)),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    if args.ledger == "share":
        say(
            "Unless an earlier search has left a ledger in --out, a scout trains for one epoch before the trials start."
        )
    start = time.perf_counter()
    tables = {label: asdict(replace(config, feed=name, data=_absolute(config.data), out=str(Path(config.out).resolve())))
              for label, config in trials}  # fmt: skip
    with shown(rows, start) as draw:
        stopper = FIFOScheduler() if args.all else None
        made = frameworks.tuner(
            one_run(tables), param_space={"trial": tune.grid_search([label for label, _ in trials])},
            ledger=_shared(out) if args.ledger == "share" else None, scheduler=stopper, windows=first.epochs,
            resources={"cpu": args.cpus, **({"gpu": args.gpus} if args.gpus else {})},
            max_concurrent_trials=args.at_once or None,
            run_config=tune.RunConfig(
                name="tune", storage_path=str((out / "ray").resolve()), verbose=0,
                callbacks=[_watcher(tune.Callback, rows, draw, first.epochs)],
            ),
        )  # fmt: skip
        results = made.fit()
    say_result(trials, rows, time.perf_counter() - start)
    errors = [one.error for one in results if one.error is not None]
    if errors:
        say(f"{len(errors)} trials failed; the first said: {str(errors[0]).strip().splitlines()[-1]}")
    say(frameworks.fairness({row.knowledge for row in rows.values() if row.epoch}))
    status = finding.ask(name, "status")
    if status is not None:
        sent, took = status["bytes_sent"], sum(row.visits for row in rows.values())
        say(f"The store sent {size(sent)} for {took:,} visits; one pass over the data is {size(one_pass)}.")
    if data.train.started:
        finding.ask(name, "stop")
    if len(errors) == len(trials):
        raise ConfigError("No trial has come to an end; see the first error above.")


def one_run(tables: Mapping[str, Mapping[str, Any]]) -> Callable[[dict[str, Any], Any], None]:
    """The training function of Ray's trials: `salience train` in the trial's folder, its console in a file there."""

    def trial(config: dict[str, Any], judge: Any) -> None:
        settings = train_config(tables[config["trial"]])
        folder = Path(settings.out)
        if judge.scouting:
            folder = folder.with_name("scout")
            settings = replace(settings, out=str(folder))
        saved = checkpoint.newest(folder, say) if checkpoint.exists(folder) else None  # Ray starts a lost trial again
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "console.txt").open("a") as file, contextlib.redirect_stdout(file):
            train(settings, saved, judge)

    return trial


def _shared(out: Path) -> Any:
    from salience.ledger.sharing import SharedLedger

    return SharedLedger(out / "ledgers")


def _absolute(data: str) -> str:
    return data if "://" in data else str(Path(data).expanduser().resolve())


def quiet() -> None:
    """Ray's own tables and hints are off: there is one table, ours."""
    for name, value in {
        "RAY_AIR_NEW_OUTPUT": "0",
        "RAY_DEDUP_LOGS": "1",
        "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    }.items():
        os.environ.setdefault(name, value)
    for name in ("ray", "ray.tune", "ray.train"):
        logging.getLogger(name).setLevel(logging.ERROR)


# ---------------------------------------------------------------- while it runs


def _watcher(base: Any, rows: dict[str, Row], draw: Callable[[str], None], epochs: int) -> Any:
    """A Callback of Ray Tune that keeps the rows up to date."""

    class Watcher(base):
        def on_trial_start(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
            name = trial.config["trial"]
            rows[name].state = "running"
            draw(name)

        def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: Any, **info: Any) -> None:
            name = trial.config["trial"]
            rows[name].told(result)
            draw(name)

        def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
            name = trial.config["trial"]
            rows[name].state = "finished" if rows[name].epoch >= epochs else "stopped"
            draw(name)

        def on_trial_error(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
            name = trial.config["trial"]
            rows[name].state = "failed"
            draw(name)

        def __getstate__(self) -> dict[str, Any]:  # Ray saves callbacks with its experiment
            return {}

    return Watcher()


@contextmanager
def shown(rows: dict[str, Row], start: float) -> Generator[Callable[[str], None]]:
    """A function that shows what has changed: one table that stays in place in a terminal, else a line per event."""
    if not sys.stdout.isatty() or importlib.util.find_spec("rich") is None:
        yield lambda name: say(_line(name, rows[name]))
        return
    from rich.live import Live
    from rich.text import Text

    def table() -> Any:
        running = sum(row.state == "running" for row in rows.values())
        done = sum(row.state in ("finished", "stopped", "failed") for row in rows.values())
        head = f"{done} of {len(rows)} trials are over, {running} are running; {time.perf_counter() - start:.0f} s"
        return Text(f"{as_table(rows)}\n{head}")

    with Live(get_renderable=table, refresh_per_second=1 / SECONDS_BETWEEN_UPDATES):
        yield lambda name: None


def _line(name: str, row: Row) -> str:
    if not row.epoch:
        return f"{name}: {row.state}"
    return f"{name}: {row.state}, epoch {row.epoch}, accuracy {row.accuracy:.1%}, {row.visits:,} visits"


def as_table(rows: Mapping[str, Row]) -> str:
    """The trials, the furthest and best first."""
    order = sorted(rows.items(), key=lambda item: (-item[1].epoch, -(item[1].best if item[1].epoch else 0)))
    cells = [("trial", "", "epoch", "accuracy", "best", "visits", "seconds")]
    for name, row in order:
        known = row.epoch > 0
        cells.append((
            name, row.state, f"{row.epoch}", f"{row.accuracy:.1%}" if known else "", f"{row.best:.1%}" if known else "",
            f"{row.visits:,}", f"{row.seconds:.1f}",
        ))  # fmt: skip
    return columns(cells, right=range(2, 7), indent="  ")


# ---------------------------------------------------------------- at the end


def say_result(trials: Trials, rows: Mapping[str, Row], seconds: float) -> None:
    """The trials, and how the settings compare that were trained to the end."""
    say(f"\n{as_table(rows)}\n")
    done = [(name, config) for name, config in trials if rows[name].state == "finished"]
    total = sum(row.visits for row in rows.values())
    say(f"{len(done)} of {len(trials)} trials were trained to the end, in {seconds:.0f} s and {total:,} visits.")
    if not done:
        return
    best = max(done, key=lambda item: rows[item[0]].accuracy)[0]
    say(f"The best is {best} with {rows[best].accuracy:.2%}: {dict(trials)[best].out}")
    compared = compare([_story(name, config) for name, config in done])
    if len(compared.arms) > 1:
        say("\n".join(said_of(compared)))
    elif len(done) < len(trials):
        say("Those that were stopped are not compared: one epoch says little about the end.")
    for note in compared.notes:
        say(f"Note: {note}")


def _story(name: str, config: TrainConfig) -> Story:
    from salience.cli.opening import open_run

    return open_run(config.out, name=name, whole=False).story
