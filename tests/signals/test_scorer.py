"""A real process scores what the run does not visit; whatever becomes of it, training goes on."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import salience
from salience.batches import EnvelopeCollate, EnvelopeDataset
from salience.errors import ConfigError, PluginError
from salience.ledger.statistics import LOGIT_ROWS, finish
from salience.seeds import TIES, generator
from salience.signals.scorer import LastLinear, Scorer, forward_norm, stalest

N, B = 120, 20
HALF = {"preset": "uniform", "keep": {"name": "constant", "share": 0.5}}


def points() -> TensorDataset:
    g = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(N, 8, generator=g), torch.randint(0, 4, (N,), generator=g))


def net() -> nn.Module:
    """With parameters and buffers of several types and sizes, and another result in training mode."""
    model = nn.Sequential(nn.Linear(8, 7), nn.BatchNorm1d(7), nn.Dropout(0.5), nn.Linear(7, 4))
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=g))
    return model


def wait(scorer: Scorer, count: int) -> None:
    """Until so many samples are scored; a hang ends the test by an error."""
    for _ in range(6000):
        if scorer.done >= count:
            return
        assert scorer.process.is_alive(), "the scorer died"
        time.sleep(0.01)
    raise AssertionError("the scorer does not answer")


def step(loader, model, x, y, *, logits=True):
    out = model(x)
    loader.loss(F.cross_entropy(out, y, reduction="none"), out if logits else None, y).backward()


def window(loader, model):
    for x, y in loader:
        step(loader, model, x, y)


def warnings(loader):
    return [event["text"] for event in loader.events.recent if event["kind"] == "warning"]


def test_the_stalest_of_the_unpicked_come_first():
    last_seen = np.array([3, 0, 2, -1, 1, 0, 3, 2], dtype=np.int32)
    rng = np.random.default_rng(0)
    first = {tuple(stalest(np.array([3, 6]), last_seen, rng, share=0.5).tolist()) for _ in range(20)}
    assert first == {(1, 5, 4), (5, 1, 4)}  # 1 and 5 have waited equally long
    assert stalest(np.arange(8), last_seen, rng).tolist() == []
    nothing, late = np.array([], dtype=np.int64), np.full(8, 70_000, dtype=np.int32)
    asked = np.concatenate([stalest(nothing, late, rng) for _ in range(50)])
    assert len(asked) == 100
    assert set(asked.tolist()) == set(range(8))


@pytest.fixture(scope="module")
def scored():
    """A run of three windows, stopped in each until the scorer has answered: what was known of the samples, and when."""
    data, model = points(), net()
    loader = salience.Loader(data, B, epochs=4, select=HALF, with_ids=True)
    loader.attach(model, background=True)
    scorer, history = loader._run.sensing.scorer, []
    for _ in range(3):
        weights = None
        for number, (_, (x, y)) in enumerate(loader):
            if weights is None:
                before = {name: loader.ledger[name].copy() for name in loader.ledger}
                weights = {name: value.clone() for name, value in model.state_dict().items()}
                plan = loader.plan
                asked = stalest(plan.ids, before["last_seen"], generator(0, TIES, plan.window))
                wait(scorer, len(asked))
            step(loader, model, x, y)
            with torch.no_grad():  # the user's own step, after the snapshot
                model[3].bias += 0.1
            if number == 0:
                during = {name: loader.ledger[name].copy() for name in loader.ledger}
            assert loader.plan is plan
        history.append((before, weights, asked, during))
    state = loader.state_dict()
    batches = iter(loader)
    next(batches)
    after = {name: loader.ledger[name].copy() for name in loader.ledger}
    loader.detach()
    return data, loader, history, after, state


def test_scores_are_those_of_a_forward_pass_with_the_weights_of_the_windows_start(scored):
    data, _, history, after, _ = scored
    _, weights, asked, _ = history[-1]
    model = net().eval()
    model.load_state_dict(weights)
    x, y = (part[asked] for part in data.tensors)
    with torch.no_grad():
        logits = model(x)
        losses = F.cross_entropy(logits, y, reduction="none")
    np.testing.assert_allclose(after["last_loss"][asked], losses.numpy(), rtol=1e-4)
    np.testing.assert_array_equal(after["guess"][asked], logits.argmax(1).numpy())
    np.testing.assert_allclose(
        after["entropy"][asked], torch.distributions.Categorical(logits=logits).entropy(), rtol=1e-2
    )
    assert len(asked) == 15  # a quarter of the half that was not picked


def test_they_count_as_seen_and_not_as_trained_and_make_the_samples_younger(scored):
    _, loader, history, after, _ = scored
    before, _, asked, _ = history[-1]
    assert (before["last_seen"][asked] < 2).all()
    assert (after["last_seen"][asked] == 2).all()
    np.testing.assert_array_equal(after["seen"][asked], before["seen"][asked] + 1)
    np.testing.assert_array_equal(after["trained"][asked], before["trained"][asked])
    assert after["trained"].sum() == 3 * N // 2  # three windows of half the samples, no more
    assert [e["samples"] for e in loader.events.recent if e["kind"] == "scored"] == [0, 15, 15, 15]


def test_nothing_is_entered_before_the_next_window(scored):
    _, _, history, _, _ = scored
    for before, _, asked, during in history:
        for name in before:
            np.testing.assert_array_equal(during[name][asked], before[name][asked], err_msg=name)


def test_visits_and_progress_do_not_count_them_and_the_state_says_it_is_on(scored):
    _, loader, _, _, state = scored
    assert state["parts"]["sensing"]["background"] is True
    assert state["course"]["visited"] == 3 * N // 2
    assert loader.visits_expected == 4 * N // 2
    assert salience.Loader(points(), B).state_dict()["parts"]["sensing"]["background"] is False


def test_the_norm_from_a_forward_pass_is_that_of_the_last_layers_gradient():
    model, (x, y) = net().eval(), points().tensors
    last = LastLinear(model)
    logits = model(x)
    given = last.given
    found = forward_norm(logits, y, given, last.bias).detach()
    for i in range(5):
        model.zero_grad()
        F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]).backward()
        exact = torch.cat([p.grad.flatten() for p in model[3].parameters()]).norm()
        torch.testing.assert_close(found[i], exact)
    y[3] = -100
    assert forward_norm(logits, y, given).isnan().nonzero().tolist() == [[3]]
    assert forward_norm(logits, y, None).isnan().all()


@pytest.mark.parametrize("grad_norm", ["last", "all", None])
def test_gradient_norms_of_unvisited_samples_are_refreshed_in_the_units_of_visited_ones(grad_norm):
    model = nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 4))
    loader = salience.Loader(points(), B, epochs=2, select=HALF)
    loader.attach(model, background=True, grad_norm=grad_norm)
    for number, (x, y) in enumerate(loader):
        if number == 0:
            wait(loader._run.sensing.scorer, 15)
        step(loader, model, x, y)
    visited = loader.ledger.last_seen == 0
    next(iter(loader))
    norms, scored = loader.ledger.grad_norm, (loader.ledger.trained == 0) & (loader.ledger.seen == 1)
    assert scored.sum() == 15
    if grad_norm is None:
        assert np.isnan(norms).all()
        return
    x, y = points().tensors
    exact = []
    for i in np.flatnonzero(scored).tolist():
        model.zero_grad()
        F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]).backward()
        layers = model if grad_norm == "all" else model[2]
        exact.append(torch.cat([p.grad.flatten() for p in layers.parameters()]).norm().item())
    assert np.isfinite(norms[visited]).all()
    ratio = norms[scored] / np.array(exact)
    assert np.median(ratio) == pytest.approx(1, rel=1e-3 if grad_norm == "last" else 0.25)
    loader.detach()


def test_without_logits_of_the_run_only_losses_are_entered():
    data, model = points(), net()
    loader = salience.Loader(data, B, epochs=3, select=HALF)
    loader.attach(model, background="cpu")
    for number, (x, y) in enumerate(loader):
        if number == 0:
            wait(loader._run.sensing.scorer, 15)
        step(loader, model, x, y, logits=False)
    next(iter(loader))
    assert np.isfinite(loader.ledger.last_loss).sum() == 75
    assert np.isnan(loader.ledger.el2n).all()
    loader.detach()


def test_a_scorer_that_is_killed_is_missed_once_and_training_goes_on():
    data, model = points(), net()
    loader = salience.Loader(data, B, epochs=4, select=HALF)
    loader.attach(model, background=True)
    batches = 0
    for _ in range(4):
        for x, y in loader:
            batches += 1
            if batches == 2:
                process = loader._run.sensing.scorer.process
                wait(loader._run.sensing.scorer, 1)
                os.kill(process.pid, signal.SIGKILL)
                process.join()
            step(loader, model, x, y)
    assert batches == 12
    assert warnings(loader) == [
        "The background scorer was lost: its process ended with code -9. Training goes on without it."
    ]
    assert not multiprocessing.active_children()


class Unpicklable(Dataset):
    def __init__(self) -> None:
        self.inner = points()
        self.make = lambda i: self.inner[i]

    def __getitem__(self, index):
        return self.make(index)

    def __len__(self) -> int:
        return N


def test_a_data_set_that_cannot_be_pickled_is_said_once_and_training_goes_on():
    model = net()
    loader = salience.Loader(Unpicklable(), B, epochs=2, select=HALF)
    loader.attach(model, background=True)
    for _ in range(2):
        window(loader, model)
    (text,) = warnings(loader)
    assert text.startswith("The background scorer could not be started: ")
    assert "lambda" in text
    assert not multiprocessing.active_children()
    with pytest.raises(PluginError, match="could not be started"):
        salience.Loader(Unpicklable(), B, strict=True).attach(model, background=True)


class Broken(Dataset):
    """Fails in the other process alone."""

    def __init__(self) -> None:
        self.inner, self.home = points(), os.getpid()

    def __getitem__(self, index):
        if os.getpid() != self.home:
            raise OSError("the disk is full")
        return self.inner[index]

    def __len__(self) -> int:
        return N


def test_an_error_in_the_process_is_told_in_its_words():
    scorer = Scorer(
        net(), EnvelopeDataset(Broken()), EnvelopeCollate(torch.utils.data.default_collate), n=N, batch_size=B
    )
    scorer.ask(np.arange(30), window=0)
    scorer.process.join(60)
    with pytest.raises(PluginError, match="OSError: the disk is full"):
        scorer.take()
    scorer.close()
    scorer.close()


def test_a_new_question_is_answered_before_the_rest_of_the_old_one_and_a_stopped_process_is_given_up():
    data, model = points(), net()
    wanted = F.cross_entropy(net().eval()(data.tensors[0]), data.tensors[1], reduction="none").detach().numpy()
    envelopes, collate = EnvelopeDataset(data), EnvelopeCollate(torch.utils.data.default_collate)
    scorer = Scorer(model, envelopes, collate, n=N, batch_size=10, patience=0.0)
    assert len(scorer.take()[0]) == 0  # nothing was asked, so nobody is slow
    for ids in (np.arange(30), np.arange(29, 9, -1)):
        scorer.ask(ids, window=5)
        wait(scorer, len(ids))
    got, values, when = scorer.take()
    assert when == 5
    np.testing.assert_array_equal(got, np.arange(29, 9, -1))
    np.testing.assert_allclose(finish(dict(zip(LOGIT_ROWS, values, strict=False)))["loss"], wanted[got], rtol=1e-4)
    assert len(scorer.take()[0]) == 0  # the same is not brought twice
    os.kill(scorer.process.pid, signal.SIGSTOP)
    scorer.ask(np.arange(5), window=6)
    scorer.ask(np.arange(6), window=7)  # not taken: the first was not
    with pytest.raises(PluginError, match="scored nothing in 0 seconds"):
        scorer.take()
    scorer.close()
    assert not multiprocessing.active_children()


def test_the_process_has_the_lowest_priority_so_that_training_goes_first():
    envelopes, collate = EnvelopeDataset(points()), EnvelopeCollate(torch.utils.data.default_collate)
    scorer = Scorer(net(), envelopes, collate, n=N, batch_size=10)
    scorer.ask(np.arange(10), window=0)
    wait(scorer, 10)
    assert os.getpriority(os.PRIO_PROCESS, scorer.process.pid) == 19 > os.getpriority(os.PRIO_PROCESS, 0)
    scorer.close()


def test_closing_leaves_no_process_whether_by_detach_the_end_of_the_run_or_of_the_loader():
    data, model = points(), net()
    loader = salience.Loader(data, B, epochs=1, select=HALF)
    loader.attach(model, background=True)
    assert len(multiprocessing.active_children()) == 1
    loader.attach(model)
    assert not multiprocessing.active_children()
    loader.attach(model, background=True)
    window(loader, model)
    assert not multiprocessing.active_children()
    loader.attach(model, background=True)
    del loader
    gc.collect()
    assert not multiprocessing.active_children()


SCRIPT = """
import torch, torch.nn.functional as F, salience
from torch.utils.data import TensorDataset

