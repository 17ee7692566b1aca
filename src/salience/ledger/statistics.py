"""Per-sample statistics of a batch: reduced on its own device to thirteen numbers per sample, finished on the host."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from salience.ledger.columns import VOTES

LOSS_ROWS = ("loss",)
NORM_ROWS = ("grad_square", "grad_scale")
"""Known only after the backward pass, so they travel by themselves: |scale * gradient|^2 and the scale."""
FEATURE_ROWS = tuple(f"feature{k}" for k in range(128))
"""A sample's features; they go to the Embeddings, not into the ledger."""
TARGET_ROWS = ("loss", "target")
LIKELIEST = tuple(f"log_{k}" for k in range(VOTES))
CLASSES = tuple(f"class_{k}" for k in range(VOTES))
LOGIT_ROWS = ("loss", "target", "log_label", "squares", "entropy", *LIKELIEST, *CLASSES)
"""What travels: log p of the label, sum p^2, entropy, log p of the likeliest classes and which they are."""
NONE = -2e4
"""log p of a class that does not exist; clamped log p are never below -1e4."""


def reduce_batch(losses: Tensor, logits: Tensor | None, targets: Tensor | None) -> tuple[tuple[str, ...], Tensor]:
    """Row names and a float32 [rows, B] matrix on the device of `losses`; nothing of the logits is retained.

    As few and small operations as possible: a training step waits for each launch. Classes travel as
    float32, which is exact up to 2^24.
    """
    loss = losses.detach().to(torch.float32)
    if targets is None:
        return LOSS_ROWS, loss.clone().unsqueeze_(0)
    with torch.no_grad():
        label = targets.detach().to(device=loss.device)
        if logits is None:
            return TARGET_ROWS, torch.stack((loss, label.to(torch.float32)))
        z = logits.detach()
        # Reductions over a short last axis are slow on CPUs: classes go first where they are few.
        dim = 0 if z.shape[1] <= 64 and z.device.type == "cpu" else 1
        log_p = torch.log_softmax(z.t().contiguous() if dim == 0 else z, dim, dtype=torch.float32)
        log_p = log_p.clamp_min_(-1e4)  # 0 log 0 = 0 where a logit is -inf
        p = log_p.exp()
        few = min(VOTES, z.shape[1])
        first, order = log_p.topk(few, dim)
        picked = log_p.gather(dim, label.to(torch.int64).unsqueeze(dim)).select(dim, 0)
        squares, entropy = torch.linalg.vecdot(p, p, dim=dim), torch.linalg.vecdot(p, log_p, dim=dim)
        # Fewer classes than votes: the last one again, with no probability.
        values = [
            first.select(dim, min(k, few - 1)) if k < few else torch.full_like(picked, NONE) for k in range(VOTES)
        ]
        which = [order.select(dim, min(k, few - 1)) for k in range(VOTES)]
        return LOGIT_ROWS, torch.stack((loss, label, picked, squares, -entropy, *values, *which))


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
    second = np.where(rows["log_1"] == NONE, top, rows["log_1"])
    guess, next_guess = rows["class_0"], rows["class_1"]
    p_label = np.exp(log_label)
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
        "guess_p": np.exp(top),
        **{f"p_{k}": np.exp(rows[f"log_{k}"]) for k in range(VOTES)},
        **{name: rows[name] for name in CLASSES},
    }
