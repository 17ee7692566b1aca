"""A loop that draws its own samples, here random pieces of one long text: an Observer records and touches nothing."""

import torch
import torch.nn.functional as F
from torch import nn

import salience

PIECE = 16

torch.manual_seed(0)
text = torch.randint(0, 20, (4000,))
text[::2] = 7  # so that there is something to learn
model = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 20))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
observer = salience.Observer(len(text) // PIECE)  # a sample is the piece in which an offset lies

for _ in range(200):
    offsets = torch.randint(len(text) - PIECE - 1, (16,))
    tokens = torch.stack([text[i : i + PIECE + 1] for i in offsets.tolist()])
    each = F.cross_entropy(model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:], reduction="none")
    loss = each.mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    observer.record(offsets // PIECE, each.mean(dim=1))

print(observer.report())
