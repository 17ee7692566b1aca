"""Does influence on a validation set find wrong labels, where TracIn taken literally does not?

Planted: 20% wrong labels, symmetric, pair and instance-dependent, in one run that learns; 500 right labels beside it for
validation. Influence is that of the last layer, added up over checkpoints of the run (`salience.signals.influence`); AUROC of
finding the planted ones. Beside it, on the same checkpoints: TracIn as published (plain inner products), and the mean loss,
which needs no validation set and is the baseline. dattri and captum were looked at first (docs/decisions/0019-influence.md).

Embarrassing would be an AUROC under .9 for one kind of noise, or under that of the mean loss for all of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from planted import digits, planted, slim
from salience.signals.influence import Influence, LastLinear
from suspects import auroc

KINDS, SHARE, BATCH, VALIDATION = ("symmetric", "pair", "instance"), 0.2, 128, 500


def literal(h: torch.Tensor, z: torch.Tensor, y: torch.Tensor, vh: torch.Tensor, vz: torch.Tensor, vy: torch.Tensor):
    """TracIn as published: the inner product with the mean validation gradient, bias included."""
    r, vr = z.softmax(1) - F.one_hot(y, z.shape[1]), vz.softmax(1) - F.one_hot(vy, z.shape[1])
    h, vh = (torch.cat((a, torch.ones(len(a), 1)), 1) for a in (h, vh))
    return ((r @ (vr.T @ vh / len(vh))) * h).sum(1).numpy()


def measure(*, quick: bool, seed: int = 0) -> dict[str, Any]:
    n, epochs = (3000, 12) if quick else (12000, 20)
    figures: dict[str, Any] = {}
    for kind in KINDS:
        images = digits(n, seed)
        given = planted(images, kind, SHARE, seed)
        wrong = given != images.y
        mean, std = images.x.mean(), images.x.std()
        x, vx = ((torch.from_numpy(a).float() - mean) / std for a in (images.x, images.rest_x[:VALIDATION]))
        y, vy = torch.from_numpy(given), torch.from_numpy(images.rest_y[:VALIDATION])
        x = x.contiguous(memory_format=torch.channels_last)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = slim(x.shape[1])
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=epochs * -(-n // BATCH))
        generator = torch.Generator().manual_seed(seed)
        found, plain, loss, accuracy = Influence(n), np.zeros(n), np.zeros(n), []
        for epoch in range(epochs):
            model.train()
            for ids in torch.randperm(n, generator=generator).split(BATCH):
                step = F.cross_entropy(model(x[ids]), y[ids])
                optimizer.zero_grad()
                step.backward()
                optimizer.step()
                schedule.step()
            if epoch % 2 == 0:
                continue
            found.add(model, [(np.arange(n), x, y)], [(vx, vy)])
            model.eval()
            last = LastLinear(model)
            with torch.no_grad():
                z = model(x)
                h = last.given
                vz = model(vx)
            assert h is not None
            assert last.given is not None
            plain += literal(h, z, y, last.given, vz, vy)
            last.remove()
            loss += F.cross_entropy(z, y, reduction="none").numpy()
            accuracy.append((vz.argmax(1) == vy).float().mean().item())
        figures[f"influence_auroc_{kind}"] = round(auroc(found.score, wrong), 3)
        figures[f"tracin_literal_auroc_{kind}"] = round(auroc(-plain, wrong), 3)
        figures[f"mean_loss_auroc_{kind}"] = round(auroc(loss, wrong), 3)
        print(f"  {kind}: accuracy by checkpoint {[round(a, 2) for a in accuracy]}", flush=True)
    return {"influence_auroc": min(figures[f"influence_auroc_{kind}"] for kind in KINDS), **figures}
