"""The gradient noise scale on problems whose noise is known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import salience
from salience.errors import ConfigError
from salience.events import read
from salience.large.noise import NoiseScale, harmonic_mean, noise_of
from salience.report.reader import _noise  # pyright: ignore[reportPrivateUsage]

N, D, MEAN, SIGMA = 6000, 20, 0.3, 1.5
TRUE_SQUARE, TRUE_TRACE = D * MEAN**2, D * SIGMA**2


def samples(seed: int = 0) -> Tensor:
    """Gradients of samples: a mean with a known norm, and noise of a known variance."""
    return MEAN + SIGMA * torch.randn(N, D, generator=torch.Generator().manual_seed(seed))


class Linear(nn.Module):
    """A loss that is linear in the parameters, so that the gradient of a sample is the sample."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(D, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[:, 0]


def test_the_formulas_return_what_expectations_were_made_of():
    small, big = 16, 128
    square, trace = noise_of(TRUE_SQUARE + TRUE_TRACE / small, TRUE_SQUARE + TRUE_TRACE / big, small, big)
    assert (square, trace) == (pytest.approx(TRUE_SQUARE), pytest.approx(TRUE_TRACE))
    with pytest.raises(ConfigError, match="two batch sizes"):
        noise_of(1, 1, 8, 8)


def test_unequal_ranks_belong_to_the_harmonic_mean():
    sizes = np.array([10, 30])
    expected = np.mean(TRUE_SQUARE + TRUE_TRACE / sizes)
    assert expected == pytest.approx(TRUE_SQUARE + TRUE_TRACE / harmonic_mean(sizes))
    assert harmonic_mean(sizes) == pytest.approx(15)


def test_on_one_device_it_is_found_from_norms_per_sample():
    model, x = Linear(), samples()
    loader = salience.Loader(TensorDataset(x, torch.arange(N)), 50, epochs=3)
    loader.attach(model, grad_norm="all")
    noise = NoiseScale(loader)
    for _ in range(3):
        for inputs, _ in loader:
            model.zero_grad()
            loader.loss(model(inputs)).backward()
            noise.step(model)
    assert noise.scale == pytest.approx(TRUE_TRACE / TRUE_SQUARE, rel=0.1)
    told = [event for event in loader.events.recent if event["kind"] == "noise"]
    assert [event["window"] for event in told] == [0, 1, 2]
    assert (told[0]["small"], told[0]["big"], told[0]["caveat"]) == (1, pytest.approx(50), "")
    assert "26 (window 0)" in _noise([event.data for event in told])[0]  # pyright: ignore[reportArgumentType]


def test_selection_is_named_as_a_caveat():
    model, x = Linear(), samples()
    loader = salience.Loader(TensorDataset(x, torch.arange(N)), 50, epochs=4, select="uniform")
    loader.attach(model, grad_norm="all")
    noise = NoiseScale(loader)
    for _ in range(3):
        for inputs, _ in loader:
            model.zero_grad()
            loader.loss(model(inputs)).backward()
            noise.step(model)
    told = [event for event in loader.events.recent if event["kind"] == "noise"]
    assert loader.plan is not None
    assert len(loader.plan) < N
    assert "importance" in told[-1]["caveat"]


def test_a_gradient_hidden_by_noise_has_no_scale():
    noise = NoiseScale(salience.Selector(10, epochs=1))
    noise.enter(1.0, 0.001, 1, 100)
    assert noise.square < 0
    assert noise.scale is None


def test_averages_are_resumed():
    noise = NoiseScale(salience.Selector(10, epochs=1), decay=0.5)
    noise.enter(3.0, 1.0, 1, 100)
    again = NoiseScale(salience.Selector(10, epochs=1), decay=0.5)
    again.load_state_dict(noise.state_dict())
    for one in (noise, again):
        one.enter(5.0, 2.0, 1, 100)
    assert again.scale == noise.scale
    assert noise.scale is not None


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    model = Linear()
    with torch.no_grad():
        model.inner.weight.zero_()
    ddp = nn.parallel.DistributedDataParallel(model)
    loader = salience.Loader(TensorDataset(samples(), torch.arange(N)), 20, epochs=3, log=f"{folder}/run.jsonl")
    noise = NoiseScale(loader)
    noise.hook(ddp)
    plain = []
    for _ in range(3):
        for inputs, _ in loader:
            ddp.zero_grad()
            loader.loss(ddp(inputs)).backward()
            plain.append(model.inner.weight.grad.clone())  # pyright: ignore[reportOptionalMemberAccess]
    if rank == 0:
        torch.save({"scale": noise.scale, "mean": torch.stack(plain).mean(0)}, f"{folder}/found.pt")
    dist.destroy_process_group()


def test_two_ranks_measure_it_from_the_buckets_as_they_pass(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    mp.spawn(_rank, args=(str(tmp_path),), nprocs=2)
    found = torch.load(tmp_path / "found.pt", weights_only=True)
    assert found["scale"] == pytest.approx(TRUE_TRACE / TRUE_SQUARE, rel=0.25)
    torch.testing.assert_close(
        found["mean"][0], samples().mean(0)
    )  # the exchange is DDP's own: the mean of all samples
    told = [event for event in read(tmp_path / "run.jsonl") if event["kind"] == "noise"]
    assert len(told) == 3
    assert (told[0]["small"], told[0]["big"]) == (pytest.approx(20), pytest.approx(40))


def test_the_hook_wants_a_distributed_model():
    with pytest.raises(ConfigError, match="DistributedDataParallel"):
        NoiseScale(salience.Selector(10, epochs=1)).hook(Linear())
