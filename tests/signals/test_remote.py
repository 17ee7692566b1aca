"""Questions and answers through a folder: a real process scores for a run, and what is not an answer is refused."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import salience
from salience.errors import PluginError, StateError
from salience.files import write_npz
from salience.signals.remote import QUESTION, SCORES_FORMAT, RemoteScorer, answer
from salience.signals.scorer import SCORE_ROWS

N, B = 120, 20


def points() -> TensorDataset:
    g = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(N, 8, generator=g), torch.randint(0, 4, (N,), generator=g))


def answering(folder: Path, model: nn.Module) -> threading.Thread:
    thread = threading.Thread(target=answer, args=(folder, model, lambda ids: points()[ids.tolist()]))
    thread.start()
    return thread


def test_a_run_takes_in_what_a_scorer_elsewhere_found_with_its_age(tmp_path):
    model = nn.Linear(8, 4)
    loader = salience.Loader(points(), B, epochs=3, select={"preset": "uniform", "keep": 0.5})
    loader.attach(model, background=tmp_path, grad_norm="last")
    thread = answering(tmp_path, nn.Linear(8, 4))
    for number, (x, y) in enumerate(loader):
        if number == 0:
            while not list(tmp_path.glob("scores-*.npz")):
                assert thread.is_alive()
        z = model(x)
        loader.loss(F.cross_entropy(z, y, reduction="none"), z, y).backward()
    next(iter(loader))
    ledger = loader.ledger
    scored = np.flatnonzero((ledger.seen == 1) & (ledger.trained == 0))
    assert len(scored) == 15
    assert (ledger.last_seen[scored] == 0).all()
    x, y = (part[scored] for part in points().tensors)
    with torch.no_grad():
        np.testing.assert_allclose(ledger.last_loss[scored], F.cross_entropy(model(x), y, reduction="none"), rtol=1e-4)
    assert np.isfinite(ledger.grad_norm[scored]).all()
    assert [e["samples"] for e in loader.events.recent if e["kind"] == "scored"] == [0, 15]
    loader.detach()
    thread.join(30)
    assert not thread.is_alive()  # it heard that the run is over


@pytest.mark.parametrize(
    ("ids", "window", "says"),
    [
        ([0, 0], 0, "a sample twice"),
        ([N], 0, "beyond 119"),
        ([-1], 0, "beyond 119"),
        ([1], 5, "not answers to this run"),
    ],
)
def test_scores_that_cannot_be_of_this_run_are_refused(tmp_path, ids, window, says):
    scorer = RemoteScorer(nn.Linear(8, 4), tmp_path, n=N)
    scorer.ask(np.arange(3), window=0)
    values = np.zeros((len(SCORE_ROWS), len(ids)), dtype=np.float32)
    arrays = {"ids": np.array(ids), "values": values, "window": np.array(window)}
    write_npz(tmp_path / "scores-000000-0.npz", {"format": np.array(SCORES_FORMAT), **arrays})
    with pytest.raises(PluginError, match=says):
        scorer.take()


class Harm:
    def __reduce__(self):
        return (Path("harmed").touch, ())


def test_nothing_is_unpickled_on_either_side(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scorer = RemoteScorer(nn.Linear(8, 4), tmp_path, n=N)
    np.savez(tmp_path / "scores-000000-0.npz", ids=np.array([Harm()], dtype=object))
    with pytest.raises(PluginError, match="damaged or not a file of scores"):
        scorer.take()
    (tmp_path / QUESTION).write_bytes(pickle.dumps(Harm()))
    with pytest.raises(StateError, match="is damaged"):
        answer(tmp_path, nn.Linear(8, 4), lambda ids: None)
    torch.save({"format": "x", "harm": Harm()}, tmp_path / QUESTION)
    with pytest.raises(StateError, match="is damaged"):
        answer(tmp_path, nn.Linear(8, 4), lambda ids: None)
    assert not (tmp_path / "harmed").exists()


def test_a_run_whose_scorer_leaves_rubbish_goes_on_without_it(tmp_path):
    model = nn.Linear(8, 4)
    loader = salience.Loader(points(), B, epochs=3, select={"preset": "uniform", "keep": 0.5})
    loader.attach(model, background=tmp_path)
    for _ in range(2):
        for x, y in loader:
            z = model(x)
            loader.loss(F.cross_entropy(z, y, reduction="none"), z, y).backward()
        (tmp_path / "scores-000000-0.npz").write_bytes(b"rubbish")
    warnings = [event["text"] for event in loader.events.recent if event["kind"] == "warning"]
    assert len(warnings) == 1
    assert "damaged or not a file of scores" in warnings[0]
    assert loader.epoch == 2
