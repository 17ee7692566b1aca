"""Per-sample statistics of a batch: reduced on its own device to thirteen numbers per sample, finished on the host."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from salience.ledger.columns import VOTES
from salience.ledger.likeliest import likeliest

LOSS_ROWS = ("loss",)
NORM_ROWS = ("grad_square", "grad_scale")
"""Known only after the backward pass, so they travel by themselves: |scale * gradient|^2 and the scale."""
FEATURE_ROWS = tuple(f"feature{k}" for k in range(128))
"""A sample's features; they go to the Embeddings, not into the ledger."""
TARGET_ROWS = ("loss", "target")
LIKELIEST_ROWS = tuple(f"log_{k}" for k in range(VOTES))
CLASS_ROWS = tuple(f"class_{k}" for k in range(VOTES))
LOGIT_ROWS = ("loss", "target", "log_label", "squares", "entropy", *LIKELIEST_ROWS, *CLASS_ROWS)
"""What travels: log p of the label, sum p^2, entropy, log p of the likeliest classes and which they are."""
MIN_LOG_P, NO_CLASS_LOG_P = -1e4, -2e4
"""log p is never below the first; a class that does not exist has the second."""
MAX_CLASSES_TRANSPOSED = 256
"""On the host, logits of at most this many classes are transposed: statistics are faster with classes along the first axis."""


def reduce_batch(losses: Tensor, logits: Tensor | None, targets: Tensor | None) -> tuple[tuple[str, ...], Tensor]:
    """Row names and a float32 [rows, B] matrix on the device of `losses`; nothing of the logits is retained.

    As few operations as possible: a training step waits for each of them, on a device for its launch. Classes travel as
    float32, which is exact up to 2^24.
    """
    loss = losses.detach()
    if targets is None:
        return LOSS_ROWS, loss.to(torch.float32, copy=True).unsqueeze_(0)
    with torch.no_grad():
        label = targets.detach().to(
            loss.device, non_blocking=loss.is_cuda
        )  # to a host that does not wait, it is not safe
        if logits is None:
            return TARGET_ROWS, torch.stack((loss.to(torch.float32), label.to(torch.float32)))
        z = logits.detach().to(loss.device, non_blocking=loss.is_cuda)
        if z.device.type == "cpu" and z.shape[1] <= MAX_CLASSES_TRANSPOSED:
            return LOGIT_ROWS, _reduce_few_classes(loss, z, label)
        log_p = torch.log_softmax(z, 1, dtype=torch.float32).clamp_min_(MIN_LOG_P)  # 0 log 0 = 0 where a logit is -inf
        p = log_p.exp()
        few = min(VOTES, z.shape[1])
        first, order = log_p.topk(few, 1)
        if few < VOTES:  # the last one again, with no probability
            first, order = F.pad(first, (0, VOTES - few), value=NO_CLASS_LOG_P), F.pad(order, (0, VOTES - few))
            order[:, few:] = order[:, few - 1 : few]
        label, place = _within(label, z.shape[1])
        picked = log_p.gather(1, place.unsqueeze(1))
        squares = torch.linalg.vecdot(p, p).unsqueeze(1)
        entropy = torch.linalg.vecdot(p, log_p).neg_().unsqueeze(1)
        columns = (loss.unsqueeze(1), label.unsqueeze(1), picked, squares, entropy, first, order)
        return LOGIT_ROWS, torch.cat([column.to(torch.float32) for column in columns], 1).t().contiguous()


def _reduce_few_classes(loss: Tensor, z: Tensor, label: Tensor) -> Tensor:
    """The same on the host, with the classes first: reductions over a short last axis are slow there."""
    log_p = torch.log_softmax(z.t().to(torch.float32, memory_format=torch.contiguous_format), 0).clamp_min_(MIN_LOG_P)
    p = log_p.exp()
    values = torch.empty((len(LOGIT_ROWS), len(loss)), dtype=torch.float32)
    rows = values.numpy()
    label, place = _within(label, z.shape[1])
    values[0], values[1] = loss, label
    torch.gather(log_p, 0, place.unsqueeze(0), out=values[2:3])
    torch.linalg.vecdot(p, p, dim=0, out=values[3])
    torch.linalg.vecdot(p, log_p, dim=0, out=values[4])
    values[4].neg_()
    few = min(VOTES, z.shape[1])
    first, order = likeliest(log_p.numpy())
    rows[5 : 5 + few], rows[5 + VOTES : 5 + VOTES + few] = first[:few], order[:few]
    rows[5 + few : 5 + VOTES], rows[5 + VOTES + few :] = NO_CLASS_LOG_P, order[few - 1]
    return values


def _within(label: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Labels with -1 for those that name none of the classes (ignore_index), and what can be used as an index."""
    place = label.to(torch.int64)
    inside = place.clamp(0, classes - 1)
    return torch.where(place == inside, place, -1), inside


def finish(rows: Mapping[str, npt.NDArray[np.float32]]) -> dict[str, npt.NDArray[np.float32]]:
    """The ledger's statistics from what travelled. With z the logits, p = softmax(z) and y the label:

    margin     = z_y - max_{j != y} z_j      (the same for log p; summed over visits: AUM, Pleiss et al. 2020)
    el2n       = |p - onehot(y)|             (Paul et al. 2021) = sqrt(sum p^2 - 2 p_y + 1)
    entropy    = -sum p log p
    confidence = p_y
    guess      = argmax z,  guess_p = p_guess,  other = argmax_{j != y} z_j
    grad_norm  = |scale * gradient| / |scale|, NaN where the scale is 0
    """
    if "grad_scale" in rows:
        scale = np.abs(rows["grad_scale"])
        scale[scale == 0] = np.nan
        return {"grad_norm": (np.sqrt(rows["grad_square"]) / scale).astype(np.float32)}
    if "log_label" not in rows:
        return dict(rows)
    log_label, top = rows["log_label"], rows["log_0"]
    second = np.where(rows["log_1"] == NO_CLASS_LOG_P, top, rows["log_1"])
    guess, next_guess = rows["class_0"], rows["class_1"]
    p_label = np.exp(log_label)
    p = {f"p_{k}": np.exp(rows[f"log_{k}"]) for k in range(VOTES)}
    right = guess == rows["target"]
    return {
        "loss": rows["loss"],
        "target": rows["target"],
        "margin": log_label - np.where(right, second, top),
        "el2n": np.sqrt(np.maximum(rows["squares"] - 2 * p_label + 1, 0)),
        "entropy": rows["entropy"],
        "confidence": p_label,
        "guess": guess,
        "other": np.where(right, next_guess, guess),
        "guess_p": p["p_0"],
        **p,
        **{name: rows[name] for name in CLASS_ROWS},
    }