if __name__ == "__main__" or {unguarded}:
    data, model = TensorDataset(torch.zeros(40, 8), torch.zeros(40, dtype=torch.int64)), torch.nn.Linear(8, 4)
    loader = salience.Loader(data, 10, epochs=3, select="uniform")
    loader.events.listen(lambda event: event["kind"] == "warning" and print(event["text"]))
    loader.attach(model, background=True)
    for epoch in range(2):
        for x, y in loader:
            loader.loss(F.cross_entropy(model(x), y, reduction="none"))
        if {unguarded} and loader._run.sensing.scorer is not None:
            loader._run.sensing.scorer.process.join()
    print("trained")
"""


@pytest.mark.parametrize("unguarded", [False, True])
def test_a_script_that_ends_in_mid_run_leaves_nothing_and_an_unguarded_one_does_not_train_twice(tmp_path, unguarded):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(unguarded=unguarded))
    done = subprocess.run(
        [sys.executable, "-W", "error", script], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.count("trained") == 1
    assert ("__main__" in done.stdout) == unguarded
    assert "leaked" not in done.stderr
    assert "Traceback" not in done.stderr


def test_a_selector_has_no_data_set_to_score():
    selector = salience.Selector(N, epochs=2, select=HALF)
    with pytest.raises(ConfigError, match=r"only salience\.Loader"):
        selector.attach(net(), background=True)
