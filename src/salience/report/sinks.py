"""Other places for a run's figures: TensorBoard, Weights & Biases, MLflow. They read events, during the run or later.

The step of a figure is the number of visits before it, so that runs that visit different shares of the data can be compared.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from salience.errors import ConfigError, MissingExtra, PluginError, SalienceError, did_you_mean, without_secrets
from salience.events import (
    Evaluated,
    Event,
    EventData,
    FeedCounted,
    LeverDecided,
    RunStarted,
    Steered,
    TreatCounted,
    Warned,
    WindowClosed,
    WindowPlanned,
    encode,
)
from salience.events.log import log_warning

Sink = Callable[[Event], None]


def figures(data: EventData) -> dict[str, float]:
    """The numbers of an event, by name; most kinds have none."""
    match data:
        case WindowPlanned():
            dropped = {f"left_out/{note.name}": note.dropped for note in data.filters}
            share = data.picked / max(1, data.population)
            found: dict[str, float | None] = {"select/picked": data.picked, "select/share": share, **dropped}
        case WindowClosed():
            found = {"time/seconds": data.seconds, "time/salience": sum(data.overhead.values())}
            if data.steps is not None:
                found |= {f"time/{name}": getattr(data.steps, name) for name in ("wait", "forward", "backward")}
        case Evaluated():
            found = {"metric": data.metric, "progress": data.progress, **data.more}
        case Steered():
            found = {"select/keep": data.after}
        case FeedCounted():
            cache = data.cache
            found = {"feed/bytes_sent": data.bytes_sent, "feed/requests": data.requests, "feed/broken": data.broken}
            found |= {"feed/hit_rate": cache.get("hits", 0) / cache["samples"]} if cache.get("samples") else {}
        case TreatCounted():
            found = {"treat/reused_share": data.reused / max(1, data.visits), "treat/saved_seconds": data.saved_seconds}
        case _:
            found = {}
    return {name: float(value) for name, value in found.items() if value is not None}


def said(data: EventData) -> str:
    """The text of an event; nothing if it has only numbers."""
    match data:
        case Warned():
            return without_secrets(data.text)
        case LeverDecided():
            measured = "" if data.measured is None else f", measured {data.measured:.2f}x"
            return f"{data.action} {data.lever}{measured}: {data.reason}"
        case _:
            return ""


class _Stepped:
    """A sink that passes events on as settings, numbers and words, each with the number of visits before it."""

    def __call__(self, event: Event) -> None:
        data = event.data
        self._step = max(getattr(data, "visited", 0), getattr(self, "_step", 0))  # some events do not say
        if isinstance(data, RunStarted):
            self.settings(encode(data))
        if found := figures(data):
            self.numbers(found, self._step)
        if text := said(data):
            self.words(f"{event.kind}.{event.seq}", text, self._step)

    def settings(self, given: Mapping[str, Any]) -> None: ...

    def numbers(self, found: Mapping[str, float], step: int) -> None: ...

    def words(self, name: str, text: str, step: int) -> None: ...


class TensorBoard(_Stepped):
    """Writes into a folder that `tensorboard --logdir` shows."""

    def __init__(self, folder: str) -> None:
        _needed("tensorboard", "tensorboard")
        module = _needed("torch.utils.tensorboard", "tensorboard")
        self._writer = module.SummaryWriter(folder)
        weakref.finalize(self, self._writer.close)

    def settings(self, given: Mapping[str, Any]) -> None:
        self._writer.add_text("settings", f"```\n{json.dumps(given, indent=1)}\n```", 0)

    def numbers(self, found: Mapping[str, float], step: int) -> None:
        for name, value in found.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def words(self, name: str, text: str, step: int) -> None:
        self._writer.add_text(name.partition(".")[0], text, step)


class WeightsAndBiases(_Stepped):
    """A run of the project, with the user's own settings of W&B (WANDB_MODE=offline, say)."""

    def __init__(self, project: str) -> None:
        self._run: Any = _needed("wandb", "wandb").init(project=project, reinit="create_new")
        self._run.define_metric("*", step_metric="visits")
        weakref.finalize(self, self._run.finish)

    def settings(self, given: Mapping[str, Any]) -> None:
        self._run.config.update(dict(given), allow_val_change=True)

    def numbers(self, found: Mapping[str, float], step: int) -> None:
        self._run.log({**found, "visits": step})

    def words(self, name: str, text: str, step: int) -> None:
        self._run.log({name.partition(".")[0]: text, "visits": step})


