"""What the trials of the Ray tests train: a linear model on packed points, which its processes import by this name."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import salience
from salience.frameworks import ray as salience_ray

N, CLASSES = 240, 3


def write_points(folder: Path) -> Path:
    """N points in 8 dimensions, one file each, in class folders."""
    rng = np.random.default_rng(0)
    for i in range(N):
        label = i % CLASSES
        file = folder / f"c{label}" / f"{i:04}.bin"
        file.parent.mkdir(parents=True, exist_ok=True)
        point = rng.normal(size=8).astype(np.float32)
        point[label] += 2
        file.write_bytes(point.tobytes())
    return folder


def decode(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(data, dtype=np.float32).copy())


def accuracy(model: nn.Module, data: Any) -> float:
    source = data.source if isinstance(data, salience.SharedFeed) else data
    x = torch.stack([decode(one) for one in source.read(range(N))])
    return float((model(x).argmax(1).numpy() == source.labels).mean())


def train(config: dict[str, Any], trial: salience_ray.Trial) -> None:
    """A trial that notes what it does in config["notes"], a folder."""
    loader = trial.loader(
        batch_size=20, epochs=config.get("epochs", 4), select=config.get("select"), seed=config.get("seed", 0)
    )
    torch.manual_seed(0)
    model = nn.Linear(8, CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    resumed = trial.restore(model=model, optimizer=optimizer)
    _note(config, f"began {os.getpid()} {loader.epoch} {int(resumed)} {trial.known} {int(loader.ledger.seen.any())}")
    for epoch in range(loader.epoch, config.get("epochs", 4)):
        for x, y in loader:
            logits = model(x)
            loss = loader.loss(F.cross_entropy(logits, y, reduction="none"), logits, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if config.get("mid") and epoch == 1:
                trial.report({"accuracy": 0.0})
        if config.get("dies") == epoch and not resumed:
            os._exit(1)
        time.sleep(config.get("pause", 0.0))
        trial.report({"accuracy": accuracy(model, trial.data)}, model=model, optimizer=optimizer)
    _note(config, f"ended {os.getpid()}")


def _note(config: dict[str, Any], text: str) -> None:
    if "notes" in config:
        with open(Path(config["notes"]) / f"{config['lr']}.txt", "a") as file:
            file.write(f"{text}\n")


def train_ranks(config: dict[str, Any]) -> None:
    """The loop of a TorchTrainer: two ranks, a Loader inside, a checkpoint per epoch."""
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, CLASSES))
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = salience.Loader(
        salience.Source(config["data"], decode=decode), 10, epochs=3, select="uniform", seed=1, with_ids=True
    )
    resumed = salience_ray.restore(loader=loader, model=model, optimizer=optimizer)
    for epoch in range(loader.epoch, 3):
        seen = []
        for ids, (x, y) in loader:
            logits = model(x)
            loss = loader.loss(F.cross_entropy(logits, y, reduction="none"), logits, y, ids)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen += ids.tolist()
        weight = float(model.module.weight.double().sum().detach())
        with open(Path(config["notes"]) / f"{epoch}-{loader.rank}.txt", "a") as file:
            file.write(f"{int(resumed)} {weight:.12f} {','.join(map(str, seen))}\n")
        salience_ray.report({"epoch": epoch, "weight": weight}, loader=loader, model=model, optimizer=optimizer)
        if config.get("dies") == epoch and not resumed and loader.rank == 1:
            os._exit(1)
