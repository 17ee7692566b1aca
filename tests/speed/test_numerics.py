"""Every lever keeps its word about the numbers: a hundred steps with it are compared with a hundred without it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from salience.speed.checkpointing import units_of
from salience.speed.levers import SPEED_LEVERS, Facts
from salience.speed.way import Way

STEPS = 100
TOLERANCE = {"exact": 0.0, "rounding": 1e-5, "lossy": 0.05}
"""Largest difference of any parameter after a hundred steps, relative to the largest parameter."""


def network(*, dropout: float = 0.0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.Tanh(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16), nn.Tanh(), nn.Dropout(dropout),
            nn.Flatten(), nn.Linear(16 * 16, 4),
        )  # fmt: skip


Optim = Callable[[nn.Module], torch.optim.Optimizer]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4, nesterov=True)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def trained(make: Optim, change: Callable[[Way], None], *, steps: int = STEPS, dropout: float = 0.0) -> Way:
    model = network(dropout=dropout)
    way = Way(model, make(model), torch.device("cpu"))
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(8, 32, 3, 8, 8, generator=g), torch.randint(0, 4, (8, 32), generator=g)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        for step in range(steps):
            if step == 2:  # in mid-run, when there is momentum
                change(way)
            way.shape = (x[0].shape,)
            way.optimizer.zero_grad()
            F.cross_entropy(way(x[step % 8]), y[step % 8]).backward()
            way.optimizer.step()
    return way


def difference(one: nn.Module, other: nn.Module) -> float:
    states = one.state_dict().values(), other.state_dict().values()
    pairs = [(a, b) for a, b in zip(*states, strict=True) if a.is_floating_point()]
    largest = max(float(a.abs().max()) for a, _ in pairs)
    return max(float((a - b).abs().max()) for a, b in pairs) / largest


@pytest.fixture(scope="module")
def plain() -> dict[Optim, nn.Module]:
    return {make: trained(make, lambda way: None).model for make in (sgd, adamw)}


HERE = ("fused", "foreach", "channels_last", "bf16")


@pytest.mark.parametrize("make", [sgd, adamw])
@pytest.mark.parametrize("lever", [one for one in SPEED_LEVERS if one.name in HERE], ids=lambda one: one.name)
def test_a_hundred_steps_differ_by_no_more_than_a_levers_class_says(lever, make, plain):
    way = trained(make, lambda way: way.switch(lever.name, True))
    assert way.on == {lever.name}
    assert difference(plain[make], way.model) <= TOLERANCE[lever.numerics]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, where its compiler is imported
def test_a_compiled_model_is_the_same_up_to_rounding():
    eager = trained(sgd, lambda way: None)
    way = trained(sgd, lambda way: way.switch("compile", True))
    assert difference(eager.model, way.model) <= TOLERANCE["rounding"]
    assert way._compiled  # pyright: ignore[reportPrivateUsage]


def test_every_lever_is_tested_or_needs_a_gpu():
    facts = Facts(model=network(), optimizer=sgd(network()), device=torch.device("cpu"))
    only_gpu = {one.name for one in SPEED_LEVERS if "CUDA" in one.refused(facts)}
    assert {one.name for one in SPEED_LEVERS} == {*HERE, "compile"} | only_gpu


def segments(way: Way) -> None:
    way.segments = units_of(way.model), [(0, 1), (2,)]


@pytest.mark.parametrize("make", [sgd, adamw])
def test_checkpointing_changes_no_bit(make):
    """Neither parameters nor statistics of batch norm, although the forward pass runs twice; draws of dropout are the same."""
    way = trained(make, segments, dropout=0.1)
    assert difference(trained(make, lambda way: None, dropout=0.1).model, way.model) == 0.0
    counts = [one.num_batches_tracked for one in way.model.modules() if isinstance(one, nn.BatchNorm2d)]
    assert [int(count) for count in counts] == [STEPS, STEPS]


def test_a_lever_that_is_switched_off_again_leaves_layouts_and_options_as_they_were():
    way = trained(sgd, lambda way: [way.switch(name, True) for name in ("fused", "channels_last")], steps=4)
    weight: Tensor = next(way.model.parameters())
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert not weight.is_contiguous()
    for name in ("fused", "channels_last"):
        way.switch(name, False)
    assert weight.is_contiguous()
    momentum = way.optimizer.state[weight]["momentum_buffer"]
    assert momentum.is_contiguous()
    assert way.optimizer.param_groups[0]["fused"] is None


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cudnn_benchmark", "tf32", "cuda_graphs", "fused", "compile"])
def test_on_a_gpu_a_hundred_steps_differ_by_no_more_than_the_class_says(name):
    lever = next(one for one in SPEED_LEVERS if one.name == name)

    def run(on: bool) -> nn.Module:
        model = network().cuda()
        way = Way(model, sgd(model), torch.device("cuda", 0))
        g = torch.Generator().manual_seed(1)
        x, y = torch.randn(8, 32, 3, 8, 8, generator=g).cuda(), torch.randint(0, 4, (8, 32), generator=g).cuda()
        way.shape = (x[0].shape,)
        way.switch(name, on)
        for step in range(STEPS):
            way.optimizer.zero_grad()
            F.cross_entropy(way(x[step % 8]), y[step % 8]).backward()
            way.optimizer.step()
        way.switch(name, False)
        return model

    assert difference(run(False), run(True)) <= TOLERANCE[lever.numerics]
