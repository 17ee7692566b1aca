"""The password of a URL stands in nothing a run leaves behind: files, terminal, errors, events."""

from __future__ import annotations

import gc
import importlib.util
import json
import logging
import pickle
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import salience
from salience.cli import main
from salience.errors import ConfigError, PluginError, StoreError, without_secrets
from salience.events import EventLog, RunStarted, Warned
from salience.report.sinks import SINKS, guarded, sink

from conftest import require

SECRET = "hunter2-not-for-anyone"


@contextmanager
def tracking_server() -> Iterator[tuple[str, list[str]]]:
    """The host of a server that answers like MLflow's, whose own package is too large to install here, and who came in how."""
    known: list[str] = []
    run = {
        "info": {"run_id": "r", "run_uuid": "r", "experiment_id": "1", "status": "RUNNING", "start_time": 0},
        "data": {},
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known.append(self.headers.get("Authorization", ""))
            self.answer({"experiment": {"experiment_id": "1", "name": "salience"}})

        def do_POST(self) -> None:
            known.append(self.headers.get("Authorization", ""))
            self.rfile.read(int(self.headers["Content-Length"]))
            self.answer({"run": run} if self.path.endswith("runs/create") else {"run_info": run["info"]})

        def answer(self, found: dict[str, Any]) -> None:
            body = json.dumps(found).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}", known
        finally:
            server.shutdown()
            thread.join()


def photos(root: Path) -> Path:
    """40 small images of two classes."""
    rng = np.random.default_rng(0)
    for i in range(40):
        folder = root / "ab"[i % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (8, 8), dtype=np.uint8)).save(folder / f"{i}.png")
    return root


def leaks(folder: Path) -> list[str]:
    """Files that hold the secret, those in zip archives (checkpoints are) included: they are stored, not compressed."""
    return [str(path) for path in folder.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]


def test_no_artefact_of_a_training_run_holds_the_password_of_a_sink(tmp_path, capsys, monkeypatch):
    require(importlib.util.find_spec("mlflow") is not None, "mlflow")
    monkeypatch.chdir(tmp_path)
    data, out = photos(tmp_path / "data"), tmp_path / "run"
    with tracking_server() as (host, known):
        where = f"mlflow:http://me:{SECRET}@{host}"
        command = ["train", "--out", str(out)]
        more = [f"--data={data}", "--model=mlp", "--epochs=2", "--batch-size=8", "--workers=0"]
        assert main([*command, *more, "--sinks", where]) == 0
        assert known
        assert all(one.startswith("Basic ") for one in known), "the password never reached the server"
        assert main(["report", str(out), "-o", str(out / "report.html"), "--sink", where]) == 0
        assert main(["compare", str(out), str(photos_run(tmp_path)), "-o", str(out / "compare.html")]) == 0
        assert main([*command, "--resume"]) == 2
        assert "give --sinks again" in "".join(capsys.readouterr().err.split("\n"))
        assert main([*command, "--resume", "--sinks", where]) == 0
        gc.collect()  # runs are ended at the server while there is one
    said = capsys.readouterr()
    assert leaks(tmp_path) == []
    assert SECRET not in said.out + said.err
    saved = torch.load(out / "last.pt", weights_only=True)
    assert saved["config"]["sinks"] == f"mlflow:http://***@{host}"
    assert f"***@{host}" in (out / "report.html").read_text()


def photos_run(folder: Path) -> Path:
    """Another run on the same images, to compare with."""
    given = [f"--data={folder / 'data'}", "--model=mlp", "--epochs=2", "--batch-size=8", "--workers=0"]
    assert main(["train", *given, "--out", str(folder / "other")]) == 0
    return folder / "other"


def test_no_artefact_of_a_loader_holds_the_passwords_of_its_cache_and_proxy(tmp_path, caplog, monkeypatch):
    require(importlib.util.find_spec("redis") is not None, "redis")
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, f"http://me:{SECRET}@127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    source = salience.Source(
        photos(tmp_path / "data"), decode=len, cache="1MiB", redis=f"redis://:{SECRET}@127.0.0.1:9/0"
    )
    log, trace = tmp_path / "run.jsonl", tmp_path / "trace"
    loader = salience.Loader(source, 8, epochs=1, log=log, trace=trace)
    for x, _ in loader:
        loader.loss(x.float())
    torch.save(loader.state_dict(), tmp_path / "state.pt")
    (tmp_path / "report.txt").write_text(loader.report())
    assert "127.0.0.1:9" in caplog.text, "that the server is away was not said"
    assert SECRET not in caplog.text
    assert main(["report", str(log), "-o", str(tmp_path / "report.html")]) == 0
    assert leaks(tmp_path) == []


def test_the_doctor_shows_no_environment(capsys, monkeypatch):
    for name in ("HTTPS_PROXY", "MLFLOW_TRACKING_PASSWORD", "SALIENCE_REDIS_PASSWORD", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, f"http://me:{SECRET}@host")
    assert main(["doctor"]) == 0
    assert SECRET not in "".join(capsys.readouterr())


def chained(error: BaseException) -> str:
    """All that Python would print of an error."""
    return "".join(traceback.format_exception(error))


