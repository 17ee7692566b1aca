"""Images with planted wrong labels and one plain, observed training run over them: the rig of benchmarks/suspects.py."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import salience
from cifar import corrupt, load
from salience.app.glyphs import render
from salience.ledger import Ledger
from salience.ledger.columns import VOTE_DECAY

BATCH = 128
CLASSES = 10


@dataclass(frozen=True, kw_only=True)
class Images:
    """A data set and images beside it, from which a weak model learns which mistakes are likely."""

    x: np.ndarray
    """uint8 [n, channels, side, side]."""
    y: np.ndarray
    """int64 [n], right."""
    rest_x: np.ndarray
    rest_y: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Observed:
    """What one run in observe mode leaves behind."""

    ledger: Ledger
    predictions: np.ndarray
    """Predictions of all visits, averaged as the ledger averages its votes, but over all classes, float32 [n, classes]."""
    wrong: np.ndarray
    """bool [n]: the label was planted."""


def digits(n: int, seed: int) -> Images:
    drawn = render(n + 2000, size=24, copies=0, wrong=0, hard=0.1, seed=seed)
    x, y = drawn.images[:, None], drawn.true_labels
    return Images(x=x[:n], y=y[:n], rest_x=x[n:], rest_y=y[n:])


def images_of(source: str, n: int, seed: int) -> Images:
    """`n` images of a folder of idx files (MNIST's format) or of CIFAR-10 as an archive or a folder."""
    path = Path(source)
    if path.is_dir() and (path / "train-images-idx3-ubyte.gz").exists():
        pixels = np.frombuffer(gzip.decompress((path / "train-images-idx3-ubyte.gz").read_bytes()), np.uint8, offset=16)
        labels = np.frombuffer(gzip.decompress((path / "train-labels-idx1-ubyte.gz").read_bytes()), np.uint8, offset=8)
        x, y = pixels.reshape(-1, 1, 28, 28), labels.astype(np.int64)
    else:
        data = load(source)
        x, y = data["train_x"], data["train_y"]
    order = np.random.default_rng(seed).permutation(len(y))
    rest = order[n : n + 6000]
    return Images(x=x[order[:n]], y=y[order[:n]], rest_x=x[rest], rest_y=y[rest])


def planted(images: Images, kind: str, share: float, seed: int) -> np.ndarray:
    """Labels with `share` of them wrong: "symmetric", "pair", "instance" (what a weak model confuses) or "clean"."""
    if kind == "clean":
        return images.y.copy()
    if kind != "instance":
        return corrupt(images.y, kind, share, seed, CLASSES)
    p = _weak(images, seed)
    p[np.arange(len(p)), images.y] = 0
    risk = p.max(1)
    rng = np.random.default_rng((seed, 79))
    wrong = rng.choice(len(p), round(share * len(p)), replace=False, p=risk / risk.sum())
    out = images.y.copy()
    out[wrong] = p[wrong].argmax(1)
    return out


def conv(a: int, b: int, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True)]


class Residual(nn.Module):
    """Two convolutions beside the identity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(*conv(width, width), *conv(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def slim(channels: int) -> nn.Module:
    """A residual network small enough for one CPU core."""
    model = nn.Sequential(
        *conv(channels, 16, 2), *conv(16, 32), nn.MaxPool2d(2), Residual(32), *conv(32, 64), nn.MaxPool2d(2),
        Residual(64), nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES),
    )  # fmt: skip
    return model.to(memory_format=torch.channels_last)


def observe(images: Images, given: np.ndarray, *, epochs: int, seed: int) -> Observed:
    """Train on the labels as given, in observe mode: plain shuffled passes, one cycle of the learning rate."""
    x, y = _scaled(images.x, images.x), torch.from_numpy(given)
    selector = salience.Selector(len(y), batch_size=BATCH, epochs=epochs, labels=y, seed=seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = slim(x.shape[1])
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
    generator = torch.Generator().manual_seed(seed)
    mean = torch.zeros(len(y), CLASSES)
    for epoch in range(epochs):
        for ids, _ in selector:
            done = selector.progress
            for group in optimizer.param_groups:
                group["lr"] = 0.2 * min(done / 0.2 + 0.02, max(0.0, (1 - done) / 0.8))
            logits = model(_augmented(x[ids], generator))
            loss = selector.loss(F.cross_entropy(logits, y[ids], reduction="none"), logits, y[ids])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            p, decay = logits.detach().softmax(1), VOTE_DECAY if epoch else 0.0
            mean[ids] = decay * mean[ids] + (1 - decay) * p
    return Observed(ledger=selector.ledger, predictions=mean.numpy(), wrong=given != images.y)


def _weak(images: Images, seed: int) -> np.ndarray:
    """Probabilities of a model trained for four passes on other images, float64 [n, classes]."""
    x, ask = _scaled(images.rest_x, images.x), _scaled(images.x, images.x)
    y = torch.from_numpy(images.rest_y)
    with torch.random.fork_rng():
        torch.manual_seed(seed + 99)
        model = slim(x.shape[1])
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    for _ in range(4):
        for ids in torch.randperm(len(y), generator=generator).split(BATCH):
            loss = F.cross_entropy(model(x[ids]), y[ids])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        return torch.cat([model(part).softmax(1) for part in ask.split(1000)]).numpy().astype(np.float64)


def _scaled(x: np.ndarray, like: np.ndarray) -> Tensor:
    scaled = (torch.from_numpy(np.ascontiguousarray(x)).float() - float(like.mean())) / float(like.std())
    return scaled.contiguous(memory_format=torch.channels_last)


def _augmented(x: Tensor, generator: torch.Generator) -> Tensor:
    """Moved by up to two pixels, the whole batch alike."""
    dx, dy = torch.randint(-2, 3, (2,), generator=generator).tolist()
    return torch.roll(x, (dy, dx), (2, 3))
