"""Handwritten digits of scikit-learn, or rendered ones where it is not installed; observed, and asked which look wrong."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import salience

try:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
except ImportError:
    from salience.app.glyphs import render

    digits = render(1800, seed=1)
    x, y = torch.from_numpy(digits.images).flatten(1) / 255.0, torch.from_numpy(digits.labels)

torch.manual_seed(0)
loader = salience.Loader(TensorDataset(x, y), batch_size=64)
model = nn.Sequential(nn.Linear(x.shape[1], 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for _ in range(10):
    for inputs, targets in loader:
        logits = model(inputs)
        loss = loader.loss(F.cross_entropy(logits, targets, reduction="none"), logits, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

print(loader.report())
hardest = loader.ledger.mean_loss.argsort()[-5:][::-1]
print("Look at these first:", [(int(i), f"labelled {int(y[i])}") for i in hardest])
