"""Ghost norms equal the norms of per-sample gradients made one sample at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from salience.signals import ghost
from salience.signals.ghost import Size, cheaper, choose, size_of, squared_norms

B = 5


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def filled(layer: nn.Module) -> nn.Module:
    for seed, p in enumerate(layer.parameters()):
        p.data = noise(*p.shape, seed=seed)
    return layer


def wanted(layer: nn.Module, x: Tensor, g: Tensor) -> Tensor:
    """|gradient of sum(layer(x_i) * g_i)|^2 for each sample, by vmap(grad)."""

    def value(parameters, xi, gi):
        return (functional_call(layer, parameters, (xi[None],))[0] * gi).sum()

    trainable = {name: p for name, p in layer.named_parameters() if p.requires_grad}
    each = vmap(grad(value), (None, 0, 0))(trainable, x, g)
    return sum(each[name].flatten(1).square().sum(1) for name in trainable)


LAYERS = [
    (nn.Linear(7, 3), (7,)),
    (nn.Linear(7, 3, bias=False), (7,)),
    (nn.Linear(40, 50), (4, 40)),  # few positions: Gram form
    (nn.Linear(3, 2), (11, 3)),  # many: direct form
    (nn.Linear(3, 2), (3, 4, 3)),
    (nn.Conv2d(4, 6, 3), (4, 9, 8)),
    (nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 0), bias=False), (4, 9, 8)),
    (nn.Conv2d(4, 6, 3, padding=2, dilation=2, groups=2), (4, 9, 8)),
    (nn.Conv2d(4, 4, 3, groups=4, padding="same"), (4, 6, 6)),
    (nn.Conv2d(4, 6, (2, 4), padding="same", dilation=(1, 2)), (4, 9, 8)),
    (nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), (4, 6, 5)),
    (nn.Conv2d(4, 6, 1), (4, 6, 5)),
    (nn.Conv2d(4, 6, 1, stride=2), (4, 6, 5)),
    (nn.Conv2d(32, 48, 3, padding=1), (32, 3, 3)),  # Gram form
]


SAME = "ignore:Using padding='same' with even kernel"  # torch's remark on one of the examples


@pytest.mark.filterwarnings(SAME)
@pytest.mark.parametrize(("layer", "shape"), LAYERS, ids=lambda value: str(value))
@pytest.mark.parametrize("room", [1, 1 << 24])
def test_norms_are_those_of_per_sample_gradients(layer, shape, room, monkeypatch):
    monkeypatch.setattr(ghost, "MAX_NUMBERS_HELD", room)  # 1: each sample by itself
    layer, x = filled(layer), noise(B, *shape)
    g = noise(*layer(x).shape, seed=9)
    torch.testing.assert_close(squared_norms(layer, [(x, g)]), wanted(layer, x, g))


@pytest.mark.filterwarnings(SAME)
def test_the_examples_take_both_forms():
    forms = set()
    for layer, shape in LAYERS:
        layer, x = filled(layer), noise(B, *shape)
        size = size_of(layer, x.shape, layer(x).shape)
        forms.add((type(layer), cheaper(size.positions, size.inputs, size.outputs)))
    assert len(forms) == 4


def test_gradients_of_several_calls_of_a_layer_add_up_before_the_norm():
    layer, x = filled(nn.Conv2d(3, 4, 3)), noise(B, 3, 6, 6)
    y = noise(B, 3, 5, 7, seed=1)
    gx, gy = noise(*layer(x).shape, seed=2), noise(*layer(y).shape, seed=3)

    def value(parameters, xi, yi, gxi, gyi):
        first, second = (functional_call(layer, parameters, (i[None],))[0] for i in (xi, yi))
        return (first * gxi).sum() + (second * gyi).sum()

    each = vmap(grad(value), (None, 0, 0, 0, 0))(dict(layer.named_parameters()), x, y, gx, gy)
    both = sum(part.flatten(1).square().sum(1) for part in each.values())
    torch.testing.assert_close(squared_norms(layer, [(x, gx), (y, gy)]), both)


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_frozen_parameters_have_no_gradient(frozen):
    layer, x, g = filled(nn.Linear(4, 3)), noise(B, 4), noise(B, 3, seed=1)
    getattr(layer, frozen).requires_grad_(False)
    torch.testing.assert_close(squared_norms(layer, [(x, g)]), wanted(layer, x, g))


def test_half_precision_is_added_up_in_float32():
    layer = nn.Linear(4, 3)
    x, g = 300 * torch.ones(2, 4, dtype=torch.bfloat16), torch.ones(2, 3, dtype=torch.float16)
    norms = squared_norms(layer, [(x, g)])
    assert norms.dtype == torch.float32
    torch.testing.assert_close(norms, (x.float().square().sum(1) + 1) * 3)  # 1.08 M: float16 ends at 65504


def test_all_last_and_auto_from_the_end_backwards():
    heavy = Size(positions=256, inputs=1152, outputs=128)
    light = Size(positions=1, inputs=512, outputs=10)
    sizes = {"a": light, "b": heavy, "c": heavy, "d": light}
    assert choose(sizes, "all") == ("a", "b", "c", "d")
    assert choose(sizes, "last") == ("d",)
    assert choose(sizes, "auto") == ("d",)  # c alone costs as much as its forward pass, a sixth of the step
    assert choose({"a": light, "b": light}, "auto") == ("a", "b")
    many = {str(k): heavy for k in range(10)}
    assert choose(many, "auto") == ("7", "8", "9")
    assert sum(many[name].norm for name in choose(many, "auto")) <= 0.1 * 3 * sum(s.forward for s in many.values())


def test_positions_that_share_a_direction_are_not_added_as_if_they_did_not():
    """The sum of norms is not the norm of the sum: opposite gradients at two positions cancel."""
    layer, x = filled(nn.Linear(3, 2, bias=False)), noise(1, 1, 3).repeat(1, 2, 1)
    g = noise(1, 1, 2, seed=1)
    one = squared_norms(layer, [(x[:, :1], g)])
    torch.testing.assert_close(squared_norms(layer, [(x, torch.cat((g, -g), 1))]), 0 * one)
    torch.testing.assert_close(squared_norms(layer, [(x, torch.cat((g, g), 1))]), 4 * one)
