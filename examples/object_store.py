"""Samples in a store, read as the plan needs them. A folder stands in for "s3://bucket/prefix": nothing else would change."""

import io
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import salience

EPOCHS = 3


def decode(data):
    """Bytes of a sample to a tensor."""
    return torch.from_numpy(np.load(io.BytesIO(data)))


rng = np.random.default_rng(0)
for label in range(3):
    folder = Path("store", f"class-{label}")
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(60):
        np.save(folder / f"{number}.npy", (rng.standard_normal(16) + label).astype(np.float32))

source = salience.Source("store", decode=decode, cache="16MiB")  # or "s3://...", "gs://...", "az://...", "https://..."
loader = salience.Loader(source, batch_size=30, epochs=EPOCHS, select="default")
model = nn.Linear(16, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(EPOCHS):
    for x, y in loader:
        logits = model(x)
        loss = loader.loss(F.cross_entropy(logits, y, reduction="none"), logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
print(loader.report())
