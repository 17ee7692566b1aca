"""A plain loop under Accelerate; run as a script it is one rank of two."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import TensorDataset

import salience

N = 64


def data(n: int = N) -> TensorDataset:
    g = torch.Generator().manual_seed(3)
    x = torch.randn(n, 8, generator=g)
    return TensorDataset(x, (x @ torch.randn(8, 4, generator=g)).argmax(1))


def train(
    batch_size: int,
    group: int = 1,
    *,
    select: Any = None,
    epochs: int = 5,
    save: tuple[int, Path] | None = None,
    load: Path | None = None,
):
    """Train to the end, or save after so many batches and stop there, or go on from there."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=group)
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    loader = salience.Loader(data(), batch_size, epochs=epochs, select=select, device=accelerator.device)
    model, optimizer, prepared = accelerator.prepare(model, optimizer, loader)
    assert prepared is loader
    accelerator.register_for_checkpointing(loader)
    if load is not None:
        accelerator.load_state(str(load))
    steps = 0
    for _ in range(loader.epoch, epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                logits = model(x)
                accelerator.backward(loader.loss(F.cross_entropy(logits, y, reduction="none"), logits, y))
                optimizer.step()
                optimizer.zero_grad()
            steps += 1
            if save is not None and steps == save[0]:
                accelerator.save_state(str(save[1]))
                return accelerator, loader, accelerator.unwrap_model(model)
    return accelerator, loader, accelerator.unwrap_model(model)


if __name__ == "__main__":
    out, *cases = sys.argv[1:]
    for case in cases:
        group, select = case.split(":")
        accelerator, loader, model = train(8 // int(group), int(group), select=select or None)
        found = {"parameters": model.weight.detach().clone(), "loader": loader.state_dict()}
        torch.save(found, f"{out}/{case}:{accelerator.process_index}.pt")
