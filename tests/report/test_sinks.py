"""Sinks: the real TensorBoard, W&B (offline) and MLflow (in a file), read back by their own readers."""

from __future__ import annotations

import gc
import importlib.util
import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import salience
from salience.cli import main
from salience.errors import ConfigError
from salience.events import Evaluated, EventLog, Warned
from salience.report.sinks import figures

from conftest import make_model, require

EPOCHS, N = 4, 300


def train(problem: TensorDataset, *sinks, **more) -> salience.Loader:
    loader = salience.Loader(problem, 50, epochs=EPOCHS, select="default", sinks=sinks, **more)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(EPOCHS):
        for x, y in loader:
            logits = model(x)
            loss = loader.loss(F.cross_entropy(logits, y, reduction="none"), logits, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        loader.evaluated(0.25 * loader.epoch)
    return loader


def need(package: str) -> None:
    require(importlib.util.find_spec(package) is not None, package)


def steps_of(loader: salience.Loader) -> list[int]:
    """Visits made before each result."""
    picked = [event["picked"] for event in loader.events.recent if event["kind"] == "plan"]
    return [sum(picked[: k + 1]) for k in range(EPOCHS)]


def test_tensorboard_shows_results_by_visits(problem, tmp_path):
    need("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    loader = train(problem, f"tensorboard:{tmp_path}")
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    found = read.Scalars("metric")
    assert [one.value for one in found] == [0.25, 0.5, 0.75, 1.0]
    assert [one.step for one in found] == steps_of(loader)
    assert [one.step for one in read.Scalars("select/share")] == [0, *steps_of(loader)[:-1]]
    assert "time/seconds" in read.Tags()["scalars"]
    assert "settings/text_summary" in read.Tags()["tensors"]


def test_mlflow_has_a_finished_run_in_its_file_store(problem, tmp_path, monkeypatch):
    need("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # which newer ones ask for
    from mlflow.tracking import MlflowClient

    uri = (tmp_path / "mlruns").as_uri()
    loader = train(problem, f"mlflow:{uri}")
    steps = steps_of(loader)
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("salience")
    [run] = client.search_runs([experiment.experiment_id])
    found = client.get_metric_history(run.info.run_id, "metric")
    assert sorted((one.step, one.value) for one in found) == list(zip(steps, [0.25, 0.5, 0.75, 1.0], strict=True))
    assert run.data.tags["salience.population"] == str(N)
    assert run.info.status == "RUNNING"
    del loader
    gc.collect()
    assert client.get_run(run.info.run_id).info.status == "FINISHED"


WANDB = """
import sys, torch, salience
from torch.utils.data import TensorDataset
loader = salience.Loader(TensorDataset(torch.randn(60, 2)), 20, epochs=2, sinks=["wandb:some-project"])
for _ in range(2):
    for x, in loader:
        loader.loss(x.sum(1) ** 2)
    loader.evaluated(0.5 * loader.epoch)
"""


def test_wandb_writes_an_offline_run(tmp_path):
    need("wandb")
    code = str(Path(salience.__file__).parents[1])
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": code}
    env |= {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", WANDB], env=env, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    [file] = tmp_path.rglob("run-*.wandb")
    rows = list(history(file))
    assert [row["visits"] for row in rows if "metric" in row] == [60, 120]
    assert [row["metric"] for row in rows if "metric" in row] == [0.5, 1.0]
    assert any("time/seconds" in row for row in rows)


def history(file: Path):
    """What an offline run logged: W&B's own messages, in the log format of LevelDB behind seven bytes of header."""
    from wandb.proto import wandb_internal_pb2

    data, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if 32768 - at % 32768 < 7:  # no record begins in the last bytes of a block
            at += 32768 - at % 32768
        if kind in (1, 4):  # in one piece, or its last one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            whole = b""
            if record.WhichOneof("record_type") == "history":
                yield {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}


def test_a_function_is_a_sink_and_one_that_fails_is_told_once_and_left_alone(problem):
    seen, calls = [], []

    def broken(event):
        calls.append(event)
        raise OSError("no room")

    loader = train(problem, seen.append, broken)
    assert [event["kind"] for event in seen].count("evaluated") == EPOCHS
    assert len(calls) == 1
    warnings = [event["text"] for event in loader.events.recent if event["kind"] == "warning"]
    assert [text for text in warnings if "sink" in text] == [
        "The sink function failed and receives no more events (OSError: no room)."
    ]
    with pytest.raises(OSError, match="no room"):
        train(problem, broken, strict=True)


@pytest.mark.parametrize(
    ("given", "says"),
    [("tensorbord:x", "Did you mean 'tensorboard'"), ("wandb", "needs a project"), ("mlflow:", "needs a tracking URI")],
)
def test_what_is_no_sink_is_said_at_once(problem, given, says):
    with pytest.raises(ConfigError, match=says):
        salience.Loader(problem, 50, sinks=[given])


def test_a_log_is_sent_afterwards(problem, tmp_path, capsys):
    need("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(problem, log=tmp_path / "run.jsonl")
    assert main(["report", str(tmp_path / "run.jsonl"), "--sink", f"tensorboard:{tmp_path / 'tb'}"]) == 0
    assert "Sent to tensorboard" in capsys.readouterr().out
    read = EventAccumulator(str(tmp_path / "tb"))
    read.Reload()
    assert [one.value for one in read.Scalars("metric")] == [0.25, 0.5, 0.75, 1.0]


def test_a_resumed_run_goes_on_at_its_visits(problem):
    def run(loader, windows):
        for _ in range(windows):
            for x, _ in loader:
                loader.loss(x.sum(1) ** 2)
            loader.evaluated(0.5)

    seen: list = []
    first = salience.Loader(problem, 50, epochs=4)
    run(first, 2)
    second = salience.Loader(problem, 50, epochs=4, sinks=[seen.append])
    second.load_state_dict(first.state_dict())
    run(second, 1)
    assert [event["visited"] for event in seen if event["kind"] in ("plan", "evaluated")] == [2 * N, 3 * N]


def test_a_damaged_log_is_sent_as_far_as_it_can_be(tmp_path, capsys):
    need("tensorboard")
    log = EventLog(tmp_path / "x.jsonl")
    log.emit("run", population=3)
    log.emit("plan", window=0, picked=5, population=0, filters=[])
    with log.path.open("a") as file:
        file.write('{"kind": "plan", "window": 0}\n{"kind": "decision", "action": "keep", "measured": "much"}\n')
    log.emit("evaluated", metric=0.5, window=1, visited=7)
    assert main(["report", str(tmp_path / "x.jsonl"), "--sink", f"tensorboard:{tmp_path / 'tb'}"]) == 0
    assert "2 events with missing or wrong fields were left out" in capsys.readouterr().out


def test_events_without_numbers_have_no_figures():
    assert figures(Warned(text="x")) == {}
    assert figures(Evaluated(metric=None, progress=0.5)) == {"progress": 0.5}
