"""Batches that wait to be handled together: copied, bounded, joined with their like, in order."""

from __future__ import annotations

import torch

from salience.ledger.collect import JOINED_ON_HOST, ON_HOST, Collected


def test_batches_are_joined_with_their_like_in_order():
    collected = Collected[str, int]()
    for k, (kind, columns) in enumerate([("a", 2), ("a", 2), ("a", 3), ("b", 3), ("b", 3), ("a", 2)]):
        collected.add(k, (torch.full((4,), float(k)), torch.full((4, columns), k)), kind)
    found = list(collected.take())
    assert [(kind, labels) for kind, labels, _ in found] == [("a", [0, 1]), ("a", [2]), ("b", [3, 4]), ("a", [5])]
    assert next(part.tolist() for _, _, (part, _) in found) == [0.0] * 4 + [1.0] * 4
    assert not list(collected.take())


def test_what_is_collected_is_bounded_in_batches_and_in_bytes():
    small, large = Collected[None, int](), Collected[None, int]()
    count = next(k for k in range(1000) if small.add(k, (torch.ones(2),), None))
    assert count == ON_HOST[0] - 1
    count = next(k for k in range(1000) if large.add(k, (torch.ones(1 << 16),), None))
    assert (count + 1) * 4 * (1 << 16) <= ON_HOST[1]
    pieces = [len(labels) for _, labels, _ in small.take()]
    assert sum(pieces) == ON_HOST[0]
    assert max(pieces) == JOINED_ON_HOST[0]
    assert max(len(labels) for _, labels, _ in large.take()) == JOINED_ON_HOST[1] // (4 << 16)


def test_a_batch_that_fills_it_alone_is_not_copied_and_others_are():
    collected, huge = Collected[None, int](), torch.ones(ON_HOST[1])
    assert collected.add(0, (huge,), None)
    ((_, _, (taken,)),) = collected.take()
    assert taken is huge
    losses = torch.ones(3, requires_grad=True)
    assert not collected.add(0, (losses, None), None)
    ((_, _, (taken, nothing)),) = collected.take()
    assert nothing is None
    assert not taken.requires_grad
    assert taken.data_ptr() != losses.data_ptr()
