"""Models are built by name, learn, end in a linear layer, and a wrong name is explained."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from salience.app.models import BUILT_IN, build
from salience.errors import ConfigError

MINE = """
from torch import nn

THREE = 3
tiny = lambda classes: nn.Linear(4, classes)
def keywords(*, size, classes): return nn.Linear(size, classes)
def anything(**options): return nn.Linear(options["channels"], options["classes"])
def more(classes, depth=2): return nn.Linear(depth, classes)
def demanding(classes, depth, width): return nn.Linear(depth, classes)
def positional(classes, /): return nn.Linear(1, classes)
def nothing(classes): return None
class Net(nn.Linear):
    def __init__(self, classes, channels): super().__init__(channels, classes)
"""


@pytest.fixture(autouse=True)
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "my_models.py").write_text(MINE)
    (tmp_path / "my_broken.py").write_text("import not_installed_anywhere")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_models", None)


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize(("channels", "size"), [(1, 32), (3, 32), (3, 40)])
def test_a_built_in_gives_one_logit_a_class(name: str, channels: int, size: int):
    model = build(name, 7, channels, size).eval()
    with torch.no_grad():
        assert model(torch.zeros(2, channels, size, size)).shape == (2, 7)


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_ends_in_the_linear_layer_that_gives_the_logits(name: str):
    model = build(name, 5, 1, 32).eval()
    last = [module for module in model.modules() if not list(module.children())][-1]
    assert isinstance(last, nn.Linear)
    features: list[torch.Tensor] = []
    last.register_forward_hook(lambda _m, args, _out: features.append(args[0]))
    with torch.no_grad():
        logits = model(torch.randn(3, 1, 32, 32, generator=torch.Generator().manual_seed(0)))
        torch.testing.assert_close(last(features[0]), logits)


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_parameter_of_a_built_in_gets_a_gradient(name: str):
    model = build(name, 4, 1, 32)
    x = torch.randn(4, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    functional.cross_entropy(model(x), torch.arange(4)).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_a_light_built_in_learns_a_batch_by_heart(name: str):
    x = torch.randn(16, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    y = torch.arange(16) % 4
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build(name, 4, 1, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    losses: list[float] = []
    for _ in range(12):
        loss = functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


def test_sizes_of_the_well_known_models_are_the_well_known_ones():
    def parameters(name: str) -> int:
        return sum(p.numel() for p in build(name, 10, 3, 32).parameters())

    assert parameters("resnet18") == 11_173_962
    assert parameters("resnet9") == 6_573_130


def test_images_too_small_for_a_model_are_refused():
    with pytest.raises(ConfigError, match="size=16 is too small for resnet9"):
        build("resnet9", 10, 3, 16)


@pytest.mark.parametrize(
    ("factory", "inputs"), [("tiny", 4), ("keywords", 28), ("anything", 1), ("more", 2), ("Net", 1)]
)
def test_your_own_factory_gets_what_its_signature_takes(factory: str, inputs: int):
    model = build(f"my_models:{factory}", 6, 1, 28)
    assert isinstance(model, nn.Linear)
    assert (model.in_features, model.out_features) == (inputs, 6)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("resnet81", "no model is named 'resnet81'. Did you mean 'resnet18'"),
        ("my_models", "pkg.module:factory"),
        ("no_such_module:net", "module 'no_such_module' of model .* cannot be imported"),
        ("my_broken:net", "not_installed_anywhere"),
        (":net", "cannot be imported"),
        ("my_models:tinny", "module 'my_models' has no 'tinny'. Did you mean 'tiny'"),
        ("my_models:", "has no ''"),
        ("my_models:THREE", "is a int, which cannot be called"),
        ("my_models:demanding", "requires depth, width"),
        ("my_models:positional", "requires classes"),
        ("my_models:nothing", "returned NoneType, not a torch.nn.Module"),
    ],
)
def test_a_name_that_cannot_be_built_is_explained(name: str, said: str):
    with pytest.raises(ConfigError, match=said):
        build(name, 10, 3, 32)


def test_impossible_numbers_are_refused():
    with pytest.raises(ConfigError, match="classes=0"):
        build("cnn", 0)
