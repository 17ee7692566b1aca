"""Rates, optimizers, ghost batch norm, injected noise and goodput, each against its formula."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from torch import nn

from salience.errors import ConfigError, MissingExtra
from salience.large import (
    LARC,
    GhostBatchNorm,
    GradientNoise,
    best_batch,
    efficiency,
    ghost_batch_norm,
    goodput,
    optimizer,
    scaled_rate,
    warmup,
)
from salience.large.goodput import step_seconds

from conftest import make_model, require


def test_scaling_rules_by_name():
    assert scaled_rate(0.1, 1024, 256) == pytest.approx(0.4)
    assert scaled_rate(0.1, 1024, 256, "sqrt") == pytest.approx(0.2)
    assert scaled_rate(0.1, 1024, 256, "none") == 0.1
    with pytest.raises(ConfigError, match="Did you mean 'linear'"):
        scaled_rate(0.1, 1024, 256, "lineer")
    with pytest.raises(ConfigError, match="batch is 0"):
        scaled_rate(0.1, 0, 256)


def test_warmup_rises_in_a_straight_line_to_its_shape():
    shape = warmup("cosine", share=0.2)
    half = 0.5 * (1 + math.cos(math.pi * 0.2))
    assert [shape(0.0), shape(0.1), shape(0.2)] == pytest.approx([0.0, half / 2, half])
    assert shape(0.7) == pytest.approx(0.5 * (1 + math.cos(math.pi * 0.7)))
    with pytest.raises(ConfigError, match="share is 1"):
        warmup(share=1)


@pytest.mark.parametrize("name", ["lars", "lamb", "novograd"])
def test_optimizers_by_name_train(name):
    try:
        import pytorch_optimizer  # noqa: F401
    except ImportError:
        require(False, "pytorch_optimizer")
    model = make_model()
    made = optimizer(name, model.parameters(), lr=0.1)
    before = model.weight.detach().clone()
    model(torch.ones(2, 8)).square().mean().backward()
    made.step()
    assert not torch.equal(before, model.weight)


def test_without_the_package_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    with pytest.raises(MissingExtra, match=r"pip install 'salience\[large\]'"):
        optimizer("lars", make_model().parameters())
    with pytest.raises(ConfigError, match="Did you mean 'lars'"):
        optimizer("larz", make_model().parameters())


@pytest.mark.parametrize("clip", [True, False])
def test_larc_gives_each_layer_the_rate_of_its_formula(clip):
    p, bias = nn.Parameter(torch.full((2, 3), 2.0)), nn.Parameter(torch.ones(3))
    p.grad, bias.grad = torch.full((2, 3), 0.5), torch.full((3,), 0.5)
    larc = LARC(torch.optim.SGD([p, bias], lr=0.1, weight_decay=0.01), trust=0.02, clip=clip)
    weight, gradient = 2.0 * 6**0.5, 0.5 * 6**0.5
    rate = 0.02 * weight / (gradient + 0.01 * weight)
    factor = min(rate / 0.1, 1.0) if clip else rate
    larc.step()
    torch.testing.assert_close(p.detach(), torch.full((2, 3), 2.0 - 0.1 * factor * (0.5 + 0.01 * 2.0)))
    torch.testing.assert_close(bias.detach(), torch.full((3,), 1 - 0.1 * (0.5 + 0.01)))  # as plain SGD
    assert larc.param_groups[0]["weight_decay"] == 0.01


def test_larc_leaves_a_layer_of_zeros_alone_and_refuses_decoupled_decay():
    p = nn.Parameter(torch.zeros(2, 2))
    p.grad = torch.ones(2, 2)
    LARC(torch.optim.SGD([p], lr=0.1)).step()
    torch.testing.assert_close(p.detach(), torch.full((2, 2), -0.1))
    with pytest.raises(ConfigError, match="AdamW"):
        LARC(torch.optim.AdamW([p]))


def images(n: int = 12) -> torch.Tensor:
    return torch.randn(n, 3, 4, 4, generator=torch.Generator().manual_seed(0)) * 2 + 1


def test_ghost_batch_norm_normalises_parts_as_small_batches():
    ghost, plain = GhostBatchNorm(3, size=4), nn.BatchNorm2d(3)
    x = images()
    torch.testing.assert_close(ghost(x), torch.cat([plain(part) for part in x.split(4)]))


def test_running_statistics_move_once_per_batch_by_the_mean_of_the_parts():
    ghost, x = GhostBatchNorm(3, size=4), images()
    ghost(x)
    means = torch.stack([part.mean((0, 2, 3)) for part in x.split(4)]).mean(0)
    torch.testing.assert_close(ghost.running_mean, 0.1 * means)
    assert int(ghost.num_batches_tracked) == 1


def test_in_evaluation_and_on_small_batches_it_is_batch_norm():
    ghost, plain = GhostBatchNorm(3, size=128), nn.BatchNorm2d(3)
    assert torch.equal(ghost(images()), plain(images()))
    assert torch.equal(ghost.eval()(images()), plain.eval()(images()))


def test_a_converted_model_keeps_its_parameters_and_names():
    model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3), nn.Sequential(nn.BatchNorm2d(3)))
    model(images())
    names, weight = list(model.state_dict()), model[1].weight
    ghost = ghost_batch_norm(model, 4)
    assert ghost is model
    assert list(model.state_dict()) == names
    assert model[1].weight is weight
    assert isinstance(model[2][0], GhostBatchNorm)
    assert int(model[1].num_batches_tracked) == 1
    model(images()).sum().backward()
    with pytest.raises(ConfigError, match="size is 1"):
        ghost_batch_norm(nn.Sequential(nn.BatchNorm2d(3)), 1)


def test_injected_noise_has_the_stated_variance_and_fades():
    p = nn.Parameter(torch.zeros(40_000))
    p.grad = torch.zeros_like(p)
    noise = GradientNoise([p], eta=0.04, gamma=0.5, seed=1)
    noise()
    assert float(p.grad.std()) == pytest.approx(0.2, rel=0.02)
    assert noise.deviation == pytest.approx(math.sqrt(0.04 / 2**0.5))


def test_injected_noise_is_resumed_and_leaves_global_randomness_alone():
    def two(resume: bool) -> torch.Tensor:
        p = nn.Parameter(torch.zeros(5))
        p.grad = torch.zeros_like(p)
        noise = GradientNoise([p], seed=1)
        noise()
        if resume:
            state, noise = noise.state_dict(), GradientNoise([p], seed=7)
            noise.load_state_dict(state)
        noise()
        return p.grad

    before = torch.random.get_rng_state()
    assert torch.equal(two(False), two(True))
    assert torch.equal(before, torch.random.get_rng_state())


def test_goodput_is_throughput_times_efficiency():
    assert efficiency(128, 128, 1000) == 1
    assert efficiency(2128, 128, 1000) == pytest.approx(1128 / 3128)
    assert goodput(256, 128, 1e12, 0.5) == pytest.approx(512)  # with boundless noise every sample counts
    assert goodput(256, 128, 0, 0.5) == pytest.approx(256)  # without noise a step is a step
    assert step_seconds(3, 4, 2) == pytest.approx(5)


def test_the_best_batch_balances_both():
    def seconds(batch: int) -> float:
        return 0.1 + 0.001 * batch  # a fixed cost per step

    batches = [2**k for k in range(4, 15)]
    exact = math.sqrt(1000 * 100)  # d/dB of B / ((0.1 + 0.001 B)(N + B)) = 0 at B^2 = 100 N
    assert best_batch(batches, 64, 1000, seconds) == min(batches, key=lambda b: abs(math.log(b / exact)))
    assert best_batch(batches, 64, 0, seconds) == 16
    with pytest.raises(ConfigError, match="batches is empty"):
        best_batch([], 64, 0, seconds)