@pytest.mark.parametrize("url", [f"me:{SECRET}@127.0.0.1:9", f"127.0.0.1:9/x?token={SECRET}"])
def test_no_error_about_a_sink_holds_its_password(url, monkeypatch):
    require(importlib.util.find_spec("mlflow") is not None, "mlflow")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(ConfigError, match="MLflow cannot write") as caught:
        salience.Selector(4, batch_size=2, sinks=[f"mlflow:http://{url}"])
    assert SECRET not in chained(caught.value)


def test_a_sink_that_cannot_be_opened_is_one_sentence_without_its_password(monkeypatch):
    def refuse(where: str) -> None:
        raise RuntimeError(f"{where} is no project")

    monkeypatch.setitem(SINKS, "wandb", (refuse, "a project"))
    with pytest.raises(
        ConfigError, match=r"cannot be opened \(RuntimeError: https://\*\*\*@host is no project\)"
    ) as caught:
        sink(f"wandb:https://me:{SECRET}@host")
    assert SECRET not in chained(caught.value)


def test_a_sink_that_fails_later_says_so_without_its_password(caplog, capfd, monkeypatch):
    require(importlib.util.find_spec("mlflow") is not None, "mlflow")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with tracking_server() as (host, _):
        one = sink(f"mlflow:http://me:{SECRET}@{host}")
    said: list[str] = []
    event = EventLog().emit("evaluated", metric=0.5)
    guarded(one, said.append)(event)
    assert "MLflow failed" in said[0]
    assert SECRET not in said[0]
    with pytest.raises(PluginError) as caught:
        guarded(one, said.append, strict=True)(event)
    assert SECRET not in chained(caught.value)
    caught.value.__traceback__ = caught = None
    del one
    gc.collect()
    assert "did not reach MLflow" in caplog.text
    assert SECRET not in caplog.text + "".join(capfd.readouterr())


@pytest.mark.parametrize(
    "url",
    [f"https://me:{SECRET}@host/x", f"s3://{SECRET}@bucket/x", f"https://host/x?sig={SECRET}", f"ftp://me:{SECRET}@host"],
)  # fmt: skip
def test_a_secret_in_the_url_of_a_source_is_refused_and_not_repeated(url, tmp_path, capsys):
    with pytest.raises(ConfigError) as caught:
        salience.Source(url)
    assert SECRET not in chained(caught.value)
    assert main(["train", "--data", url, "--out", str(tmp_path / "run")]) == 2
    log = EventLog(tmp_path / "run.jsonl")
    log.emit("run", population=4)
    assert main(["report", str(log.path), "--data", url, "-o", str(tmp_path / "report.html")]) in (0, 2)
    assert SECRET not in "".join(capsys.readouterr())
    assert leaks(tmp_path) == []


def test_settings_are_echoed_without_secrets(tmp_path, capsys):
    file = tmp_path / "mine.toml"
    file.write_text(f'[train]\nsinks = ["mlflow:https://me:{SECRET}@host"]\n')
    assert main(["train", "--config", str(file)]) == 2
    assert main(["train", f"--sinkz=mlflow:https://me:{SECRET}@host"]) == 2
    said = "".join(capsys.readouterr())
    assert "train.sinks is ['mlflow:https://***@host']" in said
    assert SECRET not in said


def test_events_and_warnings_are_written_without_secrets(tmp_path, caplog):
    url = f"https://me:{SECRET}@host/x"
    log = EventLog(tmp_path / "run.jsonl")
    log.emit(Warned(text=f"{url} is slow"))
    log.emit(RunStarted(select={"scores": [{"name": "mine", "at": url}]}))
    assert leaks(tmp_path) == []
    assert "https://***@host/x is slow" in (tmp_path / "run.jsonl").read_text()
    with caplog.at_level(logging.WARNING, "salience"):
        salience.run.part.Voice(log, strict=False).warn(f"{url} is slow")
    assert caplog.messages == ["salience: https://***@host/x is slow"]


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("mlflow:https://me:a/b@c@host:5/x", "mlflow:https://***@host:5/x"),
        ("'redis://:pw@h:1/0' and http://a/b?x=1&y=2, too", "'redis://***@h:1/0' and http://a/b?*** too"),
        ("https://token@host", "https://***@host"),
        ("s3://bucket/a@b/c", "s3://bucket/a@b/c"),
        ("/home/a@b/c:d", "/home/a@b/c:d"),
        ("exceeded with url: /x?token=pw/api&y=1 (Caused by", "exceeded with url: /x?*** (Caused by"),
        ("path='/x?sig=pw'", "path='/x?***'"),
        ("/photos/why?.png, a=b? c/d?e=f", "/photos/why?.png, a=b? c/d?e=f"),
    ],
)
def test_what_is_masked(text, masked):
    assert without_secrets(text) == masked


def test_errors_are_masked_and_stay_so_between_processes():
    error = pickle.loads(pickle.dumps(StoreError(f"https://me:{SECRET}@host is away.")))
    assert str(error) == "https://***@host is away."
    assert SECRET not in repr(error)
