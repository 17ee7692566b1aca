"""Targets as people have them: each form is recorded as what it is, or named in one sentence."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset, TensorDataset

import salience
from salience.errors import LossError, Misattributed
from salience.select.noise import judge

N, C = 120, 4


def points() -> TensorDataset:
    g = torch.Generator().manual_seed(2)
    x = torch.randn(N, C, generator=g)
    return TensorDataset(x, x.argmax(1))


def warnings(loader) -> list[str]:
    return [event["text"] for event in loader.events.recent if event["kind"] == "warning"]


def train(loader, targets, logits=lambda x, y: x, epochs=2):
    """Losses that are right, with logits that are the inputs."""
    for _ in range(epochs):
        for x, y in loader:
            loader.loss(F.cross_entropy(x, y, reduction="none"), logits(x, y), targets(x, y))
    return loader.ledger


def plain():
    return train(salience.Loader(points(), 20, epochs=2), lambda x, y: y)


@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8])
def test_integers_of_every_size_are_classes(kind):
    ledger = train(salience.Loader(points(), 20, epochs=2), lambda x, y: y.to(kind))
    np.testing.assert_array_equal(ledger.label, plain().label)
    np.testing.assert_array_equal(ledger.right, plain().right)


@pytest.mark.parametrize("kind", [torch.float32, torch.int64])
def test_one_hot_targets_are_classes(kind):
    loader = salience.Loader(points(), 20, epochs=2)
    ledger = train(loader, lambda x, y: F.one_hot(y, C).to(kind))
    np.testing.assert_array_equal(ledger.label, plain().label)
    np.testing.assert_allclose(ledger.margin_sum, plain().margin_sum)
    assert not warnings(loader)


def test_a_column_of_classes_is_classes():
    ledger = train(salience.Loader(points(), 20, epochs=2), lambda x, y: y[:, None])
    np.testing.assert_array_equal(ledger.label, plain().label)


@pytest.mark.parametrize("ignored", [-100, -1, 255])
@pytest.mark.parametrize("with_logits", [True, False])
def test_samples_that_are_ignored_are_recorded_by_their_losses_alone(ignored, with_logits):
    data = points()
    off = torch.arange(N) % 3 == 0
    y = data.tensors[1].clone()
    y[off] = ignored
    loader = salience.Loader(TensorDataset(data.tensors[0], y), 20, epochs=2)
    for _ in range(2):
        for x, target in loader:
            losses = F.cross_entropy(x, target, reduction="none", ignore_index=ignored)
            loader.loss(losses, x if with_logits else None, target)
    ledger, off = loader.ledger, off.numpy()
    assert (ledger.seen == 2).all()
    np.testing.assert_array_equal(ledger.label[~off], data.tensors[1].numpy()[~off])
    if with_logits or ignored < 0:  # without logits it is not known how many classes there are
        assert (ledger.label[off] == -1).all()
        assert sum("name no class" in text for text in warnings(loader)) == 1
    if with_logits:
        assert (ledger.right[~off] == 2).all()
        assert (ledger.right[off] == 0).all()


@pytest.mark.parametrize("column", [True, False])
@pytest.mark.parametrize("kind", [torch.float32, torch.int64, torch.bool])
def test_two_classes_with_one_logit_are_known_as_such(column, kind):
    g = torch.Generator().manual_seed(2)
    z = torch.randn(N, generator=g)
    y = (z + 0.3 * torch.randn(N, generator=g) > 0).float()
    loader = salience.Loader(TensorDataset(z, y), 20, epochs=2)
    for _ in range(2):
        for logit, target in loader:
            losses = F.binary_cross_entropy_with_logits(logit, target, reduction="none")
            shaped = (logit[:, None], target[:, None]) if column else (logit, target)
            loader.loss(losses, shaped[0], shaped[1].to(kind))
    ledger = loader.ledger
    np.testing.assert_array_equal(ledger.label, y.numpy())
    np.testing.assert_array_equal(ledger.right == 2, ((z > 0) == (y > 0)).numpy())
    margin = torch.where(y > 0, z, -z).numpy()
    np.testing.assert_allclose(ledger.margin_sum, 2 * margin, rtol=1e-4, atol=1e-5)


def test_an_int64_field_beside_float_targets_is_not_taken_for_them():
    data = TensorDataset(torch.randn(N, 1), torch.arange(N) % 7, (torch.arange(N) % 2).float())
    loader = salience.Loader(data, 20, epochs=2)
    for _ in range(2):
        for z, _domain, y in loader:
            loader.loss(F.binary_cross_entropy_with_logits(z[:, 0], y, reduction="none"), z, y)
    np.testing.assert_array_equal(loader.ledger.label, np.arange(N) % 2)


def test_an_int64_field_beside_a_uint8_label_is_not_taken_for_it():
    data = [{"x": torch.randn(C), "domain": i % 7, "label": torch.tensor(i % 3, dtype=torch.uint8)} for i in range(N)]
    loader = salience.Loader(data, 20, epochs=2)
    for _ in range(2):
        for batch in loader:
            y = batch["label"].long()
            loader.loss(F.cross_entropy(batch["x"], y, reduction="none"), batch["x"], y)
    np.testing.assert_array_equal(loader.ledger.label, np.arange(N) % 3)


def test_mixed_samples_keep_their_class_and_are_not_judged_by_the_mixture():
    loader = salience.Loader(points(), 20, epochs=8)
    for _ in range(8):
        for x, y in loader:
            other, share = torch.randperm(len(x)), 0.3
            z = share * x + (1 - share) * x[other]
            losses = share * F.cross_entropy(z, y, reduction="none")
            losses = losses + (1 - share) * F.cross_entropy(z, y[other], reduction="none")
            loader.loss(losses, z, (y, y[other], share))
    ledger = loader.ledger
    np.testing.assert_array_equal(ledger.label, plain().label)
    assert (ledger.seen == 8).all()
    assert not ledger.vote_p.any(), "no prediction is held against a label"
    assert not judge(ledger).suspects().any()


def test_mixed_targets_with_a_share_of_one_are_plain_ones():
    ledger = train(salience.Loader(points(), 20, epochs=2), lambda x, y: (y, y.flip(0), 1.0))
    np.testing.assert_array_equal(ledger.right, plain().right)


def test_mixed_targets_that_do_not_fit_say_so():
    loader = salience.Loader(points(), 20)
    x, y = next(iter(loader))
    with pytest.raises(LossError, match="pass a tensor, or"):
        loader.loss(x.sum(1), x, (y, 0.3))
    with pytest.raises(LossError, match="19 mixed targets"):
        loader.loss(x.sum(1), x, (y, y[1:], 0.3))


def test_probabilities_are_classes_only_where_they_are_one_hot():
    data = points()
    soft = F.one_hot(data.tensors[1], C).float()
    soft[::2] = 0.7 * soft[::2] + 0.3 / C
    loader = salience.Loader(TensorDataset(data.tensors[0], soft), 20, epochs=2)
    for _ in range(2):
        for x, p in loader:
            loader.loss(F.cross_entropy(x, p, reduction="none"), x, p)
    ledger = loader.ledger
    assert (ledger.label[::2] == -1).all()
    np.testing.assert_array_equal(ledger.label[1::2], data.tensors[1][1::2].numpy())
    assert sum("name no class" in text for text in warnings(loader)) == 1


def test_several_labels_per_sample_are_no_classes_and_that_is_said():
    loader = salience.Loader(points(), 20)
    tags = (torch.arange(N * C).reshape(N, C) % 3 == 0).float()
    for x, y in loader:
        loader.loss(F.cross_entropy(x, y, reduction="none"), x, tags[: len(x)])
    assert (loader.ledger.label == -1).all()
    assert len(warnings(loader)) == 1
    assert "class statistics" in warnings(loader)[0]


class Pairs(Dataset):
    """A partner, and with it the target, is drawn at each visit."""

    def __init__(self) -> None:
        self.drawn = torch.Generator().manual_seed(0)

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.full((C,), float(i)), int(torch.randint(2, (), generator=self.drawn))


def test_targets_that_are_drawn_anew_switch_class_statistics_off_and_that_is_said_once():
    loader = salience.Loader(Pairs(), 20, epochs=4)
    for _ in range(4):
        for x, y in loader:
            loader.loss(x[:, 0], x, y)
    assert (loader.ledger.seen == 4).all()
    assert (loader.ledger.label == -1).all()
    said = [text for text in warnings(loader) if "drawn anew" in text]
    assert len(said) == 1


class Negatives(Dataset):
    """A user, and an item that is theirs or was drawn; numbers of both stand beside the target."""

    def __init__(self, kind: torch.dtype) -> None:
        self.drawn, self.kind = torch.Generator().manual_seed(0), kind

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> tuple[int, int, torch.Tensor]:
        item, own = torch.randint(50, (2,), generator=self.drawn).tolist()
        return i % 7, item, torch.tensor(own % 2, dtype=self.kind)


@pytest.mark.parametrize("kind", [torch.float32, torch.int64, torch.bool])
@pytest.mark.parametrize("column", [True, False])
def test_negatives_that_are_drawn_anew_are_no_misattribution_whatever_stands_beside_their_targets(kind, column):
    loader = salience.Loader(Negatives(kind), 20, epochs=3)
    for _ in range(3):
        for user, item, y in loader:
            logits = (user - item / 7).float()
            losses = F.binary_cross_entropy_with_logits(logits, y.float(), reduction="none")
            loader.loss(losses, logits[:, None], y[:, None] if column else y)
    assert (loader.ledger.seen == 3).all()
    assert (loader.ledger.label == -1).all()
    assert sum("drawn anew" in text for text in warnings(loader)) == 1


def test_a_float_label_that_the_loop_makes_an_integer_is_no_misattribution():
    data = [{"x": torch.randn(C), "domain": i % 7, "label": float(i % 3)} for i in range(N)]
    loader = salience.Loader(data, 20, epochs=2)
    for _ in range(2):
        for batch in loader:
            y = batch["label"].long()
            loader.loss(F.cross_entropy(batch["x"], y, reduction="none"), batch["x"], y)
    np.testing.assert_array_equal(loader.ledger.label, np.arange(N) % 3)


def test_targets_that_differ_from_those_delivered_are_still_refused():
    loader = salience.Loader(Pairs(), 20, epochs=2)
    seen = [torch.randint(2, (20,)) for _ in range(2)]
    with pytest.raises(Misattributed):
        for _ in range(2):
            for k, (x, _) in enumerate(loader):
                loader.loss(x[:, 0], x, seen[k % 2])


def test_picked_samples_may_have_one_hot_targets_too():
    loader = salience.Loader(points(), 20, epochs=2, select="selective_backprop")
    for x, y in loader:
        loader.loss(F.cross_entropy(x, y, reduction="none"), x, F.one_hot(y, C))
    np.testing.assert_array_equal(loader.ledger.label, plain().label)


@pytest.mark.parametrize(
    ("logits", "targets", "said"),
    [
        ((torch.zeros(20, C), torch.zeros(20, C)), torch.zeros(20, dtype=torch.int64), "logits are a tuple"),
        ([[0.0] * C] * 20, torch.zeros(20), "logits are a list"),
        (torch.zeros(20, C).to_sparse(), torch.zeros(20, dtype=torch.int64), "logits are a tensor of layout"),
        (torch.zeros(20, 0), torch.zeros(20, dtype=torch.int64), r"must be \[20, classes\]"),
        (torch.zeros(20, C), [0] * 20, "targets are a list"),
        (torch.zeros(20, C), np.zeros(20), "targets are a ndarray"),
        (torch.zeros(20, C), {"labels": torch.zeros(20)}, "targets are a dict"),
        (torch.zeros(20, C), torch.eye(20, C).to_sparse(), "targets are a tensor of layout"),
    ],
)
def test_logits_and_targets_that_are_no_tensors_are_named(logits, targets, said):
    loader = salience.Loader(points(), 20)
    batches = iter(loader)
    next(batches)
    with pytest.raises(LossError, match=said):
        loader.loss(torch.ones(20), logits, targets)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_logits_are_named():
    loader = salience.Loader(points(), 20)
    batches = iter(loader)
    next(batches)
    with pytest.raises(LossError, match="logits are a nested tensor"):
        nested = torch.nested.nested_tensor([torch.zeros(C)] * 20)
        loader.loss(torch.ones(20), nested, torch.zeros(20, dtype=torch.int64))


@pytest.mark.parametrize("losses", [None, [1.0] * 20, 1.0, torch.ones(20, dtype=torch.int64)])
@pytest.mark.parametrize("caller", ["loss", "pick"])
def test_losses_that_are_no_tensor_of_floats_are_named(caller, losses):
    loader = salience.Loader(points(), 20, epochs=2)
    batches = iter(loader)
    next(batches)
    with pytest.raises(LossError, match=f"{caller}\\(\\) was given .*floating-point tensor"):
        getattr(loader, caller)(losses)