class MLflow(_Stepped):
    """A run in the experiment "salience" at a tracking URI (a folder, or a server)."""

    def __init__(self, uri: str) -> None:
        tracking = _needed("mlflow.tracking", "mlflow")
        try:
            self._client: Any = tracking.MlflowClient(tracking_uri=uri)
            found = self._client.get_experiment_by_name("salience")
            experiment = self._client.create_experiment("salience") if found is None else found.experiment_id
            self._id = self._client.create_run(experiment).info.run_id
        except Exception as cause:
            # Not `from cause`: its text may hold the whole URL, password and all.
            raise ConfigError(f"MLflow cannot write to {uri!r}: {str(cause).partition(chr(10))[0]}") from None
        weakref.finalize(self, _end_mlflow_run, self._client, self._id)

    def settings(self, given: Mapping[str, Any]) -> None:
        for key, value in given.items():
            self._client.set_tag(self._id, f"salience.{key}", json.dumps(value)[:5000])

    def numbers(self, found: Mapping[str, float], step: int) -> None:
        for name, value in found.items():
            self._client.log_metric(self._id, name, value, step=step)

    def words(self, name: str, text: str, step: int) -> None:
        self._client.set_tag(self._id, f"salience.{name}", text[:5000])


def _end_mlflow_run(client: Any, run: str) -> None:
    """End the run without showing MLflow's output and errors, which contain the URL of the run with its password."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            client.set_terminated(run)
    except Exception as error:
        log_warning(f"The end of the run did not reach MLflow ({type(error).__name__}); it shows the run as running.")


SINKS: dict[str, tuple[Callable[[str], Sink], str]] = {
    "tensorboard": (TensorBoard, "a folder"),
    "wandb": (WeightsAndBiases, "a project"),
    "mlflow": (MLflow, "a tracking URI"),
}


def sink(given: str | Sink) -> Sink:
    """The sink with a name such as "tensorboard:runs/tb"; a callable is returned unchanged."""
    if callable(given):
        return given
    if not isinstance(given, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(
            f'A sink is {given!r}; it must be a function of each event, or text like "tensorboard:runs/tb".'
        )
    kind, _, where = given.partition(":")
    if kind not in SINKS:
        raise ConfigError(
            f'There is no sink {kind!r}; a sink is written as "tensorboard:runs/tb".{did_you_mean(kind, SINKS)}'
        )
    make, what = SINKS[kind]
    if not where:
        raise ConfigError(f'The sink {kind!r} needs {what}: write "{kind}:..." with it behind the colon.')
    try:
        return make(where)
    except SalienceError:
        raise
    except Exception as cause:
        why = f"{type(cause).__name__}: {str(cause).partition(chr(10))[0]}"
        raise ConfigError(f"The sink {given!r} cannot be opened ({why}).") from None  # its text may hold all of the URL


def guarded(listener: Sink, warn: Callable[[str], None], *, strict: bool = False) -> Sink:
    """A sink that cannot stop a run: its first error becomes a warning, and it receives no more events."""
    alive = [True]

    def listen(event: Event) -> None:
        if not alive[0]:
            return
        try:
            listener(event)
        except Exception as error:
            alive[0] = False
            why = f"{type(error).__name__}: {without_secrets(str(error))[:200]}"
            text = f"The sink {type(listener).__name__} failed and receives no more events ({why})."
            if strict and isinstance(listener, _Stepped):
                raise PluginError(text) from None  # its own text may hold the password of its URL
            if strict:
                raise
            warn(text)

    return listen


def replayed(events: Iterable[Event], given: str) -> None:
    """Send a log to a sink afterwards."""
    listener = sink(given)
    for event in events:
        listener(event)


def _needed(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as cause:
        raise MissingExtra.of(extra, extra, f"The sink {extra!r}") from cause
