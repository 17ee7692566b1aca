"""A plain loop: observe nothing changes, then select. Rendered digits, some of them with wrong labels on purpose."""

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import salience
from salience.app.glyphs import render
from salience.app.models import build

EPOCHS = 6

torch.manual_seed(0)
digits = render(2000, seed=0)
images = torch.from_numpy(digits.images).unsqueeze(1) / 255.0
data = TensorDataset(images, torch.from_numpy(digits.labels))
model = build("cnn", classes=10, channels=1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

loader = salience.Loader(data, batch_size=64, epochs=EPOCHS, select="default", log="plain.jsonl")
schedule = salience.ProgressLR(optimizer, loader, "one_cycle")

for _ in range(EPOCHS):
    for x, y in loader:
        logits = model(x)
        loss = loader.loss(F.cross_entropy(logits, y, reduction="none"), logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()

print(loader.report())
print("Draw it with: salience report plain.jsonl")
