"""treat="resolution" in a run: sizes are in the Plan, one per window, and survive a resume."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import salience
from salience.decide.levers import AvailableLevers, Settings, options
from salience.errors import ConfigError
from salience.events import StepCosts

EPOCHS = 10


@pytest.fixture
def pictures() -> TensorDataset:
    g = torch.Generator().manual_seed(0)
    return TensorDataset(torch.rand(60, 3, 32, 32, generator=g), torch.randint(0, 4, (60,), generator=g))


def sides(loader: Any, epochs: int = EPOCHS) -> list[set[int]]:
    found = []
    for _ in range(epochs):
        found.append(set())
        for x, y in loader:
            found[-1].add(x.shape[-1])
            loader.loss(x.mean((1, 2, 3)), None, y)
    return found


def test_every_batch_of_a_window_has_the_size_of_its_plan(pictures):
    loader = salience.Loader(pictures, 16, epochs=EPOCHS, treat=salience.Treat("resolution", low=0.5, until=0.6))
    assert sides(loader) == [{16}] * 6 + [{32}] * 4
    planned = [event["resolution"] for event in loader.events.recent if event["kind"] == "plan"]
    assert planned == [0.5] * 6 + [1.0] * 4
    assert "55% of the pixels" in loader.report()


def test_without_it_plans_and_batches_are_untouched(pictures):
    loader = salience.Loader(pictures, 16, epochs=2)
    assert sides(loader, 2) == [{32}] * 2
    assert loader.plan is not None
    assert "resolution" not in loader.plan.arrays()


def test_it_combines_with_select(pictures):
    loader = salience.Loader(
        pictures,
        10,
        epochs=EPOCHS,
        select="uniform",
        treat=salience.Treat("resolution", sizes="ramp", low=0.5, until=0.9),
    )
    assert sides(loader) == [{16}, {16}, {20}, {20}, {24}, {24}, {28}, {28}, {32}, {32}]


def test_augmentation_still_runs_before_it(pictures):
    def mark(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x)

    loader = salience.Loader(pictures, 16, epochs=3, treat="resolution", augment=[mark])
    x, _ = next(iter(loader))
    assert x.shape[-1] == 16
    assert not x.any()


def test_a_run_resumed_in_mid_window_shows_the_same_images(pictures):
    def run(stop: int | None) -> list[torch.Tensor]:
        loader: Any = salience.Loader(pictures, 16, epochs=4, treat="resolution", seed=3)
        shown: list[torch.Tensor] = []
        while loader.epoch < 4:
            for x, y in loader:
                shown.append(x)
                loader.loss(x.mean((1, 2, 3)), None, y)
                if len(shown) == stop:
                    state = loader.state_dict()
                    loader = salience.Loader(pictures, 16, epochs=4, treat="resolution", seed=3)
                    loader.load_state_dict(state)
                    break
        return shown

    whole, parts = run(None), run(6)
    assert len(whole) == len(parts)
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


class Dicts(Dataset[Any]):
    def __init__(self, *names: str) -> None:
        self.names = names

    def __len__(self) -> int:
        return 20

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {**{name: torch.zeros(3, 32, 32) for name in self.names}, "label": 1, "note": torch.zeros(4)}


def test_images_are_found_in_dicts_and_beside_ids():
    loader = salience.Loader(Dicts("image"), 10, epochs=3, treat="resolution", with_ids=True)
    ids, batch = next(iter(loader))
    assert len(ids) == 10
    assert batch["image"].shape == (10, 3, 16, 16)
    assert batch["note"].shape == (10, 4)


@pytest.mark.parametrize(("names", "said"), [(("image", "depth"), "2 tensors"), ((), "no images")])
def test_batches_whose_images_are_not_known_are_left_alone_and_said(names, said):
    loader = salience.Loader(Dicts(*names), 10, epochs=3, treat="resolution")
    for batch in loader:
        assert all(batch[name].shape[-1] == 32 for name in names)
        assert loader.resize(torch.zeros(10, 3, 32, 32)).shape[-1] == 16
        loader.skip()
    warnings = [event["text"] for event in loader.events.recent if event["kind"] == "warning"]
    assert len(warnings) == 1
    assert said in warnings[0]


def test_a_selector_resizes_on_request(pictures):
    x, y = pictures.tensors
    selector = salience.Selector(60, batch_size=20, epochs=4, treat=salience.Treat("resolution", low=0.5))
    found = []
    for _ in range(4):
        for ids, _weights in selector:
            images = selector.resize(x[ids])
            found.append(images.shape[-1])
            selector.loss(images.mean((1, 2, 3)), None, y[ids])
    assert found == [16] * 9 + [32] * 3


def test_statistics_of_batch_norm_are_those_of_full_size_at_the_end(pictures):
    """Noise loses variance where it is made smaller: the statistics tell the sizes apart."""
    norm = nn.BatchNorm2d(3, momentum=0.5)
    loader = salience.Loader(pictures, 10, epochs=5, treat=salience.Treat("resolution", low=0.25, until=1.0))
    seen = []
    for _ in range(5):
        for x, y in loader:
            norm(x)
            loader.loss(x.mean((1, 2, 3)), None, y)
        seen.append(float(norm.running_var.mean()))
    full = float(pictures.tensors[0].var((0, 2, 3)).mean())
    assert seen[-2] < 0.3 * full
    assert seen[-1] == pytest.approx(full, rel=0.05)


def test_what_cannot_be_is_refused(pictures):
    with pytest.raises(ConfigError, match="needs epochs"):
        salience.Loader(pictures, 16, treat="resolution")
    with pytest.raises(ConfigError, match='only "resolution"'):
        salience.Selector(60, epochs=2, treat="reuse")
    loader = salience.Loader(pictures, 16, epochs=2, treat="resolution")
    with pytest.raises(ConfigError, match=r"\[B, C, H, W\]"):
        loader.resize(torch.zeros(3, 32, 32))


def test_auto_offers_it_as_a_lossy_lever_where_batches_have_images():
    costs = StepCosts(step=1.0, wait=0.0, input=0.1, compute=1.0, workers=1, steps=9)
    pixels = [0.5] * 4 + [1.0] * 2
    found = options(costs, Settings(workers=1), AvailableLevers(cores=0, pixels=pixels), 2)
    assert [(one.name, one.exact) for one in found] == [('treat="resolution"', False)]
    assert 1.2 < found[0].predicted < 1.4
    assert found[0].settings.resolution
    assert not options(costs, Settings(workers=1), AvailableLevers(cores=0, pixels=pixels), 4)  # full size from here on
    assert Settings.of(found[0].settings.numbers) == found[0].settings


@pytest.mark.parametrize("images", [True, False])
def test_auto_asks_for_it_only_where_there_are_images(pictures, problem, images):
    data = pictures if images else problem
    loader = salience.Loader(data, 16, epochs=3, auto="lossy")
    for x, y in loader:
        loader.loss(x.flatten(1).mean(1), None, y)
    deciding = loader._run.deciding  # pyright: ignore[reportPrivateUsage]
    assert deciding is not None
    assert bool(deciding._available().pixels) == images  # pyright: ignore[reportPrivateUsage]
