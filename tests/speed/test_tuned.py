"""The handle that finds levers: tried in turns on the steps of the training, kept or undone by a paired test, and resumed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import salience
from salience.errors import ConfigError, StateError
from salience.speed import Tuned
from salience.speed.levers import SPEED_LEVERS, Facts, ceiling

from conftest import make_model


class Clock:
    """Time as the test wants it: a step takes as long as its levers say. Real times would make the test a lottery."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def run(
    seconds: Callable[[Tuned, int], float],
    problem: TensorDataset,
    *,
    epochs: int = 40,
    stop: int = 10**9,
    **options: Any,
) -> tuple[Tuned, Any]:
    """Train with steps that take `seconds`, of which half are the optimizer's."""
    model, clock = make_model(), Clock()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = salience.Loader(problem, 25, epochs=epochs)
    fast = Tuned(model, optimizer, loader, clock=clock, **options)
    steps = 0
    for _ in range(epochs):
        for x, y in loader:
            logits = fast(x)
            took = seconds(fast, steps)
            loss = loader.loss(F.cross_entropy(logits, y, reduction="none"), logits, y)
            optimizer.zero_grad()
            loss.backward()
            clock.now += took / 2
            optimizer.step()
            clock.now += took / 2
            steps += 1
            if steps >= stop:
                return fast, loader
    return fast, loader


def test_a_lever_that_pays_is_kept_with_its_measured_gain(problem):
    fast, loader = run(lambda fast, step: 1.0 if "fused" in fast.on else 2.0, problem, levers=("fused",))
    assert fast.kept == ("fused",)
    last = fast.decisions[-1]
    assert last.action == "keep"
    assert last.measured == pytest.approx(2.0)
    assert "rounding" in last.reason
    logged = [event["action"] for event in loader.events.recent if event["kind"] == "decision"]
    assert logged == ["try", "keep"]


def test_a_lever_that_does_not_pay_is_undone(problem):
    fast, _ = run(lambda fast, step: 2.0 if "fused" in fast.on else 1.0, problem, levers=("fused",))
    assert fast.on == ()
    assert fast.done
    assert [one.action for one in fast.decisions] == ["try", "undo"]
    assert fast.optimizer.param_groups[0]["fused"] is None


def test_a_small_gain_is_kept_only_where_pairs_of_blocks_agree(problem):
    noise = (0.02 * torch.rand(10_000, generator=torch.Generator().manual_seed(0))).tolist()
    fast, _ = run(lambda fast, step: (1.0 if "fused" in fast.on else 1.1) + noise[step], problem, levers=("fused",))
    assert fast.kept == ("fused",)
    low, high = fast.decisions[-1].interval or (0, 0)
    assert low is not None
    assert high is not None
    assert 1.02 < low < high < 1.15


def test_one_slow_block_does_not_undo_a_lever_that_pays(problem):
    def seconds(fast: Tuned, step: int) -> float:
        return (1.0 if "fused" in fast.on else 1.3) * (1.4 if 16 <= step < 28 else 1.0)

    fast, _ = run(seconds, problem, levers=("fused",))
    assert fast.kept == ("fused",)


def test_noise_alone_keeps_nothing(problem):
    noise = torch.rand(10_000, generator=torch.Generator().manual_seed(0)).tolist()
    fast, _ = run(lambda fast, step: 1 + 0.1 * noise[step], problem, levers=("fused",))
    assert fast.kept == ()
    assert fast.decisions[-1].action == "undo"


def test_levers_that_cannot_help_are_skipped_with_a_reason(problem):
    fast, _ = run(lambda fast, step: 1.0, problem)
    said = {one.lever: one.reason for one in fast.decisions if one.action == "skip"}
    assert "no convolution" in said["channels_last"]
    assert "CUDA" in said["cudnn_benchmark"]
    assert not {"bf16", "tf32"} & set(said)  # lossy, and nobody asked


def test_lossy_levers_are_tried_only_where_they_were_allowed(problem):
    fast, _ = run(lambda fast, step: 1.0, problem, numerics="lossy")
    assert "bf16" in {one.lever for one in fast.decisions}
    fast, _ = run(lambda fast, step: 1.0, problem, numerics="exact")
    assert {one.lever for one in fast.decisions} == {"foreach"}


def test_training_with_exact_levers_is_bit_for_bit_the_plain_one(problem):
    def weights(numerics: str | None) -> torch.Tensor:
        model = make_model()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        loader = salience.Loader(problem, 25, epochs=10)
        call: Any = (
            model if numerics is None else salience.tune(model, optimizer, loader, numerics=numerics, memory="1KiB")
        )
        for _ in range(10):
            for x, y in loader:
                loss = loader.loss(F.cross_entropy(call(x), y, reduction="none"))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return model.weight.detach()

    assert torch.equal(weights(None), weights("exact"))


