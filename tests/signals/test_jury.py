"""A jury: each sample is trained on by one net and held out by the other, for the whole run and across a resume."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import salience
from salience.errors import ConfigError, StateError

from conftest import make_model

EPOCHS = 3


def juror(seed: int) -> nn.Module:
    model = nn.Linear(8, 4)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=g) * 0.2)
    return model


def steps(loader, model, *, stop=None, epochs=EPOCHS):
    optimizer, done = torch.optim.SGD(model.parameters(), lr=0.1), 0
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


def started(problem, **options):
    loader, model = salience.Loader(problem, 50, epochs=EPOCHS, **options), make_model()
    loader.attach(model, jury=[juror(1), juror(2)])
    return loader, model


def test_every_sample_is_judged_in_every_window_by_a_net_that_never_trains_on_it(problem):
    loader, model = started(problem)
    jury = loader._run.sensing.jury
    untouched = [copy.deepcopy(one) for one in jury.models]
    outside = jury.outside.copy()
    steps(loader, model)
    trained, held_out = loader._run.sensing.jury_ledgers
    assert loader.summary()
    assert (trained.seen == EPOCHS).all()
    assert (held_out.seen == EPOCHS).all()
    assert (trained.trained == EPOCHS).all()
    assert not held_out.trained.any()
    assert (trained.label == loader.ledger.label).all()
    # The first net trained on the samples it does not hold out alone: labels of the others do not change it.
    x, y = problem.tensors
    other = torch.where(torch.from_numpy(outside == 0), (y + 1) % 4, y)
    again, twin = salience.Loader(torch.utils.data.TensorDataset(x, other), 50, epochs=EPOCHS), make_model()
    again.attach(twin, jury=[juror(1), juror(2)])
    steps(again, twin)
    first, second = (loader._run.sensing.jury.models, again._run.sensing.jury.models)
    assert torch.equal(first[0].weight, second[0].weight)
    assert not torch.equal(first[1].weight, second[1].weight)
    assert not torch.equal(first[0].weight, untouched[0].weight)


def test_the_model_is_trained_as_without_a_jury(problem):
    plain, beside = make_model(), make_model()
    loaders = [salience.Loader(problem, 64, epochs=2), salience.Loader(problem, 64, epochs=2)]
    loaders[1].attach(beside, jury=[juror(1), juror(2)])
    state = torch.get_rng_state()
    for loader, model in zip(loaders, (plain, beside), strict=True):
        steps(loader, model, epochs=2)
    assert torch.equal(plain.weight, beside.weight)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("first", ["attach", "load"])
def test_a_resumed_run_has_the_same_jury(problem, first):
    whole, model = started(problem)
    steps(whole, model)
    begun, half = started(problem)
    steps(begun, half, stop=8)
    state, weights = copy.deepcopy(begun.state_dict()), copy.deepcopy(half.state_dict())
    again, resumed = salience.Loader(problem, 50, epochs=EPOCHS), make_model()
    resumed.load_state_dict(weights)
    if first == "load":
        again.load_state_dict(state)
    again.attach(resumed, jury=[juror(1), juror(2)])
    if first == "attach":
        again.load_state_dict(state)
    steps(again, resumed)
    assert whole.summary()
    assert again.summary()
    for mine, theirs in zip(whole._run.sensing.jury_ledgers, again._run.sensing.jury_ledgers, strict=True):
        for name in ("mean_loss", "margin_sum", "seen"):
            np.testing.assert_array_equal(mine[name], theirs[name])


def test_a_state_with_a_jury_asks_for_it(problem):
    begun, model = started(problem)
    steps(begun, model, stop=2)
    again = salience.Loader(problem, 50, epochs=EPOCHS)
    again.load_state_dict(begun.state_dict())
    with pytest.raises(StateError, match="jury"):
        next(iter(again))


def test_a_jury_is_two_models_of_their_own(problem):
    loader, model, one = salience.Loader(problem, 50), make_model(), juror(1)
    for wrong, says in (([one], "two models"), ([one, one], "shares parameters"), ([one, nn.ReLU()], "no parameters")):
        with pytest.raises(ConfigError, match=says):
            loader.attach(model, jury=wrong)


def test_a_jury_that_fails_is_off_and_training_goes_on(problem):
    loader, model = salience.Loader(problem, 50, epochs=1), make_model()
    loader.attach(model, jury=[nn.Linear(3, 4), juror(2)])
    steps(loader, model, epochs=1)
    warnings = [event["text"] for event in loader.events.recent if event.kind == "warning"]
    assert [text for text in warnings if "jury failed and is off" in text]
    assert (loader.ledger.seen == 1).all()
