"""Checkpointing under a budget: what is counted, what is chosen, and that the model stays the user's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from salience.app.models import build
from salience.speed.checkpointing import choose_segments, measure, outcome_of, segmented, smallest_segments, units_of


def chain(depth: int = 6) -> nn.Sequential:
    return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(64, 64), nn.Sigmoid())))


def kept_by(model: nn.Module, x: torch.Tensor, units, groups) -> int:
    """Bytes that autograd holds after a forward pass, each storage once."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = storage
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor), segmented(units, groups):
        out = model(x)
    del out
    return sum(storage.nbytes() for storage in seen.values())


def test_what_is_counted_is_what_autograd_holds():
    model, x = chain(), torch.randn(10, 64)
    units = units_of(model)
    account = measure(model, units, (x,), {})
    assert account.whole == kept_by(model, x, units, ())
    assert len(units) == 6


def test_a_budget_that_suffices_drops_nothing():
    model, x = chain(), torch.randn(10, 64)
    account = measure(model, units_of(model), (x,), {})
    chosen = choose_segments(account, units_of(model), account.whole)
    assert chosen is not None
    assert chosen.groups == ()


@pytest.mark.parametrize("share", [0.8, 0.6])
def test_chosen_segments_keep_to_the_budget(share):
    model, x = chain(12), torch.randn(10, 64)
    units = units_of(model)
    account = measure(model, units, (x,), {})
    chosen = choose_segments(account, units, share * account.whole)
    assert chosen is not None
    assert chosen.groups
    assert chosen.kept <= share * account.whole
    assert kept_by(model, x, units, chosen.groups) < chosen.kept + 1


def test_a_budget_nothing_can_meet_is_said_and_the_smallest_is_at_hand():
    model, x = chain(12), torch.randn(10, 64)
    units = units_of(model)
    account = measure(model, units, (x,), {})
    assert choose_segments(account, units, 100) is None
    assert smallest_segments(account, units).kept < 0.7 * account.whole


def test_measuring_leaves_statistics_and_random_numbers_alone():
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(4 * 36, 2)
    )
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.random.get_rng_state()
    measure(model, units_of(model), (torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1)),), {})
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert torch.equal(state, torch.random.get_rng_state())


def test_after_a_call_the_modules_are_the_users_own():
    model = build("resnet18", 10, size=16)
    own, units = dict(model.named_modules()), units_of(model)
    with segmented(units, [(1, 2), (3,)]):
        assert dict(model.named_modules()) != own
    assert list(dict(model.named_modules()).items()) == list(own.items())


def test_blocks_of_a_transformer_are_units():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    model = nn.Sequential(nn.Embedding(10, 16), nn.TransformerEncoder(layer, 3, enable_nested_tensor=False))
    inner = model[1]
    units = units_of(inner)
    assert [unit.names for unit in units] == [("0",), ("1",), ("2",)]
    x = torch.randn(2, 5, 16)
    plain = inner(x)
    with segmented(units, [(0,), (1,)]):
        out = inner(x)
    assert torch.equal(plain, out)
    out.sum().backward()
    assert all(p.grad is not None for p in inner.parameters())


def test_the_outcome_adds_the_largest_segment_made_again():
    model, x = chain(4), torch.randn(10, 64)
    units = units_of(model)
    account = measure(model, units, (x,), {})
    each = 10 * 64 * 4  # one activation; a linear layer keeps its input, a sigmoid its output
    assert account.whole == 5 * each  # the input, and the output of every sigmoid
    assert outcome_of(account, [(0, 1), (2, 3)]).kept == 4 * each  # two inputs, the last output, one segment's middle