def test_a_lever_that_fails_is_undone_and_the_step_is_made(problem, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda *_, **__: _raise)  # no compiler fails on request
    fast, _ = run(lambda fast, step: 1.0, problem, levers=("compile",))
    assert fast.decisions[-1].action == "undo"
    assert "it failed: RuntimeError: no" in fast.decisions[-1].reason


def _raise(*_: Any) -> None:
    raise RuntimeError("no")


def test_evaluation_between_windows_counts_for_nothing(problem):
    """The clock stands at another place after every window, as after an evaluation; blocks do not notice."""
    fast, _ = run(
        lambda fast, step: (1.0 if "fused" in fast.on else 2.0) + 500 * (step % 12 == 11), problem, levers=("fused",)
    )
    assert fast.decisions[-1].measured == pytest.approx(2.0)


def test_a_resumed_handle_keeps_what_was_kept_and_tries_the_rest(problem):
    fast, _ = run(lambda fast, step: 1.0 if "fused" in fast.on else 2.0, problem, levers=("fused", "foreach"), stop=60)
    assert fast.kept == ("fused",)
    state = fast.state_dict()
    again, _ = run(lambda fast, step: 1.0, problem, stop=1)
    again.load_state_dict(state)
    assert again.on == ("fused",)
    assert again.optimizer.param_groups[0]["fused"]


def test_a_state_with_an_unknown_lever_is_refused(problem):
    fast, _ = run(lambda fast, step: 1.0, problem, stop=1)
    with pytest.raises(StateError, match="warp"):
        fast.load_state_dict({"on": ["warp"], "left": [], "segments": [], "shape": None})


def test_close_leaves_model_and_optimizer_as_they_were(problem):
    fast, _ = run(lambda fast, step: 1.0 if "fused" in fast.on else 2.0, problem, levers=("fused",))
    fast.close()
    assert fast.optimizer.param_groups[0]["fused"] is None
    assert fast.done


def test_memory_that_is_too_little_is_said(problem):
    fast, loader = run(lambda fast, step: 1.0, problem, levers=(), memory=1, stop=2)
    assert any("memory=" in event["text"] for event in loader.events.recent if event["kind"] == "warning")
    assert fast.done


def test_a_budget_of_memory_checkpoints_blocks(problem):
    model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(8, 8), nn.Sigmoid())), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = salience.Loader(problem, 25, epochs=1)
    fast = salience.tune(model, optimizer, loader, levers=(), memory=25 * 8 * 4 * 6)
    for x, y in loader:
        loader.loss(F.cross_entropy(fast(x), y, reduction="none")).backward()
    decision = fast.decisions[0]
    assert (decision.lever, decision.action) == ("checkpoint", "keep")
    assert decision.reason.endswith("exact")
    again = salience.tune(model, optimizer, loader, levers=())
    again.load_state_dict(fast.state_dict())
    assert again.state_dict() == fast.state_dict()


def test_wrong_arguments_say_what_is_allowed(problem):
    model = make_model()
    optimizer, loader = torch.optim.SGD(model.parameters(), lr=0.1), salience.Loader(problem, 25, epochs=1)
    with pytest.raises(ConfigError, match=r"must be a salience.Loader"):
        salience.tune(model, optimizer, DataLoader(problem))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"Did you mean 'exact'"):
        salience.tune(model, optimizer, loader, numerics="exat")
    with pytest.raises(ConfigError, match=r"Did you mean 'compile'"):
        salience.tune(model, optimizer, loader, levers=["compil"])
    with pytest.raises(ConfigError, match="above 0"):
        salience.tune(model, optimizer, loader, memory=0)


def test_the_ceiling_is_amdahls():
    lever = next(one for one in SPEED_LEVERS if one.name == "compile")
    assert ceiling({"model": 8.0, "optimizer": 1.0, "wait": 1.0}, lever) == pytest.approx(10 / 6)


def test_compile_waits_for_a_model_without_hooks():
    model = make_model()
    lever = next(one for one in SPEED_LEVERS if one.name == "compile")
    facts = Facts(model=model, optimizer=torch.optim.SGD(model.parameters()), device=torch.device("cpu"))
    handle = model.register_forward_hook(lambda *_: None)
    assert "hooks" in lever.refused(facts)
    handle.remove()
    assert "hooks" not in lever.refused(facts)
