"""Per-sample statistics of a batch, reduced on the batch's own device to a small float32 matrix."""

from __future__ import annotations

import torch
from torch import Tensor

LOSS_ROWS = ("loss",)
TARGET_ROWS = ("loss", "target")
LOGIT_ROWS = ("loss", "target", "margin", "el2n", "entropy", "confidence", "guess", "guess_p")


def reduce_batch(losses: Tensor, logits: Tensor | None, targets: Tensor | None) -> tuple[tuple[str, ...], Tensor]:
    """Row names and a float32 [rows, B] matrix on the device of `losses`; nothing of the logits is retained.

    With z the logits, p = softmax(z) and y the label:
        margin     = z_y - max_{j != y} z_j      (the same for log p; summed over visits: AUM, Pleiss et al. 2020)
        el2n       = |p - onehot(y)|             (Paul et al. 2021) = sqrt(sum p^2 - 2 p_y + 1)
        entropy    = -sum p log p
        confidence = p_y
        guess      = argmax z,  guess_p = p_guess
    Classes travel as float32, which is exact up to 2^24.
    """
    with torch.no_grad():
        loss = losses.detach().to(torch.float32)
        if targets is None:
            return LOSS_ROWS, loss.reshape(1, -1).clone()
        label = targets.detach().to(device=loss.device)
        if logits is None:
            return TARGET_ROWS, torch.stack((loss, label.to(torch.float32)))
        z = logits.detach().to(torch.float32)
        # Reductions over a short last axis are slow on CPUs: classes go first where they are few.
        dim = 0 if z.shape[1] <= 64 else 1
        index = label.to(torch.int64).unsqueeze(dim)
        log_p = torch.log_softmax(z.t().contiguous() if dim == 0 else z, dim)
        p = log_p.exp()
        log_label = log_p.gather(dim, index).squeeze(dim)
        p_label = log_label.exp()
        guess_p, guess = p.max(dim)
        el2n = ((p * p).sum(dim) - 2 * p_label + 1).clamp_min_(0).sqrt_()
        entropy = -(p * log_p.clamp_min(-1e4)).sum(dim)  # 0 log 0 = 0 where a logit is -inf
        margin = log_label - log_p.scatter_(dim, index, float("-inf")).amax(dim)
        return LOGIT_ROWS, torch.stack(
            (loss, label.to(torch.float32), margin, el2n, entropy, p_label, guess.to(torch.float32), guess_p)
        )
