"""A proxy is trained beside the model, disturbs nothing, and its losses are the reference of the run."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import salience
from salience.errors import ConfigError, PluginError, StateError

from conftest import make_model

EPOCHS = 4


def small(width: int = 4) -> nn.Module:
    model = nn.Linear(8, width)
    g = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=g) * 0.2)
    return model


def steps(loader, model, *, stop=None, epochs=EPOCHS):
    """The user's training loop; with `stop`, that many batches of it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    done = 0
    for _ in range(loader.epoch, epochs):
        for x, y in loader:
            logits = model(x)
            loss = loader.loss(F.cross_entropy(logits, y, reduction="none"), logits, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            done += 1
            if done == stop:
                return


def warnings(loader):
    return [event["text"] for event in loader.events.recent if event["kind"] == "warning"]


def test_the_reference_is_the_loss_the_proxy_had_when_it_met_the_sample(problem):
    loader, proxy, twin, model = salience.Loader(problem, 50, with_ids=True), small(), small(), make_model()
    loader.attach(model, proxy=proxy)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.01, momentum=0.9)
    wanted = np.full(300, np.nan, dtype=np.float32)
    for ids, (x, y) in loader:
        logits = model(x)
        loader.loss(F.cross_entropy(logits, y, reduction="none"), logits, y)
        losses = F.cross_entropy(twin(x), y, reduction="none")
        wanted[ids] = losses.detach().numpy()
        optimizer.zero_grad()
        losses.mean().backward()
        optimizer.step()
    loader.summary()
    np.testing.assert_array_equal(loader._run.sensing.reference.loss, wanted)
    for mine, other in zip(proxy.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_the_model_is_trained_as_without_a_proxy(problem):
    plain, beside = make_model(), make_model()
    loaders = [salience.Loader(problem, 64, epochs=2), salience.Loader(problem, 64, epochs=2)]
    loaders[1].attach(beside, proxy=small())
    state = torch.get_rng_state()
    for loader, model in zip(loaders, (plain, beside), strict=True):
        steps(loader, model, epochs=2)
    assert torch.equal(plain.weight, beside.weight)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", ["rho", "proxy", "coarse_to_fine"])
def test_rules_that_ask_another_model_ask_the_proxy(problem, name):
    loader, model, proxy = salience.Loader(problem, 30, epochs=10, select=name, strict=True), make_model(), small()
    loader.attach(model, proxy=proxy, proxy_optimizer=torch.optim.SGD(proxy.parameters(), lr=0.0))
    steps(loader, model, epochs=2)
    x, y = problem.tensors
    theirs = F.cross_entropy(small()(x), y, reduction="none").detach().numpy()  # at rate 0 the proxy stands still
    np.testing.assert_allclose(loader._run.sensing.reference.loss, theirs, rtol=1e-5)
    score = loader.ledger.last_loss - theirs if name == "rho" else theirs
    next(iter(loader))
    if name == "coarse_to_fine":
        easiest = [np.flatnonzero(y == c)[np.argsort(theirs[y == c])][: int((y == c).sum() * 0.3)] for c in range(4)]
        assert not set(loader.plan.ids) & set(np.concatenate(easiest))
    else:
        assert set(loader.plan.ids) == set(np.argsort(score)[-len(loader.plan) :])
        assert len(loader.plan) < 300


def test_a_given_reference_goes_before_the_proxy(problem):
    given = np.arange(300.0)
    loader, model = salience.Loader(problem, 30, epochs=EPOCHS, select="proxy", reference=given), make_model()
    loader.attach(model, proxy=small())
    steps(loader, model)
    assert set(loader.plan.ids) == set(range(150, 300))


@pytest.mark.parametrize("first", ["attach", "load"])
@pytest.mark.parametrize("stop", [3, 8])
def test_a_resumed_run_has_the_proxy_of_one_that_never_stopped(problem, tmp_path, first, stop):
    def run(state=None, stop=None):
        model, proxy, loader = make_model(), small(), salience.Loader(problem, 32, epochs=EPOCHS, select="proxy")
        if state is not None:
            model.load_state_dict(state["model"])
        if state is not None and first == "load":
            loader.load_state_dict(state["loader"])
        loader.attach(model, proxy=proxy)
        if state is not None and first == "attach":
            loader.load_state_dict(state["loader"])
        steps(loader, model, stop=stop)
        if stop is None:
            return loader, proxy
        state = {"model": copy.deepcopy(model.state_dict()), "loader": loader.state_dict()}
        steps(loader, model, stop=1)  # what was saved does not move with the run
        torch.save(state, tmp_path / "state.pt")
        return torch.load(tmp_path / "state.pt", weights_only=True)

    (whole, proxy), (resumed, again) = run(), run(run(stop=stop))
    assert torch.equal(again.weight, proxy.weight)
    np.testing.assert_array_equal(resumed._run.sensing.reference.loss, whole._run.sensing.reference.loss)
    np.testing.assert_array_equal(resumed.plan.ids, whole.plan.ids)


def test_a_resumed_run_without_its_proxy_is_told_to_attach_it(problem):
    loader, model = salience.Loader(problem, 50, epochs=EPOCHS), make_model()
    loader.attach(model, proxy=small())
    steps(loader, model, stop=2)
    state = loader.state_dict()
    resumed = salience.Loader(problem, 50, epochs=EPOCHS)
    resumed.load_state_dict(state)
    assert torch.equal(
        resumed.state_dict()["parts"]["sensing"]["proxy"]["model"]["weight"],
        state["parts"]["sensing"]["proxy"]["model"]["weight"],
    )
    with pytest.raises(StateError, match=r"attach\(model, proxy="):
        next(iter(resumed))
    with pytest.raises(StateError, match="another one"):
        resumed.attach(model, proxy=small(3))


@pytest.mark.parametrize("again", [False, True])
def test_pick_trains_the_proxy_on_the_kept_ones_alone(problem, again):
    loader, model = salience.Loader(problem, 50, with_ids=True), make_model()
    loader.attach(model, proxy=small())
    kept = []
    for ids, (x, y) in loader:
        logits = model(x)
        keep = loader.pick(F.cross_entropy(logits, y, reduction="none"), logits, y)
        logits = model(x[keep]) if again else logits[keep]
        loader.loss(F.cross_entropy(logits, y[keep], reduction="none"), logits, y[keep])
        kept += ids[keep].tolist()
    loader.summary()
    assert sorted(np.flatnonzero(np.isfinite(loader._run.sensing.reference.loss))) == sorted(kept)


def test_a_loop_that_fetches_ahead_gives_each_batch_its_own_input(problem):
    def run(ahead):
        loader, model, proxy = salience.Loader(problem, 50, with_ids=True), make_model(), small()
        loader.attach(model, proxy=proxy)
        batches = iter(loader)
        coming = next(batches)
        while coming is not None:
            (ids, (x, y)) = coming
            coming = next(batches, None) if ahead else None
            logits = model(x)
            loader.loss(F.cross_entropy(logits, y, reduction="none"), logits, y, ids)
            coming = coming if ahead else next(batches, None)
        return proxy.weight

    assert torch.equal(run(True), run(False))


def test_a_pass_over_the_validation_set_is_not_taken_for_the_batch(problem):
    loader, model, proxy, plain = salience.Loader(problem, 300), make_model(), small(), small()
    loader.attach(model, proxy=proxy)
    ((x, y),) = list(loader)
    logits = model(x)
    with torch.no_grad():
        model(torch.zeros(300, 8))
    loader.loss(F.cross_entropy(logits, y, reduction="none"), logits, y)
    wanted = F.cross_entropy(plain(x), y).item()
    loader.summary()
    assert loader._run.sensing.reference.loss.mean() == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("strict", [False, True])
def test_a_proxy_that_fails_is_named_and_training_goes_on(problem, strict):
    loader, model = salience.Loader(problem, 50, epochs=EPOCHS, select="rho", strict=strict), make_model()
    loader.attach(model, proxy=nn.Linear(5, 4))
    if strict:
        with pytest.raises(PluginError, match="proxy failed"):
            steps(loader, model)
        return
    steps(loader, model)
    assert len(warnings(loader)) == 1
    assert "proxy failed and is off: RuntimeError" in warnings(loader)[0]


def test_a_model_that_does_not_run_is_said_once(problem):
    loader, model = salience.Loader(problem, 50), make_model()
    loader.attach(make_model(), proxy=small())
    steps(loader, model, stop=3)
    assert [text[:22] for text in warnings(loader)] == ["The proxy has no input"]


def test_what_is_missing_is_said(problem):
    loader, model = salience.Loader(problem, 50), make_model()
    with pytest.raises(ConfigError, match="shares parameters"):
        loader.attach(model, proxy=nn.Sequential(model))
    with pytest.raises(ConfigError, match="no parameters"):
        loader.attach(model, proxy=nn.Flatten())
    with pytest.raises(ConfigError, match="without proxy="):
        loader.attach(model, proxy_optimizer=torch.optim.SGD(model.parameters()))
    loader.attach(model, proxy=small())
    with pytest.raises(ConfigError, match="needs integer targets"):
        for x, y in loader:
            loader.loss(F.cross_entropy(model(x), y, reduction="none"))


def test_the_hook_goes_with_detach_and_does_nothing_in_a_copy(problem):
    loader, model, proxy = salience.Loader(problem, 50), make_model(), small()
    loader.attach(model, proxy=proxy)
    copied = copy.deepcopy(model)
    next(iter(loader))
    copied(torch.zeros(50, 8))
    assert loader._run.sensing.proxy._listening._given is None
    model(torch.zeros(50, 8))
    assert loader._run.sensing.proxy._listening._given is not None
    loader.detach()
    assert not model._forward_pre_hooks
