"""Does |p - y| * sqrt(|h|^2 + 1), which needs a forward pass alone, rank samples as their exact gradient norm does?

p is the prediction, y the label, h what the last Linear layer is given: the norm of that layer's gradient (Paul et al. 2021,
GraNd, restricted to one layer). Exact is the norm over every parameter of the model, by one `torch.func` gradient per sample.

Embarrassing would be a rank correlation under .9 at any point of the run, or one that is no better than that of the loss.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from planted import digits, slim

CLASSES, BATCH = 10, 128


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    ranks = (np.argsort(np.argsort(values)).astype(np.float64) for values in (a, b))
    return float(np.corrcoef(*ranks)[0, 1])


def exact_norms(model: nn.Module, x: Tensor, y: Tensor) -> np.ndarray:
    """Gradient norm over all parameters for each sample, in evaluation mode, float64 [n]."""
    weights = {name: value.detach() for name, value in model.named_parameters()}
    buffers = dict(model.named_buffers())

    def loss(parameters: dict[str, Tensor], one: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, (parameters, buffers), (one[None],)), label[None])

    of_one = vmap(grad(loss), (None, 0, 0))
    squares = [
        sum(g.flatten(1).square().sum(1) for g in of_one(weights, a, b).values())
        for a, b in zip(x.split(64), y.split(64), strict=True)
    ]
    return torch.cat(squares).sqrt().double().numpy()


@torch.no_grad()
def forward_scores(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, np.ndarray]:
    """GraNd of the last layer, EL2N and the loss, from one forward pass each, float64 [n]."""
    given: list[Tensor] = []
    last = [layer for layer in model.modules() if isinstance(layer, nn.Linear)][-1]
    hook = last.register_forward_hook(lambda module, inputs, output: given.append(inputs[0]))
    logits = torch.cat([model(part) for part in x.split(500)])
    hook.remove()
    h = torch.cat(given)
    el2n = (logits.softmax(1) - F.one_hot(y, logits.shape[1])).norm(dim=1)
    grand = el2n * (h.square().sum(1) + 1).sqrt()
    loss = F.cross_entropy(logits, y, reduction="none")
    return {name: value.double().numpy() for name, value in (("grand", grand), ("el2n", el2n), ("loss", loss))}


def measure(*, quick: bool, seed: int = 0) -> dict[str, Any]:
    n, probe, epochs = (3000, 300, 12) if quick else (12000, 2000, 20)
    images = digits(n, seed)
    x, y = torch.from_numpy(images.x).float() / 255 - 0.5, torch.from_numpy(images.y)
    x = x.contiguous(memory_format=torch.channels_last)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = slim(x.shape[1])
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=epochs * -(-n // BATCH))
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, list[float]] = {"grand": [], "el2n": [], "loss": []}
    for epoch in range(epochs):
        model.train()
        for ids in torch.randperm(n, generator=generator).split(BATCH):
            loss = F.cross_entropy(model(x[ids]), y[ids])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        if epoch % 3 != 2:
            continue
        model.eval()
        truth = exact_norms(model, x[:probe], y[:probe])
        scores = forward_scores(model, x[:probe], y[:probe])
        rows = {name: round(spearman(score, truth), 3) for name, score in scores.items()}
        for name, value in rows.items():
            found[name].append(value)
        print(f"  epoch {epoch + 1}: mean loss {scores['loss'].mean():.3f}, rank correlations {rows}", flush=True)
    return {
        "grand_forward_rank_corr": round(min(found["grand"]), 4),
        "grand_forward_rank_corr_mean": round(float(np.mean(found["grand"])), 4),
        "el2n_rank_corr": round(min(found["el2n"]), 4),
        "loss_rank_corr": round(min(found["loss"]), 4),
    }
