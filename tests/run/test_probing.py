"""At accuracy marks gradients are probed; what they say reaches the event log, the sampler and a resumed run."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import salience
from salience.errors import ConfigError

from conftest import make_model


def probe_of(problem, n: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = problem.tensors
    return x[:n], y[:n]


def epoch(loader, model) -> None:
    for x, y in loader:
        logits = model(x)
        loader.loss(F.cross_entropy(logits, y, reduction="none"), logits, y)


def probes(loader) -> list:
    return [event.data for event in loader.events.recent if event.kind == "gradients"]


def test_each_mark_is_probed_once_when_an_evaluation_passes_it(problem):
    loader, model = salience.Loader(problem, 50, epochs=2), make_model()
    loader.attach(model, probe=probe_of(problem))
    epoch(loader, model)
    for accuracy in (0.1, 0.31, 0.35, 0.72, 0.5, 0.74):
        loader.evaluated(accuracy)
    assert [one.accuracy for one in probes(loader)] == [0.31, 0.72]
    assert [layer.name for layer in probes(loader)[0].layers] == [""]
    assert probes(loader)[0].samples == 40


def test_a_threshold_on_auto_leaves_out_what_the_probe_calls_learnt(problem):
    rule = {"scores": ["loss"], "filters": [], "sampler": {"name": "threshold", "above": "auto"}, "keep": 0.5}
    loader, model = salience.Loader(problem, 50, epochs=3, select=rule), make_model()
    with torch.no_grad():  # sure of everything: gradients of what is right are near zero
        model.weight.mul_(500)
    loader.attach(model, probe=probe_of(problem, 300))
    epoch(loader, model)
    assert len(loader.plan) == 300, "nothing was probed yet, so that nothing is known to be learnt"
    loader.evaluated(0.9)
    (probed,) = probes(loader)
    under = loader.ledger.last_loss <= probed.learnt_loss
    assert 0 < under.sum() < 300
    epoch(loader, model)
    assert set(loader.plan.ids.tolist()) <= set((~under).nonzero()[0].tolist())


def test_what_was_probed_is_resumed(problem):
    loader, model = salience.Loader(problem, 50, epochs=2), make_model()
    loader.attach(model, probe=probe_of(problem))
    epoch(loader, model)
    loader.evaluated(0.5)
    again = salience.Loader(problem, 50, epochs=2)
    again.load_state_dict(copy.deepcopy(loader.state_dict()))
    again.attach(model, probe=probe_of(problem))
    again.evaluated(0.5)
    assert probes(again) == []
    assert again._run.probing.learnt_loss == loader._run.probing.learnt_loss


def test_what_is_no_accuracy_is_said_once_and_a_model_that_cannot_be_probed_goes_on_untouched(problem):
    class Moody(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make_model()

        def forward(self, x):
            if float(x.sum()) > 0:  # torch.func cannot follow a branch on data
                return self.inner(x)
            return -self.inner(x)

    loader, model = salience.Loader(problem, 50, epochs=2), Moody()
    loader.attach(model, probe=probe_of(problem))
    loader.evaluated(-3.0)
    loader.evaluated(0.9)
    texts = [event["text"] for event in loader.events.recent if event.kind == "warning"]
    assert "accuracies from 0 to 1" in texts[0]
    assert "failed and is off" in texts[1]
    epoch(loader, model)


@pytest.mark.parametrize(
    "batch", [torch.zeros(3, 8), (torch.zeros(3, 8), torch.zeros(2)), (torch.zeros(3, 8), torch.zeros(3))]
)
def test_a_probe_is_inputs_and_integer_targets(problem, batch):
    with pytest.raises(ConfigError, match="probe"):
        salience.Loader(problem, 50).attach(make_model(), probe=batch)
