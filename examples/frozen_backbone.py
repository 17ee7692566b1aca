"""Fine-tuning a head on a frozen backbone: features are computed once, and a Selector chooses among them."""

import torch
import torch.nn.functional as F
from torch import nn

import salience
from salience.app.glyphs import render

EPOCHS = 8

torch.manual_seed(0)
found = render(1500, seed=3)
images, labels = torch.from_numpy(found.images).unsqueeze(1) / 255.0, torch.from_numpy(found.labels)
backbone = nn.Sequential(  # stands in for a pre-trained network
    nn.Conv2d(1, 16, 5, 2), nn.ReLU(), nn.Conv2d(16, 32, 5, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(3), nn.Flatten()
).eval()
with torch.no_grad():
    features = torch.cat([backbone(part) for part in images.split(256)])

head = nn.Linear(features.shape[1], 10)
optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
# The features are also what near-copies are found by, from the first epoch on.
selector = salience.Selector(len(labels), batch_size=64, epochs=EPOCHS, select="default", embeddings=features.numpy())
schedule = salience.ProgressLR(optimizer, selector, "cosine")
for _ in range(EPOCHS):
    for ids, _weights in selector:
        logits = head(features[ids])
        loss = selector.loss(F.cross_entropy(logits, labels[ids], reduction="none"), logits, labels[ids])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
print(selector.report())
