"""Losses of tokens: `loader.loss(token_losses, mask=mask)` with [B, T] each."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import salience
from salience.errors import LossError

N, T = 24, 7
LENGTHS = torch.arange(N) % T + 1


@pytest.fixture
def texts() -> TensorDataset:
    """24 sequences of up to 7 tokens, and how long each is."""
    return TensorDataset(torch.arange(N * T).reshape(N, T) % 11, LENGTHS)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(11, 5), nn.Linear(5, 11)

    def forward(self, tokens):
        return self.head(self.embed(tokens))


def masked(model, tokens, lengths):
    """Losses of the tokens, [B, T], and which of them count."""
    losses = F.cross_entropy(model(tokens).transpose(1, 2), (tokens * 3) % 11, reduction="none")
    return losses, torch.arange(T) < lengths[:, None]


def gradients(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def warnings(loader):
    return [event["text"] for event in loader.events.recent if event.kind == "warning"]


def first(texts, **options):
    loader = salience.Loader(texts, N, **options)
    return loader, *next(iter(loader))


def test_the_gradient_is_that_of_the_plain_masked_mean(texts):
    loader, tokens, lengths = first(texts)
    plain, ours = Model(), Model()
    losses, mask = masked(plain, tokens, lengths)
    (losses * mask).sum().div(mask.sum()).backward()
    losses, mask = masked(ours, tokens, lengths)
    loader.loss(losses, mask=mask).backward()
    torch.testing.assert_close(gradients(ours), gradients(plain), rtol=1e-5, atol=1e-7)


def test_the_ledger_has_the_mean_of_each_sample_over_its_own_tokens(texts):
    loader = salience.Loader(texts, N, with_ids=True)
    ids, (tokens, lengths) = next(iter(loader))
    losses, mask = masked(Model(), tokens, lengths)
    loader.loss(losses, mask=mask, ids=ids)
    wanted = [row[:length].mean().item() for row, length in zip(losses, lengths, strict=True)]
    np.testing.assert_allclose(loader.ledger.last_loss[ids], wanted, rtol=1e-5)
    assert (loader.ledger.trained == 1).all()


def test_selected_samples_have_the_weights_of_the_plan_on_top(texts):
    loader = salience.Loader(texts, 6, epochs=4, select="infobatch")
    for _ in range(2):
        for tokens, lengths in loader:
            losses, mask = masked(Model(), tokens, lengths)
            loss = loader.loss(losses, mask=mask)
    weights = torch.from_numpy(loader.plan.weights[-len(losses) :].copy())
    assert len(weights.unique()) > 1
    torch.testing.assert_close(loss, ((losses * mask).sum(1) * weights).sum() / mask.sum())


def test_a_mask_of_numbers_weighs_tokens(texts):
    loader, tokens, lengths = first(texts)
    losses, mask = masked(Model(), tokens, lengths)
    weights = mask * torch.rand(N, T)
    torch.testing.assert_close(loader.loss(losses, mask=weights), (losses * weights).sum() / weights.sum())


def test_losses_may_come_flat_as_cross_entropy_gives_them(texts):
    loader, tokens, lengths = first(texts)
    losses, mask = masked(Model(), tokens, lengths)
    torch.testing.assert_close(loader.loss(losses.flatten(), mask=mask), (losses * mask).sum() / mask.sum())


def test_what_the_mask_leaves_out_has_no_effect_even_if_it_is_nan(texts):
    loader, tokens, lengths = first(texts)
    model = Model()
    losses, mask = masked(model, tokens, lengths)
    loss = loader.loss(losses.masked_fill(~mask, float("nan")), mask=mask)
    loss.backward()
    torch.testing.assert_close(loss, (losses * mask).sum() / mask.sum())
    assert gradients(model).isfinite().all()


def test_a_sample_without_tokens_is_counted_and_has_no_part_in_the_gradient(texts):
    loader = salience.Loader(texts, N, with_ids=True)
    ids, (tokens, lengths) = next(iter(loader))
    model = Model()
    losses, mask = masked(model, tokens, lengths)
    mask[3] = False
    loss = loader.loss(losses, mask=mask, ids=ids)
    loss.backward()
    torch.testing.assert_close(loss, (losses * mask).sum() / mask.sum())
    assert gradients(model).isfinite().all()
    assert loader.ledger.bad[ids[3]] == 1
    assert loader.ledger.bad.sum() == 1
    assert np.isnan(loader.ledger.last_loss[ids[3]])
    assert any("without a token under their mask" in text for text in warnings(loader))


def test_a_batch_without_any_token_has_loss_zero_and_no_gradient(texts):
    loader, tokens, lengths = first(texts)
    model = Model()
    losses, mask = masked(model, tokens, lengths)
    loss = loader.loss(losses, mask=torch.zeros_like(mask))
    loss.backward()
    assert loss == 0
    assert (gradients(model) == 0).all()
    assert loader.ledger.bad.sum() == N


def test_a_loss_of_a_token_that_is_nan_is_counted_for_its_sample_alone(texts):
    loader = salience.Loader(texts, N, with_ids=True)
    ids, (tokens, lengths) = next(iter(loader))
    losses, mask = masked(Model(), tokens, lengths)
    losses = losses.detach()
    losses[5, 0] = float("nan")
    assert loader.loss(losses, mask=mask, ids=ids).isnan(), "as a plain mean would be: that is for the loop to handle"
    assert loader.ledger.bad[ids[5]] == 1
    assert loader.ledger.bad.sum() == 1
    assert np.isfinite(loader.ledger.last_loss).sum() == N - 1


def test_batches_of_a_step_add_up_to_the_masked_mean_of_all_their_tokens(texts):
    whole, parts = Model(), Model()
    loader, tokens, lengths = first(texts)
    losses, mask = masked(whole, tokens, lengths)
    loader.loss(losses, mask=mask).backward()
    loader, total = salience.Loader(texts, 8), LENGTHS.sum()
    for tokens, lengths in loader:
        losses, mask = masked(parts, tokens, lengths)
        loader.loss(losses, mask=mask, total=total).backward()
    torch.testing.assert_close(gradients(parts), gradients(whole), rtol=1e-5, atol=1e-7)


def test_picked_samples_are_trained_on_by_all_their_tokens(texts):
    loader = salience.Loader(texts, N, epochs=1, select="selective_backprop")
    tokens, lengths = next(iter(loader))
    losses, mask = masked(Model(), tokens, lengths)
    loader.loss(losses, mask=mask).backward()
    assert (loader.ledger.seen == 1).all()
    assert loader.ledger.trained.sum() == N // 2


def test_targets_of_tokens_are_left_aside_with_one_warning(texts):
    loader, tokens, lengths = first(texts)
    losses, mask = masked(Model(), tokens, lengths)
    loader.loss(losses, None, tokens, mask=mask)
    assert (loader.ledger.label == -1).all()
    assert any("one class per token" in text for text in warnings(loader))


def test_one_class_per_sample_goes_into_the_ledger(texts):
    loader = salience.Loader(texts, N, with_ids=True)
    ids, (tokens, lengths) = next(iter(loader))
    losses, mask = masked(Model(), tokens, lengths)
    loader.loss(losses, targets=lengths, mask=mask, ids=ids)
    assert (loader.ledger.label[ids] == lengths.numpy()).all()


@pytest.mark.parametrize(
    ("losses", "options", "said"),
    [
        (torch.ones(N, T), {}, "or pass mask= of the same shape"),
        (torch.ones(N, T), {"mask": torch.ones(N, T + 1)}, r"mask\[:, 1:\]"),
        (torch.ones(N, T), {"mask": torch.ones(N)}, r"one entry per token, \[B, T\]"),
        (torch.ones(N, T), {"mask": [[1] * T] * N}, "mask of tokens are a list"),
        (torch.ones(N, T), {"mask": -torch.ones(N, T)}, "weights of at least 0"),
        (torch.ones(N, T, dtype=torch.int64), {"mask": torch.ones(N, T)}, "floating-point tensor"),
        (torch.ones(N, T), {"mask": torch.ones(N, T), "counts": torch.ones(N)}, "leave out counts="),
        (torch.ones(N - 1, T), {"mask": torch.ones(N - 1, T)}, f"{N - 1} losses for a batch of {N}"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(texts, losses, options, said):
    loader, *_ = first(texts)
    with pytest.raises(LossError, match=said):
        loader.loss(losses, **options)
    loader.loss(torch.ones(N, T), mask=torch.ones(N, T))  # the batch still has its turn


def packed(tokens, lengths):
    """The sequences one behind another in rows of 20 tokens, as positions (sample, token), -1 where there is none."""
    flat = [(i, t) for i, length in enumerate(lengths.tolist()) for t in range(length)]
    flat += [(-1, -1)] * (-len(flat) % 20)
    return torch.tensor(flat).reshape(-1, 20, 2).unbind(2)


def test_packed_sequences_have_the_means_and_the_gradient_of_padded_ones(texts):
    padded_loader, tokens, lengths = first(texts)
    losses, mask = masked(Model(), tokens, lengths)
    wanted = padded_loader.loss(losses, mask=mask)
    loader, tokens, lengths = first(texts)
    parameter = torch.ones(1, requires_grad=True)
    segments, place = packed(tokens, lengths)
    rows = torch.where(segments >= 0, losses.detach()[segments, place], 9.0)
    loss = loader.loss(rows * parameter, segments=segments)
    torch.testing.assert_close(loss[()], wanted)
    loss.backward()
    torch.testing.assert_close(parameter.grad[0], wanted.detach())
    np.testing.assert_allclose(loader.ledger.last_loss, padded_loader.ledger.last_loss, rtol=1e-5)


def test_a_mask_may_leave_out_tokens_of_packed_sequences(texts):
    loader, tokens, lengths = first(texts)
    segments, place = packed(tokens, lengths)
    losses = torch.rand(segments.shape)
    loss = loader.loss(losses, segments=segments, mask=place > 0)  # those of length 1 have nothing left
    torch.testing.assert_close(loss, losses[place > 0].mean())
    assert loader.ledger.bad.sum() == int((lengths == 1).sum())


@pytest.mark.parametrize(
    ("segments", "said"),
    [
        (torch.full((3, 5), N), f"name sample {N} of a batch of {N}"),
        (torch.zeros(3, 5), "segments are torch.float32"),
        (torch.zeros(3, 4, dtype=torch.int64), r"of the shape of the losses|they must be equal"),
        ([0] * 15, "of tokens are a list"),
    ],
)
def test_segments_that_cannot_be_are_one_sentence(texts, segments, said):
    loader, *_ = first(texts)
    with pytest.raises(LossError, match=said):
        loader.loss(torch.ones(3, 5), segments=segments)
