"""Data that already sits in memory, or on the GPU: a Selector gives ids and weights, and no DataLoader is needed."""

import torch
import torch.nn.functional as F
from torch import nn

import salience

EPOCHS, DEVICE = 10, "cuda" if torch.cuda.is_available() else "cpu"

g = torch.Generator().manual_seed(0)
x = torch.randn(4000, 32, generator=g)
y = (x @ torch.randn(32, 8, generator=g)).argmax(1)
x, y = x.to(DEVICE), y.to(DEVICE)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)).to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

selector = salience.Selector(len(x), batch_size=128, epochs=EPOCHS, select="infobatch", labels=y.cpu(), device=DEVICE)
schedule = salience.ProgressLR(optimizer, selector, "cosine")
for _ in range(EPOCHS):
    for ids, _weights in selector:
        logits = model(x[ids])
        loss = selector.loss(F.cross_entropy(logits, y[ids], reduction="none"), logits, y[ids])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()

accuracy = (model(x).argmax(1) == y).float().mean()
print(f"{selector.visits:,} visits instead of {EPOCHS * len(x):,}; accuracy {accuracy:.3f}")
